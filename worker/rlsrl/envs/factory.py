"""Makes environments from a Gymnasium id, the user's own factory or an environment server, and wraps them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from rlsrl.api.spec import VectorActions
from rlsrl.api.spec.environment import PLACE_ARGUMENT
from rlsrl.data.specs import EnvSpec
from rlsrl.envs.faults import not_made
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.mujoco import log_mujoco_warnings
from rlsrl.envs.place import EnvironmentPlace
from rlsrl.envs.unreachable import EnvironmentUnreachable
from rlsrl.runtime.errors import USERS_ERRORS, ConfigurationError, did_you_mean
from rlsrl.runtime.extras import EXTRAS, NotInstalled, extras_named, pip_install
from rlsrl.runtime.references import load_callable

if TYPE_CHECKING:
    import gymnasium

    from rlsrl.envs.http.options import HttpOptions

_Made = TypeVar("_Made")

_PLUGINS = {"ALE": "ale_py"}
"""Namespaces whose ids are registered by importing a module."""


@dataclass(frozen=True, kw_only=True)
class AtariOptions:
    """The usual preprocessing of Atari games by ``gymnasium.wrappers.AtariPreprocessing``."""

    frame_skip: int
    """Frames for which each action is repeated."""
    screen_size: int
    """Height and width of an observation."""
    noop_max: int
    """Upper bound of the random number of no-op frames at the start of a game."""
    terminal_on_life_loss: bool
    """Whether an episode ends with each life (``wrappers.EpisodicLife``)."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSource:
    """How an environment is made: by exactly one of ``id``, ``factory`` and ``http``, plus wrappers."""

    id: str | None = None
    """A Gymnasium id, for example ``"CartPole-v1"``."""
    factory: str | None = None
    """``"package.module:callable"``; the callable returns a ``gymnasium.Env``."""
    http: HttpOptions | None = None
    """The environment server."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``gymnasium.make`` or of the factory, also of those in the server."""
    place: EnvironmentPlace | None = None
    """Passed as the keyword argument ``place``; None: not passed."""
    atari: AtariOptions | None = None
    """Preprocessing of Atari games; None: no preprocessing."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated; None: no limit is added."""
    frame_stack: int | None = None
    """How many of the last observations are stacked on a new first axis; None: observations are not stacked."""
    action_mask: str | None = None
    """The key of the action mask in the observation or in info (``wrappers.ActionMask``); None: no mask."""
    vector_actions: VectorActions = "gaussian"
    """How actions are drawn that are vectors of floats. Except for ``gaussian`` they are scaled to the environment's
    bounds (``bounded.BoundedActions``)."""

    def __post_init__(self) -> None:
        if [self.id, self.factory, self.http].count(None) != 2:
            raise ConfigurationError(
                f"environment has id={self.id!r}, factory={self.factory!r} and http={self.http!r}; "
                "set exactly one of them"
            )

    @property
    def arguments(self) -> Mapping[str, Any]:
        """All keyword arguments."""
        return self.kwargs if self.place is None else {**self.kwargs, PLACE_ARGUMENT: self.place}

    @override
    def __str__(self) -> str:
        if self.http is not None:
            return f"environment at {self.http.url}"
        return f"environment {self.id or self.factory!r}"


def make_environment(source: EnvironmentSource) -> gymnasium.Env[Any, Any]:
    """Return one environment with its wrappers. The caller closes it.

    Raises:
        ConfigurationError: the id, module or attribute does not exist (with the nearest match), a package is not
            installed (with the command), the environment does not take the arguments, the factory returns no
            ``gymnasium.Env``, an environment server refuses the arguments, or a wrapper does not fit.
        EnvironmentUnreachable: the environment server does not answer.
        Exception: the environment's own code raised something else; another try may succeed.
    """
    try:
        with extras_named():
            env = _unwrapped(source)
    except NotInstalled as error:
        raise ConfigurationError(f"{source}: {error}") from error
    try:
        return _wrapped(env, source)
    except BaseException:
        env.close()
        raise


