"""Where the workers of a run are, and so what they are called, where they write and how they find each other.

Beside ``rlsrl.api.resolve``, which takes from the experiment what every placement has in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from rlsrl.api.resolved import ObjectStoreConfig, ParameterStoreConfig
from rlsrl.api.role_names import COORDINATOR, POLICY
from rlsrl.api.spec import RLExperiment

ROSTER = "roster.json"
PARAMETERS = "parameters"
"""The parameter DB's folder in a run folder or on a volume, for experiments that keep it there."""

COORDINATOR_PORT = 7000
"""Where a pod's coordinator serves gRPC."""
STREAMS_PORT = 7001
"""Where a pod's trainer, buffer worker or policy worker serves its streams."""
HTTP_PORT = 8080
"""Where a pod serves ``/metrics``; the coordinator ``/status`` and ``/healthz`` too."""

HEALTH_PORT = 8079
"""Where a trainer pod's launcher answers ``/healthz`` for all of the pod's ranks."""


class Placement(Protocol):
    """Where one run's workers are."""

    @property
    def run_uid(self) -> str:
        """Identity of the run."""

    @property
    def coordinator_address(self) -> str:
        """gRPC target of the coordinator."""

    @property
    def coordinator_serves_at(self) -> str | None:
        """Where the coordinator listens, if not at that target."""

    @property
    def streams_serve_at(self) -> str | None:
        """Where whoever serves streams listens, if not at the endpoint that others know."""

    @property
    def http_address(self) -> str:
        """Where each worker serves its metrics."""

    @property
    def log_folder(self) -> str | None:
        """Where logs are written; None: to the standard output."""

    @property
    def ledger_folder(self) -> str:
        """Where ledger pages are."""

    @property
    def record_folder(self) -> str:
        """Where the coordinator keeps its roster and the learning curve."""

    @property
    def settings_path(self) -> str | None:
        """The file that edits of live settings come by; None where nobody edits what runs."""

    @property
    def parameters_endpoint(self) -> str | None:
        """Where weights are in shared memory; None where workers share none."""

    def samples_endpoint(self, role: str, index: int, *, shared: bool) -> str:
        """Where the trainer or buffer worker with that index takes samples, ``shared``: in shared memory."""

    def inference_endpoint(self, index: int) -> str:
        """Where the policy worker with that index serves actors."""

    def roster_path(self, experiment: RLExperiment) -> str | None:
        """The file of the coordinator's roster; None where no file outlives the coordinator."""

    def parameter_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """The parameter DB as the coordinator reaches it."""

    def reached_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """The parameter DB as the other workers reach it."""


@dataclass(frozen=True, kw_only=True)
class LocalPlacement:
    """A run on this machine: one folder for everything that stays.

    Endpoints are Linux abstract sockets named from the run's uid, so two runs never meet and nothing is left on disk.
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
        """See ``Placement``."""
        return f"unix-abstract:{self._name}-{COORDINATOR}"

    @property
    def log_folder(self) -> str:
        """See ``Placement``."""
        return str(self.run_folder / "logs")

    @property
    def ledger_folder(self) -> str:
        """See ``Placement``."""
        return str(self.run_folder / "ledger")

    @property
    def record_folder(self) -> str:
        """See ``Placement``."""
        return str(self.run_folder)

    @property
    def parameters_endpoint(self) -> str:
        """See ``Placement``."""
        return f"{self._name}-parameters"

    def samples_endpoint(self, role: str, index: int, *, shared: bool) -> str:
        """See ``Placement``."""
        return f"{'' if shared else 'unix-abstract:'}{self._name}-samples-{role}-{index}"

    def inference_endpoint(self, index: int) -> str:
        """See ``Placement``."""
        return f"unix-abstract:{self._name}-inference-{index}"

    def roster_path(self, experiment: RLExperiment) -> str:  # noqa: ARG002 - the run folder outlives everybody
        """See ``Placement``."""
        return str(self.run_folder / ROSTER)

    def parameter_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """See ``Placement``."""
        return _in_bucket(experiment, self.run_uid) or ParameterStoreConfig(folder=str(self.run_folder / PARAMETERS))

    def reached_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """See ``Placement``."""
        return self.parameter_store(experiment)

    @property
    def _name(self) -> str:
        return f"rlsrl-{self.run_uid}"


@dataclass(frozen=True, kw_only=True)
class ClusterPlacement:
    """A run as pods: each serves at its own host and is found by the roster, the coordinator by its Service."""

    run_uid: str
    """The experiment's ``metadata.uid``."""
    coordinator_host: str
    """DNS name of the coordinator's Service."""
    record_folder: str = "/data"
    """Where the coordinator's pod keeps what outlives it: the experiment's volume, if it has one."""
    ledger_folder: str = "/var/lib/rlsrl/ledger"
    """Where a pod's worker keeps its ledger page: it outlives the container, not the pod."""
    settings_path: str = "/etc/rlsrl/settings/settings.json"
    """The file of the coordinator's pod that edits of live settings come by."""

    coordinator_serves_at = f":{COORDINATOR_PORT}"
    streams_serve_at = f":{STREAMS_PORT}"
    http_address = f":{HTTP_PORT}"
    log_folder = None
    parameters_endpoint = None

    @property
    def coordinator_address(self) -> str:
        """See ``Placement``."""
        return f"{self.coordinator_host}:{COORDINATOR_PORT}"

    def samples_endpoint(self, role: str, index: int, *, shared: bool) -> str:  # noqa: ARG002 - there is no memory to share
        """See ``Placement``."""
        return f"roster:{role}/{index}"

    def inference_endpoint(self, index: int) -> str:
        """See ``Placement``."""
        return f"roster:{POLICY}/{index}"

    def roster_path(self, experiment: RLExperiment) -> str | None:
        """See ``Placement``. Without a volume nothing of the pod stays."""
        return None if experiment.spec.parameters.store.object_store is not None else f"{self.record_folder}/{ROSTER}"

    def parameter_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """See ``Placement``."""
        return _in_bucket(experiment, self.run_uid) or ParameterStoreConfig(folder=f"{self.record_folder}/{PARAMETERS}")

    def reached_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """See ``Placement``. What is on a volume only the coordinator reaches."""
        return _in_bucket(experiment, self.run_uid) or ParameterStoreConfig(service=self.coordinator_address)


def _in_bucket(experiment: RLExperiment, run_uid: str) -> ParameterStoreConfig | None:
    """A place of the run's own: what an earlier run of the same name stored must not be taken for this one's."""
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
