"""Users see the traceback of their own code, and see it whole."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest

from rlsrl.runtime.tracebacks import end_of_output, users_traceback

OUTPUT = [f"line {number}" for number in range(20)]
TRACEBACK = [
    "Traceback (most recent call last):",
    *(f'  File "arm.py", line {number}, in step' for number in range(12)),
    "ValueError: the arm is stuck",
]


def calling(module: str, call: Callable[[], None]) -> Callable[[], None]:
    """Return a function of a module of that name that calls ``call``."""
    namespace = types.ModuleType(module).__dict__ | {"call": call}
    exec(compile("def pass_on(): call()", f"{module}.py", "exec"), namespace)
    passing: Callable[[], None] = namespace["pass_on"]
    return passing


def stuck() -> None:
    raise ValueError("the arm is stuck")


def traceback_of(call: Callable[[], None]) -> list[str]:
    """Return the files in the traceback of the error that ``call`` raises, without this function's."""
    with pytest.raises(ValueError, match="stuck") as caught:
        call()
    caught.value.__traceback__ = caught.value.__traceback__.tb_next if caught.value.__traceback__ else None
    lines = users_traceback(caught.value).splitlines()
    assert (lines[0], lines[-1]) == (TRACEBACK[0], TRACEBACK[-1])
    return [line.split('"')[1] for line in lines if line.startswith("  File")]


@pytest.mark.parametrize(
    "callers",
    [
        [],
        ["rlsrl.envs.vector"],
        ["rlsrl.envs.vector", "gymnasium.wrappers.common", "rlsrl.envs.wrappers", "gymnasium.core"],
        ["rlsrl.envs.native", "gymnasium.vector.sync_vector_env"],
        ["rlsrl.envs.factory", "gymnasium.envs.registration"],
    ],
)
def test_a_traceback_begins_with_the_users_first_frame(callers: list[str]) -> None:
    call = calling("arm", calling("rlsrl.envs.wrappers", stuck))
    for module in reversed(callers):
        call = calling(module, call)
    assert traceback_of(call) == ["arm.py", "rlsrl.envs.wrappers.py", __file__]


def test_the_environments_of_gymnasium_and_of_our_tests_are_users() -> None:
    for module in ("gymnasium.envs.classic_control.cartpole", "rlsrl.testing.environments"):
        assert traceback_of(calling("rlsrl.envs.vector", calling(module, stuck)))[0] == f"{module}.py"


def test_an_error_of_gymnasiums_own_code_keeps_its_frames() -> None:
    namespace: dict[str, object] = {"__name__": "gymnasium.wrappers.common"}
    text = "def late(): raise ValueError('the arm is stuck')"
    exec(compile(text, "common.py", "exec"), namespace)
    late: Callable[[], None] = namespace["late"]  # type: ignore[assignment]
    assert traceback_of(calling("rlsrl.envs.vector", late)) == ["common.py"]


def test_a_huge_message_is_cut_in_its_middle() -> None:
    text = users_traceback(ValueError("x" * 100_000 + " the end"))
    assert len(text) < 13_000
    assert "characters left out" in text
    assert text.endswith("the end\n")


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (OUTPUT, OUTPUT[-3:]),
        (OUTPUT[:2], OUTPUT[:2]),
        ([], []),
        ([*OUTPUT, *TRACEBACK], TRACEBACK),
        ([*OUTPUT, *TRACEBACK, "rlsrl: rank 3"], [*TRACEBACK, "rlsrl: rank 3"]),
        ([*TRACEBACK, *OUTPUT], OUTPUT[-3:]),
        ([*TRACEBACK, *OUTPUT, *TRACEBACK], TRACEBACK),
    ],
)
def test_the_end_of_an_output_has_a_traceback_whole(lines: list[str], shown: list[str]) -> None:
    assert list(end_of_output(lines, 3)) == shown


def test_a_chain_of_tracebacks_is_whole_too() -> None:
    link = "The above exception was the direct cause of the following exception:"
    chain = [*TRACEBACK, link, *TRACEBACK]
    assert list(end_of_output([*TRACEBACK, *OUTPUT, *chain], 3)) == chain
