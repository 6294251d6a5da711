"""Real runs for tests: ``rlsrl run`` in its own process without a terminal, and its observable state. Linux."""

from __future__ import annotations

import contextlib
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
from typing import Any, TypeVar

import psutil
from typing_extensions import override

from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.role_names import COORDINATOR
from rlsrl.parameters.protocols import VersionInfo
from rlsrl.parameters.terminal import TERMINAL_KEY
from rlsrl.rpc.auth import TOKEN_VARIABLE
from rlsrl.testing.closing import ClosedAtExit
from rlsrl.testing.folder_watch import FolderWatch
from rlsrl.testing.waiting import DEADLINE_SECONDS
from rlsrl.workers.build.run_database import open_run_database

ANSWER_SECONDS = 5.0
"""Deadline of one request to the coordinator."""

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
"""An experiment that trains until the file ``gate`` exists, with small and frequent versions."""

_LAUNCHER = "rlsrl.workers.gang_launcher"
_WATCH = "rlsrl.workers.call_watch_process"
_Value = TypeVar("_Value")


class RunEnded(Exception):
    """The command ended before the awaited condition."""


@dataclass(frozen=True, kw_only=True)
class WorkerProcess:
    """A worker of a live run."""

    role: str
    pid: int


class Desk:
    """A working folder with one experiment, in which tests call commands as a user does."""

    def __init__(self, folder: Path, experiment: str) -> None:
        """Write the experiment into the folder: YAML with the name ``live``."""
        self.folder = folder
        self.run_folder = folder / "runs" / "live"
        self.run_folder.parent.mkdir(exist_ok=True)
        (folder / "live.yaml").write_text(experiment)

    def begin(self, *arguments: str, environment: Mapping[str, str] | None = None) -> LiveRun:
        """Start ``rlsrl run live.yaml`` with further arguments and environment variables; return at once."""
        command = ["run", "live.yaml", *arguments]
        env = {**os.environ, **(environment or {})}
        return LiveRun(command, cwd=self.folder, run_folder=self.run_folder, env=env)

    def call(
        self, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = DEADLINE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run an ``rlsrl`` command to its end, with further environment variables.

        Raises:
            TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        return subprocess.run(
            [rlsrl_command(), *arguments],
            cwd=self.folder,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def facts(self) -> RunFolderFacts:
        """Return a reader of the run folder."""
        return RunFolderFacts(self.run_folder)


class RunFolderFacts:
    """Reads a run folder; each call reads the disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def json(self, name: str) -> dict[str, Any]:
        """Return one of the folder's JSON files."""
        value: dict[str, Any] = json.loads((self.folder / name).read_text())
        return value

    @property
    def run_uid(self) -> str:
        """The run's identity."""
        return str(self.json("controller.json")["run_uid"])

    def replicas(self) -> dict[str, int]:
        """Return the configured number of processes of each role."""
        config = CoordinatorConfig.from_json(json.dumps(self.json("resolved.json")["coordinator"]))
        return {COORDINATOR: 1, **config.num_workers}

    def versions(self) -> list[VersionInfo]:
        """Return the stored versions, oldest first."""
        db = open_run_database(self.folder)
        return db.versions(POLICY_NAME) if POLICY_NAME in db.policies() else []

    @property
    def is_finished(self) -> bool:
        """Whether the run has its terminal record."""
        return any(TERMINAL_KEY in info.metadata for info in self.versions())

    def newest(self) -> VersionInfo | None:
        """Return the newest durable version, or None."""
        return next(reversed(self.versions()), None)

    def logged(self, worker: str, event: str) -> list[dict[str, Any]]:
        """Return the events of that name in a worker's log, for example ``trainer-0``, in order."""
        path = self.folder / "logs" / f"{worker}.jsonl"
        try:
            lines = path.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [entry for entry in _whole(lines) if entry.get("event") == event]

    def status(self) -> dict[str, Any] | None:
        """Return the coordinator's ``/status``; None without an answer."""
        serving = self.logged("coordinator-0", "serving")
        if not serving:
            return None
        try:
            status: dict[str, Any] = json.loads(fetch(f"http://{serving[-1]['http']}/status", self._token()))
        except (OSError, psutil.Error):
            return None
        return status

    def train_steps(self) -> int:
        """Return the training steps in the coordinator's ``/status``; 0 before the first, and without an answer."""
        return self._total("train_steps")

    def env_steps(self) -> int:
        """Return the env steps there; 0 before the first, and without an answer."""
        return self._total("env_steps")

    def _total(self, name: str) -> int:
        totals = (self.status() or {}).get("totals") or {}
        return int(totals.get(name) or 0)

    def workers(self, role: str | None = None) -> list[WorkerProcess]:
        """Return the living workers, of one role or all."""
        found = [
            WorkerProcess(role=command[command.index("--role") + 1], pid=process.pid)
            for process, command in _workers_of(self.folder)
        ]
        return sorted((each for each in found if role in (None, each.role)), key=lambda each: (each.role, each.pid))

    def _token(self) -> str:
        """Return the run's token from a worker's environment."""
        return next((process.environ().get(TOKEN_VARIABLE, "") for process, _ in _workers_of(self.folder)), "")

    def leftovers(self) -> list[str]:
        """Return the run's existing processes, sockets and shared memory; empty after a run has ended."""
        uid = self.run_uid
        left = [f"process {process.pid} {' '.join(command)}" for process, command in _workers_of(self.folder)]
        left += [f"call watch {process.pid}" for process in call_watches(uid)]
        left += [f"socket {line}" for line in Path("/proc/net/unix").read_text().splitlines() if uid in line]
        left += [f"shared memory {name}" for name in os.listdir("/dev/shm") if uid in name]
        return left


class LiveRun(ClosedAtExit):
    """One life of ``rlsrl run``. Use as a context manager, which ends all its processes."""

    def __init__(self, arguments: Sequence[str], *, cwd: Path, run_folder: Path, env: Mapping[str, str]) -> None:
        """Start the command; its output goes to a file in ``cwd``. It dies with the calling thread."""
        self.facts = RunFolderFacts(run_folder)
        self._output = cwd / "output.txt"
        self._watch = FolderWatch(cwd)
        with self._output.open("ab") as output:
            self._output_start = output.tell()
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", rlsrl_command(), *arguments],
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """The controller's process id."""
        return self._process.pid

    @property
    def output(self) -> str:
        """The output of this life so far."""
        return self._output.read_bytes()[self._output_start :].decode()

    @property
    def has_ended(self) -> bool:
        """Whether the controller has ended."""
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def workers(self, role: str | None = None) -> list[WorkerProcess]:
        """Return the living workers, of one role or all."""
        return self.facts.workers(role)

    def is_complete(self) -> bool:
        """Return whether all configured processes are running, also according to the coordinator."""
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
        """Wait until ``condition`` returns a true value, and return this value. Checked after each write of the run.

        Raises:
            RunEnded: the command ended without it.
            TimeoutError: it did not become true in time.
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

    def until_written(self, part: str) -> None:
        """Wait until a file whose name contains ``part`` is created or changed.

        Raises:
            TimeoutError: no such file, or the command ended.
        """
        if not self._watch.wait_for_name(part, self._pidfd, timeout=DEADLINE_SECONDS):
            raise TimeoutError(f"no file *{part}* was written:\n{self.output}")

    def send(self, signum: signal.Signals) -> None:
        """Signal the controller only."""
        signal.pidfd_send_signal(self._pidfd, signum)

    def wait(self, *, timeout: float = DEADLINE_SECONDS) -> int:
        """Wait for the end of the command and return its exit code.

        Raises:
            TimeoutError: the command still runs.
        """
        if not select.select([self._pidfd], [], [], timeout)[0]:
            raise TimeoutError(f"rlsrl run still runs after {timeout} s:\n{self.output}")
        return self._process.wait()

    @override
    def close(self) -> None:
        """Kill the remaining processes and wait until they are dead."""
        pids = [worker.pid for worker in self.workers()]
        if not self.has_ended:
            self.send(signal.SIGKILL)
        self._process.wait(DEADLINE_SECONDS)
        for pid in pids:
            await_death(pid)
        os.close(self._pidfd)
        self._watch.close()


def rlsrl_command() -> str:
    """Return the path of this environment's ``rlsrl`` command."""
    return str(Path(sysconfig.get_path("scripts")) / "rlsrl")


def fetch(url: str, token: str = "") -> str:
    """Return the answer of a worker's HTTP server to a request with that token.

    Raises:
        OSError: no answer in time, or an error.
    """
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        text: bytes = answer.read()
        return text.decode()


def await_death(pid: int) -> None:
    """Wait until the process is dead, reaped or not.

    Raises:
        TimeoutError: the process is alive.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if not select.select([pidfd], [], [], DEADLINE_SECONDS)[0]:
            raise TimeoutError(f"process {pid} lives")
    finally:
        os.close(pidfd)


def call_watches(run_uid: str) -> list[psutil.Process]:
    """Return the living call watches of a run: the coordinator's address in their options contains its identity."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or not accessible
            command = process.cmdline()
            if _WATCH in command and run_uid in command[-1]:
                found.append(process)
    return found


def _workers_of(run_folder: Path) -> Iterator[tuple[psutil.Process, list[str]]]:
    """Yield the run's living worker processes with their commands."""
    configs = str(run_folder / "config")
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            # A gang's ranks are forks of their launcher.
            is_rank = _LAUNCHER in command and (parent := process.parent()) is not None and parent.cmdline() == command
        except psutil.Error:
            continue  # ended meanwhile, or not accessible
        is_worker = is_rank or "rlsrl.workers" in command
        if is_worker and any(argument.startswith(configs) for argument in command):
            yield process, command


def _whole(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue  # a killed writer left a partial line
