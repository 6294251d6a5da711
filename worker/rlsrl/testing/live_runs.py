"""Real runs for tests: ``rlsrl run`` as a user calls it, in a process of its own without a terminal, and what is to be
seen of it from outside while it lives and after it. Linux.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sysconfig
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import psutil

from rlsrl.api.resolve import POLICY_NAME
from rlsrl.parameters.protocols import VersionInfo
from rlsrl.parameters.terminal import TERMINAL_KEY
from rlsrl.rpc.auth import TOKEN_VARIABLE
from rlsrl.testing.folder_watch import FolderWatch
from rlsrl.workers.build.run_database import open_run_database

DEADLINE_SECONDS = 120.0
"""For what takes seconds on an idle machine: never reached."""

ANSWER_SECONDS = 5.0
"""How long the coordinator may take to answer one question."""

GATED_EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{factory: "rlsrl.testing.environments:GatedEnv", kwargs: {{gate: "{gate}"}}}}
  policy: {{network: {{mlp: {{hiddenSizes: [16]}}}}}}
  algorithm: {{ppo: {{epochs: 2, minibatchSize: 256}}}}
  actors: {{replicas: 2, environments: 8, rolloutLength: 64}}
  parameters: {{everySteps: 10}}
  stop: {{returnMean: 7.5, episodes: 50}}
  restarts: {{budget: 10, decaySeconds: 1}}
"""
"""An experiment that goes on until the file ``gate`` is there, with small and frequent versions."""

_LAUNCHER = "rlsrl.workers.gang_launcher"
_Value = TypeVar("_Value")


class RunEnded(Exception):
    """The command ended before what was waited for."""


@dataclass(frozen=True, kw_only=True)
class WorkerProcess:
    """A worker of a live run."""

    role: str
    pid: int


class Desk:
    """A working folder with one experiment, where commands are given as a user gives them."""

    def __init__(self, folder: Path, experiment: str) -> None:
        """Put the experiment, a YAML text whose ``metadata.name`` is ``live``, into the folder."""
        self.folder = folder
        self.run_folder = folder / "runs" / "live"
        self.run_folder.parent.mkdir(exist_ok=True)
        (folder / "live.yaml").write_text(experiment)

    def begin(self, *arguments: str, environment: Mapping[str, str] | None = None) -> LiveRun:
        """``rlsrl run live.yaml`` with those further arguments and environment variables; returns at once."""
        command = ["run", "live.yaml", *arguments]
        env = {**os.environ, **(environment or {})}
        return LiveRun(command, cwd=self.folder, run_folder=self.run_folder, env=env)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Any ``rlsrl`` command, to its end."""
        return subprocess.run(
            [rlsrl_command(), *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )

    def facts(self) -> RunFolderFacts:
        """What stands in the run's folder now."""
        return RunFolderFacts(self.run_folder)


class RunFolderFacts:
    """What a run left on disk, read anew at each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def json(self, name: str) -> dict[str, Any]:
        """One of the folder's JSON files."""
        value: dict[str, Any] = json.loads((self.folder / name).read_text())
        return value

    @property
    def run_uid(self) -> str:
        """The run's identity."""
        return str(self.json("controller.json")["run_uid"])

    def replicas(self) -> dict[str, int]:
        """How many processes of each role there should be."""
        resolved = self.json("resolved.json")
        replicas = {
            "actor": resolved["num_actors"],
            "buffer": resolved["coordinator"]["num_buffer_workers"],
            "coordinator": 1,
            "evaluator": resolved["coordinator"]["num_evaluators"],
            "policy": resolved["coordinator"]["num_policy_workers"],
            "trainer": resolved["coordinator"]["num_trainers"],
        }
        return {role: count for role, count in replicas.items() if count}

    def versions(self) -> list[VersionInfo]:
        """The stored versions, oldest first."""
        db = open_run_database(self.folder)
        return db.versions(POLICY_NAME) if POLICY_NAME in db.policies() else []

    @property
    def is_finished(self) -> bool:
        """Whether the run has its terminal record."""
        return any(TERMINAL_KEY in info.metadata for info in self.versions())

    def newest(self) -> VersionInfo | None:
        """The newest durable version; None before the first."""
        return next(reversed(self.versions()), None)

    def logged(self, worker: str, event: str) -> list[dict[str, Any]]:
        """The events of that name in a worker's log, ``trainer-0`` for example, in order."""
        path = self.folder / "logs" / f"{worker}.jsonl"
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [entry for entry in _whole(lines) if entry.get("event") == event]

    def status(self) -> dict[str, Any] | None:
        """The coordinator's ``/status``; None while there is none that answers."""
        serving = self.logged("coordinator-0", "serving")
        if not serving:
            return None
        try:
            status: dict[str, Any] = json.loads(fetch(f"http://{serving[-1]['http']}/status", self._token()))
        except (OSError, psutil.Error):
            return None
        return status

    def _token(self) -> str:
        """The run's token, as its workers have it."""
        return next((process.environ().get(TOKEN_VARIABLE, "") for process, _ in _workers_of(self.folder)), "")

    def leftovers(self) -> list[str]:
        """Processes, sockets and shared memory of the run that are there now; nothing may be once it has ended."""
        uid = self.run_uid
        left = [f"process {process.pid} {' '.join(command)}" for process, command in _workers_of(self.folder)]
        left += [f"socket {line}" for line in Path("/proc/net/unix").read_text().splitlines() if uid in line]
        left += [f"shared memory {name}" for name in os.listdir("/dev/shm") if uid in name]
        return left


