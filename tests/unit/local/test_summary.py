from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlsrl.api.spec import Stop
from rlsrl.data.version import Version
from rlsrl.local.metrics_log import MetricsRow
from rlsrl.local.run_record import RunRecord, Span
from rlsrl.local.summary import RunFacts, ledger_warning, next_commands, result_lines, summarize
from rlsrl.parameters.protocols import VersionInfo

BALANCED = {"produced": 10, "trained": 10, "in_buffer": 0, "dropped": {}, "lost": {}, "balanced": True}


def info(step: int, *tags: str, **metadata: Any) -> VersionInfo:
    return VersionInfo(
        policy="default",
        version=Version(1, step),
        tags=tags,
        created_at=0.0,
        num_parameters=4,
        nbytes=16,
        has_state=True,
        metadata=metadata,
    )


def row(step: int, lag: float) -> MetricsRow:
    return MetricsRow(step=step, wall=0.0, role="trainer", scalars={"policy_lag": lag})


FACTS = RunFacts(
    name="toy",
    seed=3,
    record=RunRecord(
        run_uid="abc",
        created_at=1.0,
        package_version="0.1",
        attempt=2,
        lives=(Span(started_at=0.0, ended_at=6.0), Span(started_at=10.0, ended_at=14.0)),
        training=(Span(started_at=1.0, ended_at=5.0), Span(started_at=11.0, ended_at=12.0)),
        restarts={"actor": 1},
    ),
    terminal={
        "reason": "returnMean",
        "version": "1.9",
        "result": {"env_steps": 1000, "train_steps": 9, "return_mean": 1.5},
    },
    versions=(info(4, "step-4"), info(9, "best", "last", env_steps=900)),
    rows=(row(1, 0.0), row(2, 1.0)),
    stop=Stop(return_mean=1.25, env_steps=5000, episodes=100),
    ledger=BALANCED,
)


def test_a_finished_run() -> None:
    assert summarize(FACTS) == {
        "name": "toy",
        "run_uid": "abc",
        "seed": 3,
        "finished": True,
        "reason": "returnMean",
        "failure": None,
        "env_steps": 1000,
        "train_steps": 9,
        "return_mean": 1.5,
        "goal": 1.25,
        "episodes": 100,
        "length_mean": None,
        "episode_info": {},
        "non_finite_returns": 0,
        "minibatches": 0,
        "minibatches_skipped": 0,
        "wall_seconds": 10.0,
        "training_seconds": 5.0,
        "env_steps_per_second": 200.0,
        "policy_lag": 0.5,
        "max_policy_lag": 1.0,
        "versions": {"count": 2, "last": "1.9", "tagged": {"step-4": "1.4", "best": "1.9", "last": "1.9"}},
        "evaluation": None,
        "best": None,
        "fixed_evaluations": [],
        "ledger": BALANCED,
        "untrained": 0,
        "attempts": 2,
        "lives": 2,
        "restarts": {"actor": 1},
        "rollbacks": [],
        "created_at": 1.0,
        "package_version": "0.1",
    }


def test_the_summary_of_an_unfinished_run_is_that_of_its_newest_version() -> None:
    summary = summarize(replace(FACTS, terminal=None))
    assert (summary["finished"], summary["reason"], summary["env_steps"]) == (False, None, 900)
    assert summary["return_mean"] is None


def test_evaluations_are_in_summary_and_result_lines() -> None:
    best = {"episodes": 20, "faults": 3, "return_mean": 481.26}
    versions = (info(4, "best", evaluation=best), info(9, evaluation={"episodes": 20, "return_mean": 400.0}))

    summary = summarize(replace(FACTS, versions=versions))

    assert summary["evaluation"] == {"version": "1.9", "episodes": 20, "return_mean": 400.0}
    assert summary["best"] == {"version": "1.4", **best}
    assert result_lines(summary, Path("x"))[1:3] == [
        "evaluation of the last version, 1.9: mean return 400.0 over 20 episodes",
        "evaluation of the best version, 1.4: mean return 481.3 over 20 episodes (3 environment faults)",
    ]