def environment_spec(source: EnvironmentSource) -> EnvSpec:
    """Return the spec of ``environment_interface``, and raise its errors."""
    return environment_interface(source).spec


def environment_interface(source: EnvironmentSource) -> EnvironmentInterface:
    """Return the interface of the environments of ``source``. Makes one environment and closes it.

    Raises:
        ConfigurationError: as ``make_environment``, or a space is not supported.
        EnvironmentUnreachable: the environment server does not answer.
        EnvironmentFailed: the environment's own code raised another error.
    """
    try:
        env = make_environment(source)
    except (ConfigurationError, EnvironmentUnreachable):
        raise
    except USERS_ERRORS as error:
        raise not_made(str(source), error) from error
    try:
        return EnvironmentInterface.of(env)
    finally:
        env.close()


def make_in_bulk(source: EnvironmentSource, num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any] | None:
    """Return ``num_envs`` environments in the vectorised form of the id, or None if the id has none.

    The caller closes them. Only the source's id and arguments count, and how it wants actions to be drawn.

    Raises:
        ConfigurationError: as ``make_environment``.
    """
    import gymnasium

    from rlsrl.envs.bounded import BoundedVectorActions, are_vectors

    def make(name: str) -> gymnasium.vector.VectorEnv[Any, Any, Any] | None:
        if gymnasium.spec(name).vector_entry_point is None:
            return None
        return gymnasium.make_vec(name, num_envs, vectorization_mode="vector_entry_point", **source.arguments)

    envs = _registered(source, make)
    if envs is None or source.vector_actions == "gaussian" or not are_vectors(envs.single_action_space):
        return envs
    try:
        return BoundedVectorActions(envs, source.vector_actions)
    except BaseException:
        envs.close()
        raise


def check_reference(source: EnvironmentSource) -> None:
    """Check that the id or the factory of ``source`` exists. Makes no environment: it may need further arguments.

    Raises:
        ConfigurationError: as ``make_environment``.
    """
    import gymnasium

    if source.factory is not None:
        load_callable(source.factory, where="environment factory")
    else:
        _registered(source, gymnasium.spec)


def _unwrapped(source: EnvironmentSource) -> gymnasium.Env[Any, Any]:
    if source.http is not None:
        return _make_in_server(source, source.http)
    return _make_registered(source) if source.factory is None else _make_by_factory(source, source.factory)


def _make_in_server(source: EnvironmentSource, options: HttpOptions) -> gymnasium.Env[Any, Any]:
    try:
        from rlsrl.envs.http.client import HttpEnv
    except ImportError as error:
        raise _not_installed(source, error) from error
    return HttpEnv(options, kwargs=source.kwargs, place=source.place)


def _make_registered(source: EnvironmentSource) -> gymnasium.Env[Any, Any]:
    import gymnasium

    # Gymnasium's checker wraps every step. `rlsrl.envs.check` checks once instead.
    return _registered(source, lambda name: gymnasium.make(name, disable_env_checker=True, **source.arguments))


def _registered(source: EnvironmentSource, make: Callable[[str], _Made]) -> _Made:
    """Return the result of ``make`` for the source's id, once the id is registered."""
    import gymnasium

    name = str(source.id)
    if source.atari is not None:
        _import_plugin("ALE", source)  # also registers ids without a namespace, such as PongNoFrameskip-v4
    elif "/" in name:
        _import_plugin(name.partition("/")[0], source)
    try:
        _import_module_of(gymnasium.registry.get(name))
        log_mujoco_warnings()
        return make(name)
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigurationError(f"{source}: {error}{did_you_mean(name, gymnasium.registry)}") from error
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise _not_installed(source, error) from error
    except (gymnasium.error.Error, TypeError) as error:
        raise ConfigurationError(f"{source}: {error}") from error


