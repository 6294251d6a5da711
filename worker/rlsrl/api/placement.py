"""Where a run's workers are: their addresses and folders on one machine, and on a cluster. Pure.

``rlsrl.api.resolve`` combines a placement with an experiment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from rlsrl.api.resolved import ObjectStoreConfig, ParameterStoreConfig
from rlsrl.api.role_names import COORDINATOR, POLICY
from rlsrl.api.spec import RLExperiment

ROSTER = "roster.json"
"""The file of the leases in a run folder or on a volume."""
PARAMETERS = "parameters"
"""The parameter DB's folder in a run folder or on a volume, for experiments that keep it there."""

COORDINATOR_PORT = 7000
"""The port where a coordinator pod serves gRPC."""
STREAMS_PORT = 7001
"""The port where a trainer, buffer worker or policy worker pod serves its streams."""
HTTP_PORT = 8080
"""The port where a pod serves ``/metrics``; the coordinator also serves ``/status`` and ``/healthz``."""

HEALTH_PORT = 8079
"""The port where a trainer pod's launcher answers ``/healthz`` for all ranks of the pod."""


class Placement(Protocol):
    """Where one run's workers are, what they serve and where they write."""

    @property
    def run_uid(self) -> str:
        """Identity of the run."""

    @property
    def coordinator_address(self) -> str:
        """gRPC target of the coordinator."""

    @property
    def coordinator_serves_at(self) -> str | None:
        """The address where the coordinator listens; None: ``coordinator_address``."""

    @property
    def streams_serve_at(self) -> str | None:
        """The address where a worker that serves streams listens; None: its endpoint in the configs."""

    @property
    def http_address(self) -> str:
        """The address where each worker serves its metrics."""

    @property
    def log_folder(self) -> str | None:
        """The folder of log files; None: workers log to standard output."""

    @property
    def ledger_folder(self) -> str:
        """The folder of ledger pages."""

    @property
    def record_folder(self) -> str:
        """The folder where the coordinator writes the leases and the learning curve."""

    @property
    def settings_path(self) -> str | None:
        """The file with the edited live settings; None where a running experiment cannot be edited."""

    @property
    def parameters_endpoint(self) -> str | None:
        """The name of the shared memory with the weights; None where workers share no memory."""

    def samples_endpoint(self, role: str, index: int, *, shared: bool) -> str:
        """Return where the worker with that index takes samples; ``shared``: in shared memory."""

    def inference_endpoint(self, index: int) -> str:
        """Return where the policy worker with that index serves actors."""

    def roster_path(self, experiment: RLExperiment) -> str | None:
        """Return the file of the leases, or None where no file outlives the coordinator."""

    def parameter_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """Return where the coordinator reaches the parameter DB."""

    def reached_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """Return where the other workers reach the parameter DB."""


@dataclass(frozen=True, kw_only=True)
class LocalPlacement:
    """A run on this machine. Everything that stays is in one folder.

    Endpoints are Linux abstract sockets with the run's uid in their names: runs cannot collide, and no file is left.
    """

    run_uid: str
    """Identity of the run, unique on the machine."""
    run_folder: PurePath
    """The run's folder, absolute."""

    coordinator_serves_at = None
    streams_serve_at = None
    settings_path = None
    http_address = "127.0.0.1:0"

    @property
    def coordinator_address(self) -> str:
        """The abstract socket of the coordinator."""
        return f"unix-abstract:{self._name}-{COORDINATOR}"

    @property
    def log_folder(self) -> str:
        """The folder ``logs`` of the run folder."""
        return str(self.run_folder / "logs")

    @property
    def ledger_folder(self) -> str:
        """The folder ``ledger`` of the run folder."""
        return str(self.run_folder / "ledger")

    @property
    def record_folder(self) -> str:
        """The run folder itself."""
        return str(self.run_folder)

    @property
    def parameters_endpoint(self) -> str:
        """The name of the shared memory with the weights."""
        return f"{self._name}-parameters"

    def samples_endpoint(self, role: str, index: int, *, shared: bool) -> str:
        """Return the name of a shared memory, or an abstract socket."""
        return f"{'' if shared else 'unix-abstract:'}{self._name}-samples-{role}-{index}"

    def inference_endpoint(self, index: int) -> str:
        """Return the abstract socket of the policy worker."""
        return f"unix-abstract:{self._name}-inference-{index}"

    def roster_path(self, experiment: RLExperiment) -> str:  # noqa: ARG002 - the run folder outlives all processes
        """Return the file in the run folder."""
        return str(self.run_folder / ROSTER)

    def parameter_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """Return the experiment's bucket, or a folder in the run folder."""
        return _in_bucket(experiment, self.run_uid) or ParameterStoreConfig(folder=str(self.run_folder / PARAMETERS))

    def reached_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """Return the same store: all workers read the same disk."""
        return self.parameter_store(experiment)

    @property
    def _name(self) -> str:
        return f"rlsrl-{self.run_uid}"