def test_a_fixed_version_is_neither_the_last_evaluation_nor_the_best() -> None:
    evaluated = {"episodes": 20, "return_mean": 400.0}
    reference = {"version": "3.700", "episodes": 20, "return_mean": 500.0, "episode_info": {}}
    facts = replace(FACTS, versions=(info(9, evaluation=evaluated),), fixed_evaluations=(reference,))

    summary = summarize(facts)

    assert summary["evaluation"] == summary["best"] == {"version": "1.9", **evaluated}
    assert summary["fixed_evaluations"] == [reference]
    assert result_lines(summary, Path("x"))[1:3] == [
        "evaluation of the last version, 1.9: mean return 400.0 over 20 episodes",
        "evaluation of the fixed version 3.700: mean return 500.0 over 20 episodes",
    ]


INFO = {"won": {"mean": 0.9333, "count": 1200}, "is_succes": {"mean": None, "count": 0}}


def test_length_and_values_of_info_are_in_summary_and_result_lines() -> None:
    result = {"env_steps": 1000, "train_steps": 9, "return_mean": 1.5, "length_mean": 21.44, "episode_info": INFO}
    summary = summarize(replace(FACTS, terminal={"reason": "envSteps", "version": "1.9", "result": result}))
    assert (summary["length_mean"], summary["episode_info"]) == (21.44, INFO)
    assert result_lines(summary, Path("x"))[1:4] == [
        "episodes: mean length 21.4, won 0.933 (mean of the last 100 of 1,200 episodes), is_succes - in 0 episodes",
        "WARNING: no episode had a finite number under is_succes in info (environment.episodeInfo).",
        "WARNING: the actors' logs name the keys of info; look for episode_info_missing.",
    ]


def test_an_unfinished_evaluation_has_the_episodes_that_ended_and_is_not_the_best() -> None:
    partial = {"episodes": 7, "return_mean": 9.0, "episode_info": {"won": {"mean": 1.0, "count": 7}}}
    evaluation = {**partial, "unfinished": "7 of 20 episodes ended"}
    summary = summarize(replace(FACTS, versions=(info(9, evaluation=evaluation),)))
    assert (summary["evaluation"], summary["best"]) == ({"version": "1.9", **evaluation}, None)
    assert result_lines(summary, Path("x"))[1] == (
        "evaluation of the last version, 1.9: unfinished: 7 of 20 episodes ended, mean return 9.00 over 7 episodes, "
        "won 1 in 7 episodes"
    )


def test_an_unfinished_evaluation_has_its_reason_and_a_best_last_version_one_line() -> None:
    unfinished = summarize(replace(FACTS, versions=(info(9, evaluation={"unfinished": "too long"}),)))
    assert (unfinished["evaluation"], unfinished["best"]) == ({"version": "1.9", "unfinished": "too long"}, None)
    assert "evaluation of the last version, 1.9: unfinished: too long" in result_lines(unfinished, Path("x"))

    alone = summarize(replace(FACTS, versions=(info(9, evaluation={"episodes": 1, "return_mean": 1.0}),)))
    assert len([line for line in result_lines(alone, Path("x")) if line.startswith("evaluation")]) == 1


def test_a_run_that_never_began() -> None:
    record = RunRecord(run_uid="abc", created_at=1.0, package_version="0.1")
    summary = summarize(replace(FACTS, terminal=None, versions=(), rows=(), record=record))
    assert (summary["env_steps"], summary["env_steps_per_second"], summary["policy_lag"]) == (0, None, None)
    folder = Path("runs/toy")
    assert result_lines(summary, folder)[0] == "toy has not finished: no episode ended after 0 env steps in 0.0 s"
    assert next_commands(summary, folder, program="rlsrl") == [], "there is nothing to evaluate"


def test_the_end_names_result_folder_and_next_commands() -> None:
    summary, folder = summarize(FACTS), Path("my runs/toy")
    assert result_lines(summary, folder) == [
        "toy finished (returnMean): mean return 1.50 after 1,000 env steps in 5.0 s (200 a second, start-up included)",
        "gathered 10 transitions, 0 of them not trained",
        "results: my runs/toy",
    ]
    assert next_commands(summary, folder, program=".venv/bin/rlsrl") == [
        "try next:",
        "  .venv/bin/rlsrl eval 'my runs/toy'",
        "  .venv/bin/rlsrl params list 'my runs/toy'",
        "  .venv/bin/rlsrl plot 'my runs/toy'",
    ]


