"""Tracebacks as users read them: of their own code, and never cut."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import FrameType, TracebackType

_HEADER = "Traceback (most recent call last):"
_LINKS = ("During handling of the above exception", "The above exception was the direct cause")
"""Between two tracebacks of one chain of exceptions."""
_CALLERS = ("gymnasium.core", "gymnasium.wrappers", "gymnasium.vector", "gymnasium.envs.registration")
"""Modules that only pass calls on to an environment."""
_MAX_CHARACTERS = 12_000
"""Of a traceback. Only huge messages exceed it, such as that of an error which quotes an array."""


def users_traceback(error: BaseException) -> str:
    """Return the traceback of an environment's error, without the frames of rlsrl and Gymnasium that called it.

    An error that Gymnasium's own code raised keeps the frames of Gymnasium.
    """
    own = _without_first(error.__traceback__, lambda frame: _is_ours(frame) or _is_caller(frame))
    trace = own or _without_first(error.__traceback__, _is_ours)
    return without_middle("".join(traceback.format_exception(type(error), error, trace)), _MAX_CHARACTERS)


def without_middle(text: str, max_characters: int) -> str:
    """Return the text; of a longer one the beginning and the end, with a line between them that says so."""
    if (excess := len(text) - max_characters) <= 0:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n... ({excess} characters left out) ...\n{text[-half:]}"


def place_of(error: BaseException) -> str:
    """Return ``" (FILE, line N)"`` of the user's code that raised ``error``; nothing if it was raised elsewhere."""
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<frozen ")
    ]
    frame, line = frames[-1]
    if _is_ours(frame) or _module_of(frame).partition(".")[0] == "importlib":
        return ""
    return f" ({frame.f_code.co_filename}, line {line})"


def end_of_output(lines: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the last ``count`` lines that a process printed; more if a traceback that ends there begins earlier."""
    first = max(0, len(lines) - count)
    starts = [number for number, line in enumerate(lines) if line.startswith(_HEADER)]
    if not starts:
        return tuple(lines[first:])
    begin = starts[-1]
    end = next((number for number in range(begin + 1, len(lines)) if not lines[number].startswith(" ")), len(lines))
    if end < first:
        return tuple(lines[first:])
    for earlier, later in reversed(list(pairwise(starts))):
        if not any(line.startswith(_LINKS) for line in lines[earlier:later]):
            break
        begin = earlier
    return tuple(lines[min(first, begin) :])


def _without_first(trace: TracebackType | None, is_left_out: Callable[[FrameType], bool]) -> TracebackType | None:
    while trace is not None and is_left_out(trace.tb_frame):
        trace = trace.tb_next
    return trace


def _is_ours(frame: FrameType) -> bool:
    name = _module_of(frame)
    return name.startswith("rlsrl.") and not name.startswith("rlsrl.testing.")


def _is_caller(frame: FrameType) -> bool:
    name = _module_of(frame)
    return any(name == each or name.startswith(f"{each}.") for each in _CALLERS)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
