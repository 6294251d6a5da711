"""The coordinator: the experiment's control point.

The main thread only watches. One thread runs the event loop of the gRPC server, which serves ``CoordinatorService`` and
``ParameterService`` (its disk has threads of its own). Another thread answers HTTP: ``/status``, ``/healthz`` and
``/metrics``. No sample passes through the coordinator, and workers continue while it is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import structlog
from typing_extensions import override

from rlsrl.api.live import with_settings
from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.api.role_names import COORDINATOR
from rlsrl.parameters.service import ParameterService
from rlsrl.rpc.servers import bind, new_server
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1.coordinator_pb2_grpc import add_CoordinatorServicer_to_server
from rlsrl.runtime.addresses import forwarded_address, own_address
from rlsrl.runtime.clock import Clock, SystemClock
from rlsrl.runtime.durable import make_folder
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.exposition import HEALTH_PAGE, READY_PAGE, MetricsServer, healthy
from rlsrl.runtime.identity import own_process
from rlsrl.runtime.ledger import LedgerError
from rlsrl.runtime.metrics import Metrics
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.workers.build.parameters import open_parameter_store
from rlsrl.workers.coordinator_service import CoordinatorService, RoleSettings
from rlsrl.workers.documents import COORDINATORS, LEDGER_COPIES, ROSTER, StoredDocument, open_document
from rlsrl.workers.leadership import FencedDocument, Leadership
from rlsrl.workers.learning_curve import LearningCurve
from rlsrl.workers.leases import Leases
from rlsrl.workers.ledger_copies import LedgerCopies
from rlsrl.workers.status import ExperimentInfo
from rlsrl.workers.wandb_mirror import WandbMirror
from rlsrl.workers.wandb_process import Options

START_SECONDS = 30.0
"""How long the server may take to come up."""
STOP_SECONDS = 1.0
"""How long open streams may go on once the coordinator is told to exit."""
ANSWER_SECONDS = 5.0
"""How long a page waits for the event loop."""
WAKE_SECONDS = 1.0
"""How long one poll waits for the end."""


class CoordinatorWorker(Worker[CoordinatorConfig]):
    """Serves the roster, the status and the learning curve until it is told to exit."""

    def __init__(
        self,
        *,
        token: str,
        metrics: Metrics,
        log: structlog.stdlib.BoundLogger,
        tls: Tls | None = None,
        clock: Clock | None = None,
    ) -> None:
        clock = clock if clock is not None else SystemClock()
        super().__init__(log=log, clock=clock)
        self._token = token
        self._tls = tls
        self._metrics = metrics
        self._server: CoordinatorServer | None = None
        self._http: MetricsServer | None = None
        self._curve: LearningCurve | None = None
        self._wandb: WandbMirror | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._num_heartbeats = 0
        self._num_rows = 0
        self._settings: SettingsFile | None = None

    @property
    def http_address(self) -> tuple[str, int]:
        """Host and port of ``/status``, ``/healthz`` and ``/metrics``; once configured."""
        assert self._http is not None, "configured first"
        return self._http.address

    @override
    def exit(self) -> None:
        """Let ``run`` return at once."""
        super().exit()
        self._wake.put(None)

    @override
    def _configure(self, config: CoordinatorConfig) -> None:
        try:
            self._build(config)
        except BaseException:
            self._shutdown()
            raise

    def _build(self, config: CoordinatorConfig) -> None:
        self._settings = SettingsFile(config, self._log)
        folder = Path(config.record_folder)
        make_folder(folder)
        self._curve = LearningCurve(folder, now=self._clock.time(), log=self._log)
        host, _, port = own_address(config.http_address).rpartition(":")
        self._http = MetricsServer(
            self._metrics.registry,
            host=host,
            port=int(port),
            token=self._token,
            pages={HEALTH_PAGE: self._health_page, READY_PAGE: self._health_page},
            guarded={"/status": self._status_page},
            on_refused=lambda kind: self._metrics.strangers_refused.labels(kind=kind).inc(),
        )
        self._server = CoordinatorServer(
            self._settings.config,
            token=self._token,
            tls=self._tls,
            curve=self._curve,
            settings=self._settings.by_role,
            endpoints={"http": "{}:{}".format(*self._http.address)},
            metrics=self._metrics,
            clock=self._clock,
            log=self._log,
            on_end=lambda: self._wake.put(None),
        )
        self._server.start()
        self._wandb = self._wandb_mirror(config)
        self._log.info("serving", grpc=config.coordinator_address, http="{}:{}".format(*self._http.address))

    @override
    def _poll(self) -> PollResult:
        server = self._server
        assert server is not None, "configured before it polls"
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=WAKE_SECONDS)
        server.check()
        if self._settings is not None and self._settings.look():
            server.adopt(self._settings.by_role, self._settings.config, ANSWER_SECONDS)
        heartbeats, rows = server.service.num_heartbeats, server.service.num_rows
        if self._wandb is not None:
            self._wandb.poll(new_rows=rows > self._num_rows)
        result = PollResult(num_samples=rows - self._num_rows, num_batches=heartbeats - self._num_heartbeats)
        self._num_heartbeats, self._num_rows = heartbeats, rows
        return result

    @override
    def _shutdown(self) -> None:
        with contextlib.ExitStack() as closing:
            if self._wandb is not None:
                closing.callback(self._wandb.close)  # last, when all rows are there
            if self._curve is not None:
                closing.callback(self._curve.close)
            if self._server is not None:
                closing.callback(self._server.stop)
            if self._http is not None:
                closing.callback(self._http.close)

    def _wandb_mirror(self, config: CoordinatorConfig) -> WandbMirror | None:
        if config.wandb is None:
            return None
        options = Options(
            project=config.wandb.project,
            entity=config.wandb.entity,
            mode=config.wandb.mode,
            experiment=config.experiment,
            run_uid=config.run_uid,
            folder=config.record_folder,
        )
        failures = self._metrics.tracking_failures.labels(tracker="wandb")
        return WandbMirror(options, log=self._log, on_failed=failures.inc)

    def _status_page(self) -> tuple[str, bytes]:
        return "application/json", json.dumps(self._ask_status(), indent=1).encode()

    def _health_page(self) -> tuple[str, bytes]:
        self._ask_status()
        return healthy()

    def _ask_status(self) -> dict[str, Any]:
        if self._server is None:
            raise TimeoutError("the coordinator is starting")
        return self._server.status(ANSWER_SECONDS)


class CoordinatorServer:
    """Runs one gRPC server, with ``CoordinatorService`` and ``ParameterService``, on an event loop in its own thread.

    ``start`` returns once it serves, ``stop`` once it has ended; ``check`` raises what it died of, and ``on_end`` is
    called from the thread when it ends for whatever reason.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        token: str,
        tls: Tls | None,
        curve: LearningCurve,
        settings: RoleSettings,
        endpoints: dict[str, str],
        metrics: Metrics,
        clock: Clock,
        log: structlog.stdlib.BoundLogger,
        on_end: Callable[[], None],
    ) -> None:
        """Take over from an earlier coordinator, and read what it left.

        Raises:
            ConfigurationError: one of its files holds something else.
            Superseded: a later one has taken over from this one's pod already.
        """
        self._config = config
        self._token = token
        self._tls = tls
        self._curve = curve
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._on_end = on_end
        self._experiment = ExperimentInfo(
            name=config.experiment,
            run_uid=config.run_uid,
            heartbeat_seconds=config.heartbeat_seconds,
            endpoints=endpoints,
            done=False,
        )
        leadership = Leadership(open_document(config, COORDINATORS), own_process())
        try:
            leadership.acquire()
        except OSError as error:
            log.warning("record_not_written", error=repr(error))  # what is written later tries that first
        self._roster_document = FencedDocument(open_document(config, ROSTER), leadership)
        self._roster = read_roster(config, self._roster_document, now=clock.monotonic())
        self._copies_document = FencedDocument(open_document(config, LEDGER_COPIES), leadership)
        self._copies = read_ledger_copies(self._roster.capacity, self._copies_document)
        self._serving: Future[tuple[CoordinatorService, asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator-service", daemon=True)

    @property
    def service(self) -> CoordinatorService:
        """What is served; after ``start``."""
        return self._serving.result(0)[0]

    def start(self) -> None:
        """Serve; returns once workers can join.

        Raises:
            AddressTaken: another process serves the address.
            TimeoutError: the event loop did not come up.
        """
        self._thread.start()
        self._serving.result(START_SECONDS)

    def status(self, timeout: float) -> dict[str, Any]:
        """The status document, from any thread.

        Raises:
            TimeoutError: the event loop did not answer in time.
        """
        service, loop, _ = self._serving.result(timeout)
        if not self._thread.is_alive():
            raise TimeoutError("the event loop has ended")
        return asyncio.run_coroutine_threadsafe(service.describe(), loop).result(timeout)

    def adopt(self, settings: RoleSettings, config: CoordinatorConfig, timeout: float) -> None:
        """Go on with other values of live settings, from any thread.

        Raises:
            TimeoutError: the event loop did not answer in time.
        """
        service, loop, _ = self._serving.result(timeout)
        asyncio.run_coroutine_threadsafe(service.adopt(settings, config.num_workers), loop).result(timeout)

    def check(self) -> None:
        """Raise what the thread died of, with its cause."""
        if self._failure is not None:
            raise RuntimeError("the coordinator's server failed") from self._failure

    def stop(self) -> None:
        """End the streams and the thread. Idempotent."""
        if self._thread.is_alive():
            _, loop, stopping = self._serving.result(START_SECONDS)
            loop.call_soon_threadsafe(stopping.set)
            self._thread.join(START_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:  # noqa: BLE001 - raised by start() or check(), where it can be acted upon
            self._failure = failure
            if not self._serving.done():
                self._serving.set_exception(failure)
        finally:
            self._on_end()

    async def _serve(self) -> None:
        service = CoordinatorService(
            experiment=self._experiment,
            roster=self._roster,
            document=self._roster_document,
            copies=self._copies,
            copies_document=self._copies_document,
            curve=self._curve,
            settings=self._settings,
            metrics=self._metrics,
            clock=self._clock,
            log=self._log,
        )
        parameters = ParameterService(
            open_parameter_store(self._config.parameter_store),
            log=self._log,
            on_refused=lambda kind: self._metrics.parameter_calls_refused.labels(kind=kind).inc(),
        )
        server = new_server(self._token, on_unauthenticated=self._metrics.strangers_refused.labels(kind="call").inc)
        add_CoordinatorServicer_to_server(service, server)
        parameters.add_to(server)
        place = self._config.serving([self._config.coordinator_address], 0)
        bind(server, own_address(place), self._tls)
        if (forwarded := forwarded_address(place)) is not None:
            bind(server, forwarded, self._tls)
        await server.start()
        stopping = asyncio.Event()
        self._serving.set_result((service, asyncio.get_running_loop(), stopping))
        watching = asyncio.create_task(service.watch())
        waiting = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait({watching, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await server.stop(STOP_SECONDS)
            await service.keep()
            await asyncio.to_thread(parameters.close)
            waiting.cancel()
        if watching.done():
            watching.result()
        watching.cancel()


class SettingsFile:
    """The live settings that the experiment's newest edit asks for."""

    def __init__(self, config: CoordinatorConfig, log: structlog.stdlib.BoundLogger) -> None:
        """What the file says now; without a file what ``config`` says."""
        self._log = log
        self._text = b""
        self.config = config
        """The coordinator's own config, with its settings."""
        self.by_role: RoleSettings = {}
        """Values of the other roles' settings."""
        self.look()

    def look(self) -> bool:
        """Read the file; whether there is something new. What cannot be read is told, and changes nothing."""
        if (path := self.config.settings_path) is None:
            return False
        try:
            text = Path(path).read_bytes()
            if text == self._text:
                return False
            self._text = text
            by_role = {role: _mapping(settings) for role, settings in _mapping(json.loads(text)).items()}
            self.config = with_settings(self.config, by_role.pop(COORDINATOR, {}))
        except (OSError, ValueError, KeyError) as error:
            self._log.warning("settings_not_read", path=path, error=str(error))
            return False
        self.by_role = by_role
        return True


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no JSON object")
    return value


def read_roster(config: CoordinatorConfig, record: StoredDocument, *, now: float) -> Leases:
    """The roster that an earlier coordinator of this run left, or an empty one.

    Raises:
        ConfigurationError: what is there is no roster.
        OSError: it cannot be read.
    """
    capacity = config.num_workers
    try:
        value = json.loads(record.read())
        return Leases.from_json(value, lease_seconds=config.lease_seconds, capacity=capacity, now=now)
    except FileNotFoundError:
        return Leases(lease_seconds=config.lease_seconds, capacity=capacity)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{record} is no roster: {error!r}") from error


def read_ledger_copies(capacity: Mapping[str, int], record: StoredDocument) -> LedgerCopies:
    """The copies of ledger pages that an earlier coordinator of this run left, if any.

    Raises:
        ConfigurationError: what is there are no such copies.
        OSError: it cannot be read.
    """
    pages = LedgerCopies(capacity)
    try:
        return pages.restore(json.loads(record.read()))
    except FileNotFoundError:
        return pages
    except (AttributeError, KeyError, TypeError, ValueError, LedgerError) as error:
        raise ConfigurationError(f"{record} holds no ledger pages: {error!r}") from error
