"""Errors that a worker prints for the operator and the user."""

from __future__ import annotations

import errno

import pytest

from rlsrl.runtime.errors import RankLost, is_temporary, shortened


@pytest.mark.parametrize("text", ["", "environment.id: no such environment", "é" * 475])
def test_a_short_error_is_printed_whole(text: str) -> None:
    assert shortened(text) == text


@pytest.mark.parametrize("letter", ["k", "é", "環"])
def test_a_long_error_keeps_its_beginning_and_its_end(letter: str) -> None:
    made = shortened(f"my_env: {letter * 10_000}: no such level")
    assert made.startswith(f"my_env: {letter}")
    assert made.endswith(f"{letter}: no such level")
    assert "bytes left out" in made
    assert len(made.encode()) < 1024


@pytest.mark.parametrize(
    ("cause", "temporary"),
    [
        (ConnectionRefusedError("nobody listens"), True),
        (TimeoutError("no answer"), True),
        (RankLost("another rank has ended"), True),
        (OSError(errno.EADDRINUSE, "Address already in use"), True),
        (FileNotFoundError("map.txt"), False),
        (KeyError("elbow"), False),
    ],
)
def test_a_lost_connection_is_temporary_also_as_a_cause(cause: Exception, temporary: bool) -> None:
    error = RuntimeError("the training thread failed")
    error.__cause__ = cause
    assert (is_temporary(cause), is_temporary(error)) == (temporary, temporary)
