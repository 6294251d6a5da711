"""Errors that a worker prints for the operator and the user."""

from __future__ import annotations

import pytest

from rlsrl.runtime.errors import shortened


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