@dataclass(frozen=True, kw_only=True)
class ClusterPlacement:
    """A run as pods. Pods reach the coordinator by its Service; the coordinator sends them the others' addresses."""

    run_uid: str
    """The experiment's ``metadata.uid``."""
    coordinator_host: str
    """DNS name of the coordinator's Service."""
    record_folder: str = "/data"
    """The folder of the coordinator's pod for state that outlives it: the experiment's volume, if it has one."""
    ledger_folder: str = "/var/lib/rlsrl/ledger"
    """The folder of a pod's ledger page, which outlives the container but not the pod."""
    settings_path: str = "/etc/rlsrl/settings/settings.json"
    """The file of the coordinator's pod with the edited live settings."""

    coordinator_serves_at = f":{COORDINATOR_PORT}"
    streams_serve_at = f":{STREAMS_PORT}"
    http_address = f":{HTTP_PORT}"
    log_folder = None
    parameters_endpoint = None

    @property
    def coordinator_address(self) -> str:
        """The gRPC port of the coordinator's Service."""
        return f"{self.coordinator_host}:{COORDINATOR_PORT}"

    def samples_endpoint(self, role: str, index: int, *, shared: bool) -> str:  # noqa: ARG002 - pods share no memory
        """Return an address that ``rlsrl.runtime.addresses.Directory`` resolves."""
        return f"roster:{role}/{index}"

    def inference_endpoint(self, index: int) -> str:
        """Return an address that ``rlsrl.runtime.addresses.Directory`` resolves."""
        return f"roster:{POLICY}/{index}"

    def roster_path(self, experiment: RLExperiment) -> str | None:
        """Return the file on the volume. An experiment with an object store has no volume."""
        return None if experiment.spec.parameters.store.object_store is not None else f"{self.record_folder}/{ROSTER}"

    def parameter_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """Return the experiment's bucket, or a folder on the volume."""
        return _in_bucket(experiment, self.run_uid) or ParameterStoreConfig(folder=f"{self.record_folder}/{PARAMETERS}")

    def reached_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """Return the experiment's bucket, or the coordinator's service: only its pod mounts the volume."""
        return _in_bucket(experiment, self.run_uid) or ParameterStoreConfig(service=self.coordinator_address)


def _in_bucket(experiment: RLExperiment, run_uid: str) -> ParameterStoreConfig | None:
    """Return the run's own prefix in the bucket, which earlier runs of the same name do not use; None without one."""
    store = experiment.spec.parameters.store.object_store
    if store is None:
        return None
    return ParameterStoreConfig(
        object_store=ObjectStoreConfig(
            url=f"{store.url.rstrip('/')}/{experiment.metadata.name}-{run_uid}",
            endpoint=store.endpoint,
            region=store.region,
            answer_seconds=store.answer_seconds,
        )
    )
