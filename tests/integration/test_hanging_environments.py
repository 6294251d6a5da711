"""Environments whose call does not return: they are named, also while they hold the interpreter lock, and limits end
their actor."""

from __future__ import annotations

import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlsrl.api.role_configs import PEER_TIMEOUT_SECONDS
from rlsrl.testing.live_runs import Desk, LiveRun, await_death, call_watches
from rlsrl.testing.pod_fleet import PodFleet
from rlsrl.testing.pods import Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until
from rlsrl.workers.call_watch_process import END_SIGNAL

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment:
    factory: "rlsrl.testing.environments:HangingEnv"
    kwargs:
      {{gate: "{folder}/gate", hang: "{folder}/hang", method: {method}, holds_lock: {holds_lock}, seconds: {seconds}}}
    {limits}
  policy: {{network: {{mlp: {{hiddenSizes: [16]}}}}}}
  algorithm: {{ppo: {{epochs: 1, minibatchSize: 32}}}}
  actors: {{environments: {environments}, rolloutLength: 16, vectorization: {vectorization}}}
  trainers: {{compile: "off"}}
  stop: {{returnMean: 7.5, episodes: 50}}
  {roles}
"""


MAKE_SECONDS = 12
"""Limit of the making, in seconds: a call is reported after five, and the first making imports Gymnasium."""


class Place:
    """A folder with an experiment whose environment rank 3 hangs when the test wants it."""

    def __init__(
        self,
        folder: Path,
        *,
        method: str = "step",
        holds_lock: bool = False,
        vectorization: str = "loop",
        limits: str = "",
        environments: int = 4,
        roles: str = "",
        seconds: float = 3600.0,
    ) -> None:
        lock = "true" if holds_lock else "false"
        self.folder = folder
        self.desk = Desk(
            folder,
            EXPERIMENT.format(
                folder=folder,
                method=method,
                holds_lock=lock,
                vectorization=vectorization,
                limits=limits,
                environments=environments,
                roles=roles,
                seconds=seconds,
            ),
        )

    def hang(self, run: LiveRun) -> None:
        """Let the environment hang once training goes on; return when it does."""
        self.await_steps(run)
        (self.folder / "hang").touch()
        run.until(lambda: not (self.folder / "hang").exists(), "an environment that hangs")

    def await_steps(self, run: LiveRun) -> None:
        """Wait for three training steps."""
        before = run.until(lambda: steps(run), "training steps")
        run.until(lambda: (steps(run) or 0.0) > before + 3, "further training steps")


def steps(run: LiveRun) -> float | None:
    status = run.facts.status()
    return None if status is None else status["totals"]["train_steps"]


def long_calls(run: LiveRun) -> list[dict[str, Any]]:
    status = run.facts.status()
    found: list[dict[str, Any]] = [] if status is None else status["environment_calls"]
    return found


@pytest.mark.parametrize(
    ("holds_lock", "method", "vectorization"),
    [
        (True, "step", "loop"),
        pytest.param(False, "reset", "loop", marks=pytest.mark.slow),
        pytest.param(False, "step", "threads", marks=pytest.mark.slow),
    ],
)
def test_a_call_that_hangs_is_named_everywhere(
    tmp_path: Path, holds_lock: bool, method: str, vectorization: str
) -> None:
    place = Place(tmp_path, method=method, holds_lock=holds_lock, vectorization=vectorization)
    with place.desk.begin() as run:
        place.hang(run)
        (call,) = run.until(lambda: long_calls(run), "a report about the call")
        assert (call["role"], call["index"], call["first_rank"], call["call"]) == ("actor", 0, 3, method)
        text = f"environment rank 3 has been in {method} for "
        run.until(lambda: text in run.output, "a line of rlsrl run")
        top = run.until(lambda: text in (output := place.desk.call("top", "live").stdout) and output, "rlsrl top")
        assert "(actor-0)" in top
        output = (run.facts.folder / "logs" / "actor-0.out").read_text()
        assert output.splitlines()[-1].startswith(f"rlsrl: {text}")
        if holds_lock:
            run.until(lambda: _is_gone(run), "the actor's lease expires")
            assert long_calls(run), "its call is still shown"
        (actor,) = run.workers("actor")
        (watch,) = call_watches(run.facts.run_uid)
        os.kill(actor.pid, signal.SIGKILL)
        await_death(watch.pid)
        run.until(lambda: not long_calls(run), "the successor's environments work")
        place.await_steps(run)
        (tmp_path / "gate").touch()
        assert run.wait() == 0, run.output
    assert place.desk.facts().leftovers() == []


@pytest.mark.slow
def test_a_run_that_stands_still_says_why_until_it_goes_on(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with place.desk.begin() as run:
        place.hang(run)

        def stall() -> dict[str, Any] | None:
            status = run.facts.status()
            return None if status is None else status["stall"]

        found = run.until(stall, "a stall")
        assert found["seconds"] > 60
        call, *waits = found["reasons"]
        assert call.startswith("environment rank 3 has been in step for 6")
        assert re.match(r"trainer-0 has waited for batch for [56]\d s$", waits[0]), waits
        status = run.facts.status()
        assert status is not None
        assert status["totals"]["env_steps_per_second"] == 0
        text = re.compile(r"NO STEP for \d+ s: environment rank 3 has been in step for ")
        run.until(lambda: text.search(run.output), "a line of rlsrl run")
        assert text.search(place.desk.call("top", "live").stdout)
        (actor,) = run.workers("actor")
        os.kill(actor.pid, signal.SIGKILL)
        place.await_steps(run)
        assert stall() is None
        (tmp_path / "gate").touch()
        assert run.wait() == 0, run.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vectorization", "roles"),
    [
        pytest.param("loop", "", id="loop"),
        pytest.param("threads", "", id="threads"),
        pytest.param("loop", "transport: grpc", id="loop, grpc"),
    ],
)
def test_a_step_within_its_limit_costs_its_actor_no_credit(tmp_path: Path, vectorization: str, roles: str) -> None:
    """The step lasts longer than consumers wait for silent producers."""
    place = Place(
        tmp_path,
        method="step",
        vectorization=vectorization,
        limits="stepSeconds: 600",
        roles=roles,
        seconds=1.5 * PEER_TIMEOUT_SECONDS,
    )
    with place.desk.begin() as run:
        place.hang(run)
        place.await_steps(run)
        (tmp_path / "gate").touch()
        assert run.wait() == 0, run.output
    facts = place.desk.facts()
    reasons = [event["reason"] for event in facts.logged("trainer-0", "producer_gone")]
    assert "silent" not in reasons, reasons
    assert facts.json("summary.json")["restarts"] == {}


def _is_gone(run: LiveRun) -> bool:
    status = run.facts.status()
    return status is not None and [each["role"] for each in status["gone"]] == ["actor"]


@pytest.mark.parametrize(
    ("holds_lock", "method", "vectorization"),
    [
        (True, "step", "loop"),
        pytest.param(False, "step", "threads", marks=pytest.mark.slow),
        pytest.param(False, "reset", "loop", marks=pytest.mark.slow),
    ],
)
def test_a_call_that_reaches_its_limit_ends_the_actor_and_training_goes_on(
    tmp_path: Path, holds_lock: bool, method: str, vectorization: str
) -> None:
    place = Place(
        tmp_path,
        method=method,
        holds_lock=holds_lock,
        vectorization=vectorization,
        limits=f"{method}Seconds: 2",
    )
    with place.desk.begin() as run:
        place.hang(run)
        reason = re.compile(
            rf"rlsrl: environment rank 3 was in {method} for \d+ s \(environment.{method}Seconds\): the actor was ended"
        )
        note = re.compile(rf"actor-0 exited with code {END_SIGNAL.value}: {reason.pattern}; restarting")
        run.until(lambda: note.search(run.output), "the actor ends")
        (event,) = place.desk.facts().logged("coordinator-0", "environment_hang")
        assert (event["worker"], event["rank"], event["call"]) == ("actor-0", 3, method)
        place.await_steps(run)
        (tmp_path / "gate").touch()
        assert run.wait() == 0, run.output
    facts = place.desk.facts()
    output = (facts.folder / "logs" / "actor-0.out").read_text()
    before = reason.split(output)[0]
    assert re.search(r'environments\.py", line \d+ in _perhaps_hang', before), output
    summary = facts.json("summary.json")
    assert summary["restarts"] == {"actor": 1}
    assert summary["ledger"]["balanced"], summary["ledger"]
    assert facts.leftovers() == []


@pytest.mark.parametrize("vectorization", ["loop", pytest.param("threads", marks=pytest.mark.slow)])
def test_an_environment_that_hangs_while_it_is_made_is_named_and_ends_the_actor(
    tmp_path: Path, vectorization: str
) -> None:
    place = Place(
        tmp_path, method="make", holds_lock=True, vectorization=vectorization, limits=f"resetSeconds: {MAKE_SECONDS}"
    )
    (tmp_path / "hang").touch()
    with place.desk.begin() as run:
        (call,) = run.until(lambda: long_calls(run), "a report about the making")
        assert (call["role"], call["index"], call["first_rank"], call["call"]) == ("actor", 0, 3, "make")
        run.until(lambda: "environment rank 3 has been in make for " in run.output, "a line of rlsrl run")
        note = re.compile(
            rf"actor-0 exited with code {END_SIGNAL.value}: rlsrl: environment rank 3 was in make for \d+ s "
            r"\(environment.resetSeconds\): the actor was ended; restarting"
        )
        run.until(lambda: note.search(run.output), "the actor ends")
        place.await_steps(run)
        (tmp_path / "gate").touch()
        assert run.wait() == 0, run.output
    assert place.desk.facts().json("summary.json")["restarts"] == {"actor": 1}


@pytest.mark.slow
def test_an_evaluator_whose_environment_hangs_is_ended_too(tmp_path: Path) -> None:
    """Only the evaluator has a fourth environment."""
    evaluators = "evaluators: {replicas: 1, environments: 4, episodesPerEnvironment: 1}"
    place = Place(tmp_path, environments=2, roles=evaluators, limits="stepSeconds: 2")
    with place.desk.begin() as run:
        place.hang(run)
        note = re.compile(
            rf"evaluator-0 exited with code {END_SIGNAL.value}: rlsrl: environment rank 3 was in step for \d+ s "
            r"\(environment.stepSeconds\): the evaluator was ended; restarting"
        )
        run.until(lambda: note.search(run.output), "the evaluator ends")
        (tmp_path / "gate").touch()
        assert run.wait() == 0, run.output
    assert place.desk.facts().json("summary.json")["evaluation"] is not None


@pytest.mark.slow
def test_a_pod_whose_environment_hangs_is_named_and_its_container_ends(tmp_path: Path) -> None:
    text = EXPERIMENT.format(
        folder=tmp_path,
        method="step",
        holds_lock="true",
        vectorization="loop",
        limits="stepSeconds: 8",
        environments=4,
        roles="",
        seconds=3600.0,
    )
    with ExitStack() as stack:
        fleet = PodFleet(Pods(text, tmp_path, stack))
        fleet.await_training()
        (tmp_path / "hang").touch()
        call, *_ = until(lambda: fleet.pods.status()["environment_calls"], "a report about the call")
        assert call["text"].startswith("environment rank 3 has been in step for ")
        actor, host = fleet.running["actor", 0]
        assert actor.wait(DEADLINE_SECONDS) == END_SIGNAL.value
        last = fleet.pods.log("actor", host).splitlines()[-1]
        assert last.startswith("rlsrl: environment rank 3 was in step for ")
        fleet.restart(("actor", 0))
        # What the dead actor has sent is trained before the new one joins.
        until(lambda: fleet.pods.status()["environment_calls"] == [], "the new actor has joined")
        fleet.await_training()
        fleet.end()
        fleet.check_ledger()
