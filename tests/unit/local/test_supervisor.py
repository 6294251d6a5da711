from __future__ import annotations

import pytest

from rlsrl.api.failures import FUTILE_STARTS, NOT_STORED, RUN_DAMAGED, TEMPORARY_FAILURE
from rlsrl.local.supervisor import (
    START_UP_SECONDS,
    Exit,
    Fail,
    Restart,
    RestartLimits,
    Supervisor,
    back_off,
)


def decisions(limits: RestartLimits, *exits: tuple[str, int, float]) -> list[Restart | Fail]:
    supervisor, made = Supervisor(limits=limits), []
    for role, code, at in exits:
        decision, supervisor = supervisor.decide(Exit(role=role, number=0, code=code, at=at, lived_seconds=1.0))
        made.append(decision)
    return made


LIMITS = RestartLimits(budget=3, decay_seconds=100.0)


@pytest.mark.parametrize("code", [0, 1, -9, -15, 137])
def test_every_exit_but_a_configuration_error_restarts_at_once(code: int) -> None:
    assert decisions(LIMITS, ("actor", code, 50.0)) == [Restart(delay_seconds=0.0, used=1)]


def test_a_configuration_error_fails_without_using_the_budget() -> None:
    failed, restarted = decisions(LIMITS, ("trainer", 2, 0.0), ("trainer", 1, 0.0))
    assert isinstance(failed, Fail)
    assert "configuration" in failed.reason
    assert restarted == Restart(delay_seconds=0.0, used=1)


def test_an_environment_fault_fails_without_using_the_budget() -> None:
    (failed,) = decisions(LIMITS, ("actor", 3, 0.0))
    assert failed == Fail(reason="its environments end the run")


def test_a_damaged_run_fails_without_a_restart() -> None:
    (failed,) = decisions(LIMITS, ("trainer", RUN_DAMAGED, 0.0))
    assert failed == Fail(reason="what the run has stored is damaged")


def test_a_version_that_cannot_be_stored_fails_without_using_the_budget() -> None:
    (failed,) = decisions(LIMITS, ("trainer", NOT_STORED, 0.0))
    assert failed == Fail(reason="it could not store a version that the run needs")


def test_restarts_are_limited_by_the_budget_and_waits_grow() -> None:
    made = decisions(LIMITS, *[("actor", 1, 0.0)] * 4)
    assert made[:3] == [
        Restart(delay_seconds=0.0, used=1),
        Restart(delay_seconds=0.5, used=2),
        Restart(delay_seconds=1.0, used=3),
    ]
    assert isinstance(made[3], Fail)
    assert "all 3 restarts of this role are spent" in made[3].reason


def test_a_budget_of_0_allows_no_restart() -> None:
    (made,) = decisions(RestartLimits(budget=0, decay_seconds=1.0), ("actor", 1, 1e9))
    assert isinstance(made, Fail)


def test_each_role_has_a_budget_of_its_own() -> None:
    made = decisions(RestartLimits(budget=1, decay_seconds=100.0), ("actor", 1, 0.0), ("trainer", 1, 0.0))
    assert made == [Restart(delay_seconds=0.0, used=1)] * 2


@pytest.mark.parametrize(
    ("at", "forgiven"),
    [(99.0, False), (100.0, True), (250.0, True)],
)
def test_one_restart_comes_back_each_decay(at: float, forgiven: bool) -> None:
    """Three restarts are spent at second 0; the fourth is allowed once one is given back."""
    *_, last = decisions(LIMITS, *[("actor", 1, 0.0)] * 3, ("actor", 1, at))
    assert isinstance(last, Restart) is forgiven


def test_rare_faults_never_add_up() -> None:
    made = decisions(LIMITS, *[("actor", 1, 100.0 * n) for n in range(50)])
    assert made == [Restart(delay_seconds=0.0, used=1)] * 50


@pytest.mark.parametrize(
    ("spent", "seconds"), [(0.0, 0.0), (0.4, 0.0), (0.999, 0.5), (1, 0.5), (2, 1.0), (3, 2.0), (7, 30.0), (9999, 30.0)]
)
def test_back_off(spent: float, seconds: float) -> None:
    assert back_off(spent) == seconds


