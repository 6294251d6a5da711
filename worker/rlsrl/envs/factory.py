"""Making environments from what an experiment names: a Gymnasium id, or the user's own factory."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlsrl.data.specs import EnvSpec
from rlsrl.envs.spaces import spec_of
from rlsrl.runtime.errors import ConfigurationError, did_you_mean
from rlsrl.runtime.references import load_callable

if TYPE_CHECKING:
    import gymnasium

_PLUGINS = {"ALE": ("ale_py", "ale-py")}
"""Namespaces of ids whose package has to be imported to register them: (module, what to install)."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSource:
    """Where environments come from: exactly one of ``id`` and ``factory``."""

    id: str | None = None
    """A Gymnasium id, for example ``"CartPole-v1"``."""
    factory: str | None = None
    """``"package.module:callable"``; the callable returns a ``gymnasium.Env``."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``gymnasium.make`` or of the factory."""

    def __post_init__(self) -> None:
        if (self.id is None) == (self.factory is None):
            raise ConfigurationError(
                f"an environment has exactly one of id and factory, not id={self.id!r} and factory={self.factory!r}"
            )

    def __str__(self) -> str:
        return f"environment {self.id or self.factory!r}"


def make_environment(source: EnvironmentSource) -> gymnasium.Env[Any, Any]:
    """One environment, to be closed by the caller.

    Raises:
        ConfigurationError: no such id, module or attribute (with the nearest match), a package that is not installed
            (with the cure), arguments the environment does not take, or a factory that returns no ``gymnasium.Env``.
        Exception: whatever else the environment's own code raises: a second try may go better.
    """
    return _make_registered(source) if source.factory is None else _make_own(source, source.factory)


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


def _make_registered(source: EnvironmentSource) -> gymnasium.Env[Any, Any]:
    import gymnasium

    name = str(source.id)
    _import_plugin(name)
    try:
        # The checker wraps every step; `rlsrl.envs.check` looks once instead.
        return gymnasium.make(name, disable_env_checker=True, **source.kwargs)
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigurationError(f"{source}: {error}{did_you_mean(name, gymnasium.registry)}") from error
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigurationError(f"{source}: {error}") from error


def _import_plugin(name: str) -> None:
    namespace, slash, _ = name.partition("/")
    if not slash or namespace not in _PLUGINS:
        return
    module, package = _PLUGINS[namespace]
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"environment {name!r} needs the package {package!r}, which is not installed: pip install {package}"
        ) from error


def _make_own(source: EnvironmentSource, reference: str) -> gymnasium.Env[Any, Any]:
    import gymnasium

    make = load_callable(reference, where="environment factory")
    _check_arguments(source, make)
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
