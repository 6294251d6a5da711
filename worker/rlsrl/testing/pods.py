"""Workers with the configs of pods, without Kubernetes: each is a process with its own loopback address."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlsrl.api.load import load_text
from rlsrl.api.placement import cluster_placement
from rlsrl.api.resolve import ResolvedExperiment, resolve
from rlsrl.api.resolved import RoleConfig
from rlsrl.rpc.tls import TLS_FOLDER_VARIABLE, TLS_NAME_VARIABLE, Tls
from rlsrl.runtime.coordination import CoordinatorClient
from rlsrl.runtime.identity import POD_VARIABLE
from rlsrl.runtime.process import worker_environment
from rlsrl.testing.certificates import PEER_NAME, MountedSecret
from rlsrl.testing.waiting import DEADLINE_SECONDS

TOKEN = "the-token"


class Pods:
    """One run's workers, each with its own loopback address."""

    def __init__(
        self,
        experiment: str,
        folder: Path,
        stack: ExitStack,
        *,
        secret: MountedSecret | None = None,
        overrides: Sequence[str] = (),
        resumes: Pods | None = None,
    ) -> None:
        """Prepare the run. The exit of ``stack`` ends all started workers; with ``secret`` they use TLS.

        ``resumes`` contains the pods, all deleted, whose run these pods continue. By default they begin a new run.
        """
        self._folder = folder
        self._stack = stack
        self._network = f"127.{secrets.randbelow(250) + 2}.{secrets.randbelow(250) + 1}"
        self._num_hosts = 0
        self._uids: dict[str, str] = {}
        self._experiment = experiment
        self._placement = cluster_placement(
            run_uid=uuid.uuid4().hex,
            coordinator_host=f"{self._network}.1",
            record_folder=str(folder / "data"),
        )
        if resumes is not None:
            self._network, self._placement = resumes._network, resumes._placement  # noqa: SLF001 - of its own class
        self.resolved = self._resolve(overrides)
        self._variables = {"RLSRL_TOKEN": TOKEN}
        tls: Tls | None = None
        if secret is not None:
            self._variables |= {TLS_FOLDER_VARIABLE: str(secret.folder), TLS_NAME_VARIABLE: PEER_NAME}
            tls = secret.tls()
        self.client = CoordinatorClient(self.resolved.coordinator.coordinator_address, TOKEN, tls)
        stack.callback(self.client.close)

    def edit(self, *overrides: str) -> None:
        """Edit the original experiment for workers that start from now on."""
        self.resolved = self._resolve(overrides)

    def _resolve(self, overrides: Sequence[str]) -> ResolvedExperiment:
        return resolve(load_text(self._experiment, overrides=[*overrides]), self._placement)

    @property
    def next_host(self) -> str:
        """The host of the next worker."""
        return f"{self._network}.{self._num_hosts + 1}"

    def start(
        self, role: str, config: RoleConfig | None, *arguments: str, launcher: Sequence[str] = (), host: str = ""
    ) -> tuple[subprocess.Popen[bytes], str]:
        """Start a worker and return its process and host. The coordinator has to be the first.

        ``launcher`` contains the gang launcher's arguments, for several ranks. ``host`` restarts a worker at the same
        host: the container of an existing pod, or a coordinator's pod behind its Service. By default the next free one.

        Raises:
            ValueError: the experiment does not have this role.
        """
        if config is None:
            raise ValueError(f"the experiment has no {role}")
        return self.start_from(role, json.loads(config.to_json()), *arguments, launcher=launcher, host=host)

    def start_from(
        self,
        role: str,
        document: Mapping[str, Any],
        *arguments: str,
        launcher: Sequence[str] = (),
        host: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> tuple[subprocess.Popen[bytes], str]:
        """Start a worker from the JSON value of its config, as ``start`` does.

        ``variables`` are further environment variables, for example the ``PYTHONPATH`` of another commit.
        """
        if not host:
            self._num_hosts += 1
            host = f"{self._network}.{self._num_hosts}"
        path = self._folder / f"{role}-{host}.json"
        path.write_text(json.dumps({**document, "ledger_folder": str(self._pod_folder(host))}))
        module = ["rlsrl.workers.gang_launcher", *launcher] if launcher else ["rlsrl.workers"]
        command = [sys.executable, "-m", *module, "--role", role, "--config", str(path), *arguments]
        pod = {"RLSRL_HOST": host, POD_VARIABLE: self._uids.setdefault(host, uuid.uuid4().hex)}
        environment = worker_environment({**os.environ, **self._variables, **pod, **(variables or {})}, role)
        with (self._folder / f"{role}-{host}.log").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self._stack.callback(process.wait, DEADLINE_SECONDS)
        self._stack.callback(process.kill)
        return process, host

    def delete(self, process: subprocess.Popen[bytes], host: str) -> None:
        """Delete the pod of that host without a grace period, with its files."""
        process.kill()
        process.wait(DEADLINE_SECONDS)
        shutil.rmtree(self._pod_folder(host), ignore_errors=True)
        del self._uids[host]

    def _pod_folder(self, host: str) -> Path:
        return self._folder / "pods" / host

    def log(self, role: str, host: str) -> str:
        """Return the worker's standard output and error."""
        return (self._folder / f"{role}-{host}.log").read_text()

    def status(self) -> dict[str, Any]:
        """Return the coordinator's status document."""
        return self.client.status(DEADLINE_SECONDS)

    def train_steps(self) -> int:
        """Return the training steps in the coordinator's status document."""
        return int(self.status()["totals"]["train_steps"] or 0)

    def place(self, role: str, index: int) -> str | None:
        """Return the stream address of the running worker with that index, or None."""
        for worker in self.status()["roles"].get(role, []):
            if worker["index"] == index and worker["state"] == "running":
                return str(worker["endpoints"]["streams"])
        return None