def early(words: str = "KeyError: 'x'", *, code: int = 1, lived: float = 1.0, number: int = 0) -> Exit:
    lines = (words,) if words else ()
    return Exit(role="actor", number=number, code=code, at=0.0, lived_seconds=lived, lines=lines)


def outcome(*exits: Exit) -> list[bool]:
    """Return for each exit whether it led to a restart, with an unlimited budget."""
    supervisor, forgiven = Supervisor(limits=RestartLimits(budget=1000, decay_seconds=1.0)), []
    for ended in exits:
        decision, supervisor = supervisor.decide(ended)
        forgiven.append(isinstance(decision, Restart))
    return forgiven


FEW = FUTILE_STARTS - 1


def test_a_process_that_never_works_fails_soon() -> None:
    assert outcome(*[early()] * FUTILE_STARTS) == [True] * FEW + [False]


def test_the_reason_names_repeated_start_failures() -> None:
    supervisor = Supervisor(limits=RestartLimits(budget=1000, decay_seconds=1.0))
    for _ in range(FEW):
        _, supervisor = supervisor.decide(early())
    made, _ = supervisor.decide(early())
    assert made == Fail(reason=f"it failed in the same way after each of {FUTILE_STARTS} starts, without progress")


def test_a_failure_that_is_sure_to_repeat_costs_two_restarts() -> None:
    assert outcome(*[early()] * 3) == [True, True, False]


def test_the_same_failure_may_name_other_numbers() -> None:
    exits = [early(f"TypeError: <Env object at 0x7f{n}> on port {n}") for n in range(FUTILE_STARTS)]
    assert outcome(*exits)[-1] is False


@pytest.mark.parametrize(
    "exits",
    [
        [early(), early("ValueError: y")] * FUTILE_STARTS,
        [early(), early(code=7)] * FUTILE_STARTS,
        [early(number=0), early(number=1)] * FEW,
        [early(code=-9)] * 20,
        [early(code=137)] * 20,
        [early(code=TEMPORARY_FAILURE)] * 20,
        [early("")] * 20,
        [early(lived=START_UP_SECONDS), *[early()] * 20],
        [*[early()] * FEW, early(lived=START_UP_SECONDS), *[early()] * 20],
    ],
    ids=[
        "other words",
        "other code",
        "other process",
        "killed",
        "rank killed",
        "temporary",
        "silent",
        "worked at first",
        "worked in between",
    ],
)
def test_other_failures_use_the_budget(exits: list[Exit]) -> None:
    assert all(outcome(*exits))


def test_a_kill_does_not_prove_that_a_process_works() -> None:
    assert outcome(*[early()] * FEW, early(code=-9), early())[-1] is False


def stuck(trained: int, *, code: int = 1, words: str = "KeyError: 'x'") -> Exit:
    """Return a trainer's failure after a minute, once training has counted that many transitions."""
    return Exit(role="trainer", number=0, code=code, at=0.0, lived_seconds=60.0, lines=(words,), trained=trained)


@pytest.mark.parametrize(
    "exits",
    [
        [stuck(0)] * FUTILE_STARTS,
        [stuck(500)] * FUTILE_STARTS,
        [stuck(500), stuck(480), stuck(490)],
        [stuck(500), stuck(500), stuck(700, code=-9), stuck(500)],
        [stuck(500), stuck(600), stuck(600), stuck(600)],
    ],
    ids=["at the start", "at the same step", "never further", "killed in between", "further only once"],
)
def test_a_trainer_that_gets_no_further_fails_soon_however_long_it_lives(exits: list[Exit]) -> None:
    assert outcome(*exits) == [True] * (len(exits) - 1) + [False]


@pytest.mark.parametrize(
    "exits",
    [
        [stuck(500 + n) for n in range(20)],
        [stuck(500, code=-9)] * 20,
        [stuck(500, code=TEMPORARY_FAILURE)] * 20,
        [stuck(500), stuck(500, words="ValueError: y")] * 10,
    ],
    ids=["further each time", "killed", "temporary", "other words"],
)
def test_other_failures_of_a_trainer_use_the_budget(exits: list[Exit]) -> None:
    assert all(outcome(*exits))
