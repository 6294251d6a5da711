"""Making environments from what an experiment names, a Gymnasium id or the user's own factory, and wrapping them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rlsrl.data.specs import EnvSpec
from rlsrl.envs.mujoco import log_mujoco_warnings
from rlsrl.envs.spaces import spec_of
from rlsrl.runtime.errors import ConfigurationError, did_you_mean
from rlsrl.runtime.references import load_callable

if TYPE_CHECKING:
    import gymnasium

_Made = TypeVar("_Made")

_PLUGINS = {"ALE": ("ale_py", "ale-py")}
"""Namespaces of ids whose package has to be imported to register them: (module, what to install)."""


@dataclass(frozen=True, kw_only=True)
class AtariOptions:
    """The usual preprocessing of Atari games: see ``gymnasium.wrappers.AtariPreprocessing``."""

    frame_skip: int
    """Frames that each action is repeated for."""
    screen_size: int
    """Height and width of an observation."""
    noop_max: int
    """Most frames that nothing is done for at the start of a game; their number is drawn."""
    terminal_on_life_loss: bool
    """Whether an episode ends with each life (``wrappers.EpisodicLife``)."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSource:
    """Where environments come from: exactly one of ``id`` and ``factory``."""

    id: str | None = None
    """A Gymnasium id, for example ``"CartPole-v1"``."""
    factory: str | None = None
    """``"package.module:callable"``; the callable returns a ``gymnasium.Env``."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``gymnasium.make`` or of the factory."""
    atari: AtariOptions | None = None
    """Preprocessing, for Atari games; None: none."""
    max_episode_steps: int | None = None
    """Steps after which an episode is truncated, if nothing ends it before; None: nothing else does."""
    frame_stack: int | None = None
    """How many of the last observations make one, on a new first axis; None: observations stay as they are."""
    action_mask: str | None = None
    """The key of observation or info under which the environment says what is legal (``wrappers.ActionMask``)."""

    def __post_init__(self) -> None:
        if (self.id is None) == (self.factory is None):
            raise ConfigurationError(
                f"an environment has exactly one of id and factory, not id={self.id!r} and factory={self.factory!r}"
            )

    def __str__(self) -> str:
        return f"environment {self.id or self.factory!r}"


def make_environment(source: EnvironmentSource) -> gymnasium.Env[Any, Any]:
    """One environment with its wrappers, to be closed by the caller.

    Raises:
        ConfigurationError: no such id, module or attribute (with the nearest match), a package that is not installed
            (with the cure), arguments the environment does not take, a factory that returns no ``gymnasium.Env``, or
            wrappers that do not fit.
        Exception: whatever else the environment's own code raises: a second try may go better.
    """
    env = _make_registered(source) if source.factory is None else _make_own(source, source.factory)
    try:
        return _wrapped(env, source)
    except BaseException:
        env.close()
        raise


def environment_spec(source: EnvironmentSource) -> EnvSpec:
    """What the environments of ``source`` give and take; makes one and closes it again.

    Raises:
        ConfigurationError: as ``make_environment``, or a space that is not supported.
    """
    env = make_environment(source)
    try:
        return spec_of(env)
    finally:
        env.close()


def make_in_bulk(source: EnvironmentSource, num_envs: int) -> gymnasium.vector.VectorEnv[Any, Any, Any] | None:
    """So many environments as they are registered to be stepped in bulk, to be closed by the caller; None if they are
    not. For sources of an id and arguments: nothing is put around.

    Raises:
        ConfigurationError: as ``make_environment``.
    """
    import gymnasium

    def make(name: str) -> gymnasium.vector.VectorEnv[Any, Any, Any] | None:
        if gymnasium.spec(name).vector_entry_point is None:
            return None
        return gymnasium.make_vec(name, num_envs, vectorization_mode="vector_entry_point", **source.kwargs)

    return _registered(source, make)


def _make_registered(source: EnvironmentSource) -> gymnasium.Env[Any, Any]:
    import gymnasium

    # The checker wraps every step; `rlsrl.envs.check` looks once instead.
    return _registered(source, lambda name: gymnasium.make(name, disable_env_checker=True, **source.kwargs))


def _registered(source: EnvironmentSource, make: Callable[[str], _Made]) -> _Made:
    """What ``make`` makes of the source's id."""
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
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigurationError(f"{source}: {error}") from error


def _import_plugin(namespace: str, source: EnvironmentSource) -> None:
    if namespace not in _PLUGINS:
        return
    module, package = _PLUGINS[namespace]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"{source} needs the package {package!r}, which is not installed: pip install {package}"
        ) from error


def _import_module_of(spec: gymnasium.envs.registration.EnvSpec | None) -> None:
    """What making an environment of that spec would import first."""
    if spec is not None and isinstance(spec.entry_point, str):
        importlib.import_module(spec.entry_point.partition(":")[0])


def _make_own(source: EnvironmentSource, reference: str) -> gymnasium.Env[Any, Any]:
    import gymnasium

    make = load_callable(reference, where="environment factory")
    _check_arguments(source, make)
    log_mujoco_warnings()
    try:
        env = make(**source.kwargs)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigurationError(f"{source}: {error}") from error
    if not isinstance(env, gymnasium.Env):
        returned = "None" if env is None else f"an object of type {type(env).__name__}"
        raise ConfigurationError(f"{source} returned {returned}, not a gymnasium.Env")
    return env


def _check_arguments(source: EnvironmentSource, make: Callable[..., Any]) -> None:
    """Tell wrong arguments from a TypeError inside the factory, which is the factory's own failure."""
    try:
        signature = inspect.signature(make)
    except ValueError:
        return  # a built-in that does not say what it takes
    try:
        signature.bind(**source.kwargs)
    except TypeError as error:
        unknown = next((name for name in source.kwargs if name not in signature.parameters), "")
        hint = did_you_mean(unknown, signature.parameters)
        raise ConfigurationError(f"{source}: kwargs {dict(source.kwargs)}: {error}{hint}") from error


def _wrapped(env: gymnasium.Env[Any, Any], source: EnvironmentSource) -> gymnasium.Env[Any, Any]:
    """The environment in the wrappers that are asked for, from the inside out."""
    from gymnasium.wrappers import FrameStackObservation, TimeLimit

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
    return env


def _preprocessed(
    env: gymnasium.Env[Any, Any], source: EnvironmentSource, atari: AtariOptions
) -> gymnasium.Env[Any, Any]:
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing

    if not hasattr(env.unwrapped, "ale"):
        raise ConfigurationError(f"{source}: {env.unwrapped} is no Atari game, so that `atari` is not for it")
    if getattr(env.unwrapped, "_frameskip", 1) != 1:
        raise ConfigurationError(
            f"{source} skips frames itself, where each frame is needed: set kwargs: {{frameskip: 1}}"
        )
    try:
        import cv2

        cv2.setNumThreads(0)  # one small image at a time is not worth waking others for
        return AtariPreprocessing(
            env, frame_skip=atari.frame_skip, screen_size=atari.screen_size, noop_max=atari.noop_max
        )
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise ConfigurationError(
            f"{source} needs the package 'opencv-python-headless' for its preprocessing, which is not installed: "
            "pip install opencv-python-headless"
        ) from error