def test_what_was_trained_and_rolled_back_is_not_counted_as_untrained() -> None:
    lost = {**BALANCED["lost"], "rolled_back": 229226, "receiver_died": 3556}
    ledger = {**BALANCED, "produced": 1433365, "trained": 1200583, "lost": lost}
    assert result_lines(summarize(replace(FACTS, ledger=ledger)), Path("runs/toy"))[1] == (
        "gathered 1,433,365 transitions, 229,226 of them trained and rolled back (those weights are lost), "
        "3,556 not trained"
    )


def ended(reason: str, return_mean: float | None) -> dict[str, Any]:
    """Return the summary of a run that this reason has ended."""
    result = {"env_steps": 1000, "train_steps": 9, "return_mean": return_mean}
    terminal = {"reason": reason, "version": "1.9", "result": result}
    return summarize(replace(FACTS, terminal=terminal))


@pytest.mark.parametrize("reason", ["envSteps", "trainSteps", "wallSeconds"])
def test_a_run_that_missed_its_goal_says_so_and_suggests_what_shows_why(reason: str) -> None:
    summary, folder = ended(reason, -0.5), Path("runs/toy")
    assert result_lines(summary, folder)[0].startswith(
        f"toy finished ({reason}): mean return -0.500, below the goal 1.25 (docs/debugging.md), after 1,000 env steps"
    )
    assert next_commands(summary, folder, program="rlsrl")[1:] == [
        "  rlsrl plot runs/toy",
        "  rlsrl eval runs/toy",
        "  rlsrl eval --stochastic runs/toy",
    ]
    assert "no episode ended, below the goal 1.25" in result_lines(ended(reason, None), folder)[0]


@pytest.mark.parametrize(("reason", "return_mean"), [("returnMean", 1.25), ("envSteps", 1.25), ("now", -0.5)])
def test_a_run_that_reached_its_goal_or_was_told_to_end_has_missed_none(reason: str, return_mean: float) -> None:
    assert "goal" not in result_lines(ended(reason, return_mean), Path("runs/toy"))[0]


def test_a_run_that_did_not_learn_has_failed_and_says_what_was_skipped() -> None:
    result = {
        "env_steps": 4096,
        "train_steps": 4,
        "return_mean": None,
        "minibatches": 1600,
        "minibatches_skipped": 1500,
        "non_finite_returns": 31,
    }
    terminal = {"reason": "updatesSkipped", "failure": "150 of the last 200", "version": "1.9", "result": result}
    ledger = {**BALANCED, "produced": 4096, "trained": 296, "dropped": {"update_skipped": 3800}}
    summary = summarize(replace(FACTS, terminal=terminal, ledger=ledger))
    assert (summary["finished"], summary["reason"], summary["failure"]) == (
        False,
        "updatesSkipped",
        "150 of the last 200",
    )
    assert next_commands(summary, Path("runs/toy"), program="rlsrl") == []
    assert result_lines(summary, Path("runs/toy")) == [
        "toy has failed: no return is finite after 4,096 env steps in 5.0 s (819 a second, start-up included)",
        "gathered 4,096 transitions, 3,800 of them not trained",
        (
            "skipped 1,500 of 1,600 minibatches, whose loss or gradient was not finite; 3,800 transitions were dropped "
            "untrained"
        ),
        "31 episodes had a return that is not finite: they are in no mean return",
        "results: runs/toy",
    ]


@pytest.mark.parametrize("ledger", [{"produced": 10, "trained": 9, "balanced": False}, {}])
def test_an_unbalanced_ledger_is_a_loud_warning(ledger: dict[str, Any]) -> None:
    warning = ledger_warning(ledger)
    assert "DOES NOT ADD UP" in warning[0]
    assert [
        line for line in result_lines(summarize(replace(FACTS, ledger=ledger)), Path("x")) if line in warning
    ] == warning
    assert ledger_warning(BALANCED) == []


def test_transitions_that_were_not_finite_are_a_warning() -> None:
    summary = summarize(replace(FACTS, ledger={"produced": 5000, "dropped": {"non_finite": 1234}, "balanced": True}))
    lines = result_lines(summary, Path("runs/x"))
    assert "WARNING: 1,234 of 5,000 transitions were not finite (NaN or inf) and not trained." in lines
