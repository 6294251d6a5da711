"""Kills processes of a real run at random moments, from a seed, and checks the run after each kill.

``KILLED_ROLES`` gives the allowed cost of a death of each role of ``rlsrl.api.roles``, and of the controller.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import override

from rlsrl.api.resolved import ActorConfig
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import VersionInfo
from rlsrl.testing.closing import ClosedAtExit
from rlsrl.testing.live_runs import Desk, LiveRun, WorkerProcess, await_death, call_watches

Moment = Literal["start-up", "training", "checkpoint", "shutdown"]
"""During the start of a life; between two durable versions; during the write of one; during the clean end after Ctrl-C,
with a resume afterwards."""
MOMENTS: tuple[Moment, ...] = ("start-up", "training", "checkpoint", "shutdown")

CONTROLLER = "controller"
"""The process of ``rlsrl run`` itself. Its death ends all others; the check resumes the run."""

START_UP_SECONDS = 2.0
BETWEEN_VERSIONS_SECONDS = 0.4
SHUTDOWN_SECONDS = 0.1
"""The kills of each moment are spread over this time."""

CHECKPOINTS_BEHIND = 3
"""Checkpoints that may be due and not durable: one being written, one queued, one waiting for the queue."""

INTERRUPTED = 128 + signal.SIGINT

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KilledRole:
    """A role and the allowed cost of the death of one of its processes."""

    name: str
    gang: bool = False
    """Whether its processes end and restart together."""
    holds_samples: bool = False
    """Whether samples in flight may be lost with it."""
    rolls_back: bool = False
    """Whether its successor resumes from the last durable version."""


KILLED_ROLES = {
    role.name: role
    for role in (
        KilledRole(name="actor", holds_samples=True),
        KilledRole(name="trainer", gang=True, holds_samples=True, rolls_back=True),
        KilledRole(name="policy"),
        KilledRole(name="buffer", holds_samples=True),
        KilledRole(name="evaluator"),
        KilledRole(name="coordinator"),
        KilledRole(name=CONTROLLER, gang=True, holds_samples=True, rolls_back=True),
    )
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill, for the log."""

    role: str
    pid: int
    moment: Moment
    state: str
    """The worker's state in the status document; ``unlisted`` before it joins, after it leaves, and for others."""
    version: str | None
    """The newest durable version at the kill, or None."""
    env_steps: int
    """Transitions trained up to that version."""


