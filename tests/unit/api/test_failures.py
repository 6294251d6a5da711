"""Which failures of a worker are the same, and which say nothing about the worker."""

from __future__ import annotations

import pytest

from rlsrl.api.failures import TEMPORARY_FAILURE, signature

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/a/robot.py", line 12, in step',
    "    self.arm.move(action)",
    "KeyError: 'elbow'",
)


@pytest.mark.parametrize(
    "lines",
    [
        ("an earlier line", *TRACEBACK),
        tuple(line.replace("12", "13") for line in TRACEBACK),
        (*TRACEBACK[1:], TRACEBACK[0]),
    ],
    ids=["after other output", "with other numbers", "in another order"],
)
def test_the_same_exception_at_the_same_place_has_one_signature(lines: tuple[str, ...]) -> None:
    assert signature(1, lines) == signature(1, TRACEBACK) != ""


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (5, TRACEBACK),
        (1, (*TRACEBACK[:-1], "KeyError: 'wrist'")),
        (1, tuple(line.replace("in step", "in reset") for line in TRACEBACK)),
        (1, ('  File "/a/other.py", line 3, in check', "    raise cause", *TRACEBACK)),
        (1, TRACEBACK[-1:]),
    ],
    ids=["other code", "other exception", "other place", "other cause", "no traceback"],
)
def test_another_failure_has_another_signature(code: int, lines: tuple[str, ...]) -> None:
    assert signature(code, lines) not in ("", signature(1, TRACEBACK))


def test_without_a_traceback_the_last_line_counts() -> None:
    assert signature(1, ("a", "no such device 7")) == signature(1, ("b", "no such device 8"))
    assert signature(1, ("a", "no such device")) != signature(1, ("a", "no such file"))


@pytest.mark.parametrize("code", [0, -9, -15, 137, 143, TEMPORARY_FAILURE])
def test_a_kill_and_a_lost_connection_have_none(code: int) -> None:
    assert signature(code, TRACEBACK) == ""


def test_a_silent_end_has_none() -> None:
    assert signature(1, ()) == ""