class LiveRun:
    """One life of ``rlsrl run``. Use it as a context manager: at its end everything of it is dead."""

    def __init__(self, arguments: Sequence[str], *, cwd: Path, run_folder: Path, env: Mapping[str, str]) -> None:
        """Start it; its output goes to a file in ``cwd``."""
        self.facts = RunFolderFacts(run_folder)
        self._output = cwd / "output.txt"
        self._watch = FolderWatch(cwd)
        with self._output.open("ab") as output:
            self._output_start = output.tell()
            self._process = subprocess.Popen(
                [rlsrl_command(), *arguments],
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """The controller's process."""
        return self._process.pid

    @property
    def output(self) -> str:
        """What this life has printed so far."""
        return self._output.read_bytes()[self._output_start :].decode()

    @property
    def has_ended(self) -> bool:
        """Whether the controller is gone."""
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def workers(self, role: str | None = None) -> list[WorkerProcess]:
        """The living workers, of that role or all."""
        found = [
            WorkerProcess(role=command[command.index("--role") + 1], pid=process.pid)
            for process, command in _workers_of(self.facts.folder)
        ]
        return sorted((each for each in found if role in (None, each.role)), key=lambda each: (each.role, each.pid))

    def is_complete(self) -> bool:
        """Whether all that should be there is at work, and the coordinator knows it."""
        status = self.facts.status()
        if status is None:
            return False
        running = {
            (role, worker["pid"])
            for role, workers in status["roles"].items()
            for worker in workers
            if worker["state"] == "running"
        }
        alive = {(worker.role, worker.pid) for worker in self.workers()}
        return running == {each for each in alive if each[0] != "coordinator"} and self.facts.replicas() == Counter(
            role for role, _ in alive
        )

    def until(self, condition: Callable[[], _Value | None], what: str, *, timeout: float = DEADLINE_SECONDS) -> _Value:
        """Wait until ``condition`` gives something true, and return that. Looked at whenever the run wrote something.

        Raises:
            RunEnded: the command ended, and it still does not hold.
            TimeoutError: it did not come to hold in time.
        """
        deadline = time.monotonic() + timeout
        while True:
            ended = self.has_ended
            if value := condition():
                return value
            if ended:
                raise RunEnded(f"exit code {self._process.wait()} before {what}:\n{self.output}")
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"waited {timeout} s for {what}:\n{self.output}")
            self._watch.wait(self._pidfd, timeout=remaining)

    def until_written(self, part: str, *, timeout: float = DEADLINE_SECONDS) -> None:
        """Return the moment a file is begun or changed whose name holds ``part``.

        Raises:
            TimeoutError: none was, or the command ended.
        """
        if not self._watch.wait_for_name(part, self._pidfd, timeout=timeout):
            raise TimeoutError(f"no file *{part}* was written:\n{self.output}")

    def send(self, signum: signal.Signals) -> None:
        """Signal the controller, and nobody else."""
        signal.pidfd_send_signal(self._pidfd, signum)

    def wait(self, *, timeout: float = DEADLINE_SECONDS) -> int:
        """The command's exit code, once it has ended.

        Raises:
            TimeoutError: it goes on.
        """
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise TimeoutError(f"rlsrl run still runs after {timeout} s:\n{self.output}")
        return self._process.wait()

    def close(self) -> None:
        """Kill what is left of it; returns when all of it is dead."""
        pids = [worker.pid for worker in self.workers()]
        if not self.has_ended:
            self.send(signal.SIGKILL)
        self._process.wait(DEADLINE_SECONDS)
        for pid in pids:
            await_death(pid)
        os.close(self._pidfd)
        self._watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def rlsrl_command() -> str:
    """The ``rlsrl`` command of this environment."""
    return str(Path(sysconfig.get_path("scripts")) / "rlsrl")


def fetch(url: str, token: str = "") -> str:
    """What a worker's HTTP server answers to who has that token.

    Raises:
        OSError: nothing, in time, or an error.
    """
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        text: bytes = answer.read()
        return text.decode()


def await_death(pid: int, *, timeout: float = DEADLINE_SECONDS) -> None:
    """Return when the process is dead, reaped or not.

    Raises:
        TimeoutError: it lives.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([pidfd], [], [], timeout)[0]:
            raise TimeoutError(f"process {pid} lives")
    finally:
        os.close(pidfd)


def _workers_of(run_folder: Path) -> Iterator[tuple[psutil.Process, list[str]]]:
    """The run's living worker processes with their commands."""
    configs = str(run_folder / "config")
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            # A gang's ranks are forks of their launcher.
            is_rank = _LAUNCHER in command and (parent := process.parent()) is not None and parent.cmdline() == command
        except psutil.Error:
            continue  # it ended meanwhile, or is not ours to look at
        is_worker = is_rank or "rlsrl.workers" in command
        if is_worker and any(argument.startswith(configs) for argument in command):
            yield process, command


def _whole(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue  # a killed writer left a part of a line
