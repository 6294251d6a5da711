"""Where a run's workers are: their addresses and folders on one machine, and on a cluster. Pure.

``rlsrl.api.resolve`` combines a placement with an experiment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from rlsrl.api.resolved import ObjectStoreConfig, ParameterStoreConfig
from rlsrl.api.role_names import COORDINATOR
from rlsrl.api.spec import RLExperiment

ROSTER = "roster.json"
"""The file with the leases of the roster, in a run folder or on a volume."""
SETTINGS = "settings.json"
"""The file with the live settings, in a run folder."""
PARAMETERS = "parameters"
"""The parameter DB's folder in a run folder or on a volume, for experiments that keep it there."""

COORDINATOR_PORT = 7000
"""The port where a coordinator pod serves gRPC."""
STREAMS_PORT = 7001
"""The port where a trainer, buffer worker or policy worker pod serves its streams."""
HTTP_PORT = 8080
"""The port where a pod serves ``/metrics``; the coordinator also serves ``/status`` and ``/healthz``."""
STATUS_PAGE, CURVE_PAGE, VERSIONS_PAGE, LOGS_PAGE, LOG_PAGE = "/status", "/curve", "/versions", "/logs", "/log"
"""Paths of the coordinator's pages at that port: the status document, rows of the learning curve after a place, all
versions, the names of the logs, and the end of one log."""

HEALTH_PORT = 8079
"""The port where a trainer pod's launcher answers ``/healthz`` for all ranks of the pod."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where one run's workers are, what they serve and where they write."""

    run_uid: str
    """Identity of the run."""
    coordinator_address: str
    """gRPC target of the coordinator."""
    worker_address: str
    """gRPC target of another worker that serves streams, with ``{role}`` and ``{index}`` to fill in."""
    shared_memory: str | None
    """The beginning of the names of shared memory; None where workers share no memory."""
    coordinator_serves_at: str | None = None
    """The address where the coordinator listens; None: ``coordinator_address``."""
    streams_serve_at: str | None = None
    """The address where a worker that serves streams listens; None: its endpoint in the configs."""
    http_address: str
    """The address where each worker serves its metrics."""
    log_folder: str | None = None
    """The folder of log files; None: workers log to standard output."""
    ledger_folder: str
    """The folder of ledger pages."""
    replay_folder: str
    """The folder of replay stores."""
    volume_folder: str | None = None
    """With replay: the folder of a buffer worker's own volume, which has a folder for each run that used it. Ledger and
    replay folder are in that of this run. None: the run folder is on a disk that outlives all workers."""
    record_folder: str
    """The folder where the coordinator writes the leases and the learning curve, and of the parameter DB."""
    shares_disk: bool
    """Whether the record folder is on a disk that all workers of the run read and that outlives them."""
    settings_path: str | None = None
    """The file with the edited live settings, which the coordinator reads; None: no file."""
    first_attempt: int = 1
    """The first attempt since the failed run was last tried again."""

    @property
    def parameters_endpoint(self) -> str | None:
        """The name of the shared memory with the weights; None where workers share no memory."""
        return self.shared_memory and f"{self.shared_memory}-parameters"

    def endpoint(self, role: str, index: int, *, shared: bool = False) -> str:
        """Return where the worker with that index serves its streams; ``shared``: the name of its shared memory."""
        return f"{self.shared_memory}-{role}-{index}" if shared else self.worker_address.format(role=role, index=index)

    def roster_path(self, experiment: RLExperiment) -> str | None:
        """Return the file with the leases of the roster, or None where no file outlives the coordinator."""
        has_file = self.shares_disk or experiment.spec.parameters.store.object_store is None
        return f"{self.record_folder}/{ROSTER}" if has_file else None

    def parameter_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """Return where the coordinator reaches the parameter DB: the experiment's bucket, or a folder.

        Each run has its own prefix in the bucket, which earlier runs of the same name do not use.
        """
        store = experiment.spec.parameters.store.object_store
        if store is None:
            return ParameterStoreConfig(folder=f"{self.record_folder}/{PARAMETERS}")
        return ParameterStoreConfig(
            object_store=ObjectStoreConfig(
                url=f"{store.url.rstrip('/')}/{experiment.metadata.name}-{self.run_uid}",
                endpoint=store.endpoint,
                region=store.region,
                answer_seconds=store.answer_seconds,
            )
        )

    def reached_store(self, experiment: RLExperiment) -> ParameterStoreConfig:
        """Return where the other workers reach the parameter DB: directly, or through the coordinator's service."""
        store = self.parameter_store(experiment)
        reached = store.folder is None or self.shares_disk
        return store if reached else ParameterStoreConfig(service=self.coordinator_address)


def local_placement(run_uid: str, run_folder: PurePath) -> Placement:
    """Return the placement of a run on this machine. Everything that stays is in one folder.

    Endpoints are Linux abstract sockets with the run's uid in their names: runs cannot collide, and no file is left.

    Args:
        run_uid: identity of the run, unique on the machine.
        run_folder: the run's folder, absolute.
    """
    name = f"rlsrl-{run_uid}"
    return Placement(
        run_uid=run_uid,
        coordinator_address=f"unix-abstract:{name}-{COORDINATOR}",
        worker_address=f"unix-abstract:{name}-{{role}}-{{index}}",
        shared_memory=name,
        http_address="127.0.0.1:0",
        log_folder=f"{run_folder}/logs",
        ledger_folder=f"{run_folder}/ledger",
        replay_folder=f"{run_folder}/replay",
        record_folder=str(run_folder),
        shares_disk=True,
        settings_path=f"{run_folder}/{SETTINGS}",
    )


def cluster_placement(
    run_uid: str,
    coordinator_host: str,
    *,
    record_folder: str = "/data",
    state_folder: str = "/var/lib/rlsrl/runs",
    settings_path: str = "/etc/rlsrl/settings/settings.json",
    first_attempt: int = 1,
) -> Placement:
    """Return the placement of a run as pods. The coordinator sends the pods each other's addresses.

    Args:
        run_uid: the experiment's ``metadata.uid``, and the number of the attempt if that began again from step 0.
        coordinator_host: DNS name of the coordinator's Service.
        record_folder: where the coordinator's pod mounts the experiment's volume, if it has one.
        state_folder: the folder of a pod's ledger page and replay store, in a folder of the run. It outlives the
            container but, except for buffer workers with replay, not the pod.
        settings_path: the file of the coordinator's pod with the edited live settings.
        first_attempt: the first attempt since the failed experiment was last tried again.
    """
    return Placement(
        run_uid=run_uid,
        coordinator_address=f"{coordinator_host}:{COORDINATOR_PORT}",
        worker_address="roster:{role}/{index}",  # ``rlsrl.runtime.addresses.Directory`` resolves it.
        shared_memory=None,
        coordinator_serves_at=f":{COORDINATOR_PORT}",
        streams_serve_at=f":{STREAMS_PORT}",
        http_address=f":{HTTP_PORT}",
        ledger_folder=f"{state_folder}/{run_uid}/ledger",
        replay_folder=f"{state_folder}/{run_uid}/replay",
        volume_folder=state_folder,
        record_folder=record_folder,
        shares_disk=False,
        settings_path=settings_path,
        first_attempt=first_attempt,
    )
