"""Loads the user's own code by its name, ``"package.module:callable"``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from rlsrl.runtime.errors import ConfigurationError, did_you_mean
from rlsrl.runtime.tracebacks import place_of


def load_callable(reference: str, *, where: str) -> Callable[..., Any]:
    """Return the callable that ``reference`` names. ``where`` is for messages, such as ``"environment factory"``.

    Python looks for the module among installed packages and in the folders on ``PYTHONPATH``. ``rlsrl run`` adds the
    folder of the experiment's YAML to ``PYTHONPATH``.

    Raises:
        ConfigurationError: the reference is malformed, the module or attribute does not exist (the text has the nearest
            match), the module fails to import, or the object cannot be called.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (colon and module_name and all(part.isidentifier() for part in attribute.split("."))):
        raise ConfigurationError(f"{where} {reference!r} is not of the form 'package.module:callable'")
    value: Any = _import(module_name, f"{where} {reference!r}")
    owner = f"module {module_name!r}"
    for part in attribute.split("."):
        if not hasattr(value, part):
            hint = did_you_mean(part, (name for name in dir(value) if not name.startswith("_")))
            raise ConfigurationError(f"{where} {reference!r}: {owner} has no {part!r}{hint}")
        value, owner = getattr(value, part), repr(part)
    if not callable(value):
        raise ConfigurationError(f"{where} {reference!r} is of type {type(value).__name__}, which cannot be called")
    return value  # type: ignore[no-any-return]


def _import(name: str, where: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(f"{missing}."):
            raise ConfigurationError(
                f"{where}: importing {name!r} needs {missing!r}, which is not installed"
            ) from error
        hint = did_you_mean(missing, _siblings(missing))
        raise ConfigurationError(
            f"{where}: no module named {missing!r}{hint}; install its package, or put its folder on PYTHONPATH "
            "(`rlsrl run` adds the folder of the experiment's YAML)"
        ) from error
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {error}{place_of(error)}"
        raise ConfigurationError(f"{where}: importing {name!r} raised {raised}") from error


def _siblings(name: str) -> Iterable[str]:
    """Return the names of the modules beside ``name``: in its parent package or at the top of the import path."""
    parent, _, _ = name.rpartition(".")
    if not parent:
        return (module.name for module in pkgutil.iter_modules())
    path = getattr(importlib.import_module(parent), "__path__", ())
    return (module.name for module in pkgutil.iter_modules(path, f"{parent}."))