def _not_installed(source: EnvironmentSource, error: Exception) -> ConfigurationError:
    """Return the error about a module that cannot be imported, with the extra that installs it."""
    causes = (error, error.__cause__, error.__context__)
    name = next((each.name for each in causes if isinstance(each, ImportError) and each.name), "").partition(".")[0]
    if (extra := EXTRAS.get(name)) is None:
        return ConfigurationError(f"{source}: {error}")
    return ConfigurationError(f"{source} needs the package {name!r}, which is not installed; run: {pip_install(extra)}")


def _import_plugin(namespace: str, source: EnvironmentSource) -> None:
    if namespace not in _PLUGINS:
        return
    try:
        importlib.import_module(_PLUGINS[namespace])
    except ImportError as error:
        raise _not_installed(source, error) from error


def _import_module_of(spec: gymnasium.envs.registration.EnvSpec | None) -> None:
    """Import the module that making an environment of that spec would import first."""
    if spec is not None and isinstance(spec.entry_point, str):
        importlib.import_module(spec.entry_point.partition(":")[0])


def _make_by_factory(source: EnvironmentSource, reference: str) -> gymnasium.Env[Any, Any]:
    import gymnasium

    factory = load_callable(reference, where="environment factory")
    _check_arguments(source, factory)
    log_mujoco_warnings()
    try:
        env = factory(**source.arguments)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigurationError(f"{source}: {error}") from error
    if not isinstance(env, gymnasium.Env):
        returned = "None" if env is None else f"an object of type {type(env).__name__}"
        raise ConfigurationError(f"{source} returned {returned}, not a gymnasium.Env")
    return env


def _check_arguments(source: EnvironmentSource, factory: Callable[..., Any]) -> None:
    """Refuse wrong arguments before the call: a TypeError inside the factory is the factory's own failure."""
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return  # a built-in without a signature
    try:
        signature.bind(**source.arguments)
    except TypeError as error:
        if repr(PLACE_ARGUMENT) not in str(error):
            unknown = next((name for name in source.kwargs if name not in signature.parameters), "")
            hint = did_you_mean(unknown, signature.parameters)
        elif source.place is None:
            hint = "; set environment.passPlace: true, which passes it"
        else:
            hint = f"; add the parameter {PLACE_ARGUMENT!r}, or remove environment.passPlace, which passes it"
        raise ConfigurationError(f"{source} does not take these kwargs: {error}{hint}") from error


def _wrapped(env: gymnasium.Env[Any, Any], source: EnvironmentSource) -> gymnasium.Env[Any, Any]:
    """Return the environment in the wrappers of its source, applied from the inside out."""
    from gymnasium.wrappers import FrameStackObservation, TimeLimit

    from rlsrl.envs.bounded import BoundedActions, are_vectors
    from rlsrl.envs.wrappers import ActionMask, EpisodicLife

    if source.atari is not None:
        env = _preprocessed(env, source, source.atari)
    if source.max_episode_steps is not None:
        env = TimeLimit(env, source.max_episode_steps)
    if source.atari is not None and source.atari.terminal_on_life_loss:
        env = EpisodicLife(env)
    if source.frame_stack is not None:
        env = FrameStackObservation(env, source.frame_stack)
    if source.action_mask is not None:
        env = ActionMask(env, source.action_mask)
    if source.vector_actions != "gaussian" and are_vectors(env.action_space):
        env = BoundedActions(env, source.vector_actions)
    return env


def _preprocessed(
    env: gymnasium.Env[Any, Any], source: EnvironmentSource, atari: AtariOptions
) -> gymnasium.Env[Any, Any]:
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing

    if not hasattr(env.unwrapped, "ale"):
        raise ConfigurationError(f"{source}: {env.unwrapped} is not an Atari game; remove `atari`")
    if getattr(env.unwrapped, "_frameskip", 1) != 1:
        raise ConfigurationError(
            f"{source} skips frames itself, but preprocessing needs each frame; set kwargs: {{frameskip: 1}}"
        )
    try:
        import cv2

        cv2.setNumThreads(0)  # waking threads takes longer than resizing one small image
        return AtariPreprocessing(
            env, frame_skip=atari.frame_skip, screen_size=atari.screen_size, noop_max=atari.noop_max
        )
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise _not_installed(source, error) from error