class KillCampaign(ClosedAtExit):
    """One experiment, trained to its goal while its processes are killed. Use as a context manager.

    The experiment trains ``GatedEnv``, so it trains until ``finish`` opens the gate: every kill precedes the terminal
    record. ``parameters.everySteps`` sets the interval of durable versions.
    """

    def __init__(self, folder: Path, experiment: str, *, seed: int) -> None:
        """Prepare a run in ``folder``; the gate's path replaces ``{gate}`` in the experiment."""
        self._gate = folder / "gate"
        self._desk = Desk(folder, experiment.format(gate=self._gate))
        self._facts = self._desk.facts()
        self._random = random.Random(seed)
        self._run: LiveRun | None = None
        self._num_clean_ends = 0
        self.kills: list[Kill] = []
        """The kills so far; ``kills.jsonl`` has a line for each."""

    def kill(self, role: str, moment: Moment) -> Kill:
        """Kill one process of the role at that moment, and check that the run recovers."""
        while (kill := self._try_to_kill(role, moment)) is None:
            pass
        return kill

    def _try_to_kill(self, role: str, moment: Moment) -> Kill | None:
        """Return the kill, or None if the process had already ended, as in a clean end."""
        self._await_new_version_since_last_kill_of(role)
        if moment == "start-up":
            self._end_life()
        run = self.life()
        self._await_moment(run, moment)
        before = self._facts.newest()
        workers = run.workers()
        if (victim := self._choose(run, role)) is None:
            self._check_interrupted(run)
            return None
        kill = Kill(
            role=role,
            pid=victim.pid,
            moment=moment,
            state=self._state_of(victim),
            version=None if before is None else str(before.version),
            env_steps=0 if before is None else int(before.metadata["env_steps"]),
        )
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._check_interrupted(run)
            return None
        self._log_kill(kill)
        await_death(victim.pid)
        if role == CONTROLLER:
            self._check_all_dead(run, workers)
        elif moment == "shutdown":
            self._check_interrupted(run)
        else:
            self._check_others_alive(run, role, victim, workers)
        self._check_progress(kill)
        return kill

    def life(self) -> LiveRun:
        """Return the current life, or start a new one."""
        if self._run is None:
            self._run = self._desk.begin()
        return self._run

    def edit(self, *changes: str) -> None:
        """Change fields of the spec while the run goes on, such as ``stop.envSteps=1000``."""
        arguments = [part for change in changes for part in ("--set", change)]
        edited = self._desk.call("edit", "live", *arguments)
        assert edited.returncode == 0, edited.stdout + edited.stderr

    def finish(self, *, further_env_steps: int | None = None) -> dict[str, Any]:
        """Let the run reach its goal, check the whole run, and return its summary.

        ``further_env_steps``: the run ends after so many more env steps instead, and trains all that is due for them.
        """
        run = self.life()
        run.until(run.is_complete, "all processes at work")
        if further_env_steps is None:
            self._gate.touch()
        else:
            env_steps = run.until(self._facts.env_steps, "the number of env steps")
            self.edit(f"stop.envSteps={env_steps + further_env_steps}")
        code = run.wait()
        assert code == 0, run.output
        assert self._facts.leftovers() == []
        self._num_clean_ends += 1
        summary = self._facts.json("summary.json")
        assert summary["finished"], summary
        assert summary["reason"] == ("returnMean" if further_env_steps is None else "envSteps"), summary
        self._check_ledger(summary["ledger"])
        self._check_versions()
        return summary

    @override
    def close(self) -> None:
        """Kill the remaining processes of the run."""
        if self._run is not None:
            self._run.close()

    # Lives of the controller.

    def _end_life(self) -> None:
        """End the current life, if any, with SIGINT, as Ctrl-C does."""
        if self._run is not None:
            self._run.until(self._run.is_complete, "all processes at work")
            self._run.send(signal.SIGINT)
            self._check_interrupted(self._run)

    def _check_interrupted(self, run: LiveRun) -> None:
        code = run.wait()
        assert code == INTERRUPTED, run.output
        self._num_clean_ends += 1
        self._close_life(run)

    def _close_life(self, run: LiveRun) -> None:
        assert self._facts.leftovers() == []
        run.close()
        self._run = None

    # Before a kill.

    def _await_new_version_since_last_kill_of(self, role: str) -> None:
        last = next((kill for kill in reversed(self.kills) if kill.role == role), None)
        if last is None or self._is_above(last.version):
            return
        run = self.life()
        run.until(lambda: self._is_above(last.version), f"a durable version above {last.version}")

    def _is_above(self, version: str | None) -> bool:
        newest = self._facts.newest()
        return newest is not None and (version is None or newest.version > Version.parse(version))

    def _await_moment(self, run: LiveRun, moment: Moment) -> None:
        if moment == "start-up":
            run.until(lambda: self._has_processes_of_all_roles(run), "processes of all roles")
            self._pass_time(run, START_UP_SECONDS)
            return
        run.until(run.is_complete, "all processes at work")
        newest = self._facts.newest()
        version = None if newest is None else str(newest.version)
        run.until(lambda: self._is_above(version), f"a durable version above {version}")
        if moment == "training":
            self._pass_time(run, BETWEEN_VERSIONS_SECONDS)
        elif moment == "checkpoint":
            run.until_written(".safetensors.")
        else:
            run.send(signal.SIGINT)
            self._pass_time(run, SHUTDOWN_SECONDS)

    def _has_processes_of_all_roles(self, run: LiveRun) -> bool:
        """Return whether each role has a process; all configs exist before the first process starts."""
        there = {each.role for each in run.workers()}
        return bool(there) and there == {path.stem for path in (self._facts.folder / "config").glob("*.json")}

    def _pass_time(self, run: LiveRun, at_most: float) -> None:
        """Wait for a random time, or until the run ends."""
        pidfd = os.pidfd_open(run.pid)
        try:
            select.select([pidfd], [], [], self._random.uniform(0.0, at_most))
        finally:
            os.close(pidfd)

    def _choose(self, run: LiveRun, role: str) -> WorkerProcess | None:
        """Return a living process of the role, or None."""
        if role == CONTROLLER:
            return None if run.has_ended else WorkerProcess(role=role, pid=run.pid)
        workers = run.workers(role)
        return self._random.choice(workers) if workers else None

    def _state_of(self, victim: WorkerProcess) -> str:
        workers = (self._facts.status() or {"roles": {}})["roles"].get(victim.role, [])
        return next((str(worker["state"]) for worker in workers if worker["pid"] == victim.pid), "unlisted")

    def _log_kill(self, kill: Kill) -> None:
        self.kills.append(kill)
        _log.info("killed %s", kill)
        with (self._desk.folder / "kills.jsonl").open("a") as file:
            file.write(json.dumps(asdict(kill)) + "\n")

    # After a kill.

    def _check_all_dead(self, run: LiveRun, workers: list[WorkerProcess]) -> None:
        for worker in workers:
            await_death(worker.pid)
        for watch in call_watches(self._facts.run_uid):  # each dies with its worker, a moment later
            await_death(watch.pid)
        assert run.wait() == -signal.SIGKILL, run.output
        self._close_life(run)

    def _check_others_alive(self, run: LiveRun, role: str, victim: WorkerProcess, before: list[WorkerProcess]) -> None:
        run.until(lambda: run.is_complete() and victim not in run.workers(), f"a successor of {victim}")
        survivors = {each for each in before if each != victim and not (KILLED_ROLES[role].gang and each.role == role)}
        assert survivors <= set(run.workers()), f"after a kill of {victim} of {before} there are {run.workers()}"

    def _check_progress(self, kill: Kill) -> None:
        """Check that versions and env_steps rise from the last durable version."""
        reached = self._facts.newest()
        run = self.life()
        run.until(lambda: self._has_risen_above(reached), f"versions and env_steps above {reached}, after {kill}")
        resumed = self._facts.logged("trainer-0", "resumed")
        if KILLED_ROLES[kill.role].rolls_back and kill.version is not None:
            assert Version.parse(resumed[-1]["version"]) >= Version.parse(kill.version), f"{kill}: {resumed[-1]}"
        assert not self._facts.is_finished, "every kill precedes the terminal record"

    def _has_risen_above(self, reached: VersionInfo | None) -> bool:
        newest = self._facts.newest()
        if newest is None or reached is None:
            return newest is not None and newest.metadata["env_steps"] > 0
        return newest.version > reached.version and newest.metadata["env_steps"] > reached.metadata["env_steps"]

    def _check_versions(self) -> None:
        """Check that a later version has a higher (attempt, step) and more env_steps."""
        history = sorted(self._facts.versions(), key=lambda info: info.created_at)
        versions = [info.version for info in history]
        assert versions == sorted(versions), versions
        steps = [(info.metadata["env_steps"], info.version.step) for info in history]
        assert steps == sorted(steps), steps

    def _check_ledger(self, ledger: Mapping[str, Any]) -> None:
        assert ledger["balanced"], ledger
        gone = sum(ledger["lost"].values()) + sum(ledger["dropped"].values())
        bound = self._max_gone()
        assert gone <= bound, f"{gone} transitions lost or dropped, at most {bound} may be after {self.kills}: {ledger}"
        if not any(KILLED_ROLES[kill.role].holds_samples for kill in self.kills):
            assert not any(ledger["lost"].values()), ledger
        if not any(KILLED_ROLES[kill.role].rolls_back for kill in self.kills):
            assert ledger["lost"]["rolled_back"] == 0, ledger

    def _max_gone(self) -> int:
        """Return the largest allowed loss: transitions in flight or rolled back at kills, in flight at clean ends."""
        resolved = self._facts.json("resolved.json")
        trainer, actor = resolved["trainer"], ActorConfig.from_json(json.dumps(resolved["actor"]))
        batch = int(trainer["rollout_length"] * trainer["batch_lanes"])
        widest_slot = actor.rollout_length * len(actor.environment_ranks_of(0)) // actor.ring_size
        in_flight = (1 + int(trainer["max_policy_lag"])) * batch + widest_slot
        rolled_back = CHECKPOINTS_BEHIND * int(trainer["versions"]["every_steps"]) * batch
        roles = [KILLED_ROLES[kill.role] for kill in self.kills]
        holders = sum(role.holds_samples for role in roles)
        return (holders + self._num_clean_ends) * in_flight + sum(role.rolls_back for role in roles) * rolled_back
