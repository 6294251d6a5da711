"""Calls a function that makes the user's environment in a process of its own: it may import torch, hang or crash."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from rlsrl.runtime.extras import extras_named

_Result = TypeVar("_Result")


def call_in_child(function: Callable[..., _Result], *arguments: Any, modules: Path, seconds: int) -> _Result:
    """Return what the function returns, with those arguments, in a process that ends with it.

    Args:
        function: A function of a module. Arguments, result and errors are pickled.
        arguments: Its arguments.
        modules: The folder in which Python looks first for the user's own modules.
        seconds: When the process is ended, whatever the environment does.

    Raises:
        BrokenProcessPool: the process was killed, or took longer.
        NotInstalled: a package of one of rlsrl's extras is missing.
        Exception: what the function raised.
    """
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_begin, initargs=(str(modules.absolute()), seconds)
    ) as pool:
        return pool.submit(_call, function, *arguments).result()


def _call(function: Callable[..., _Result], *arguments: Any) -> _Result:
    with extras_named():
        return function(*arguments)


def _begin(modules: str, seconds: int) -> None:
    signal.alarm(seconds)
    sys.path.insert(0, modules)
