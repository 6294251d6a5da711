"""The coordinator: the experiment's control point.

The main thread only supervises. One thread runs the event loop of the gRPC server, which serves ``CoordinatorService``
and ``ParameterService``; further threads read and write the disk. Another thread answers HTTP: ``/status``,
``/healthz``, ``/readyz``, ``/metrics`` and the pages of ``coordinator_pages``. No samples pass through the coordinator,
and workers continue while it is absent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import structlog
from typing_extensions import override

from rlsrl.api.live import with_settings
from rlsrl.api.placement import STATUS_PAGE
from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.role_names import COORDINATOR
from rlsrl.parameters.service import READS, ParameterService
from rlsrl.parameters.terminal import withdraw_failure
from rlsrl.rpc.servers import bind, new_server
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1.coordinator_pb2_grpc import (
    add_CoordinatorServicer_to_server,
    add_LogsServicer_to_server,
    add_RowsServicer_to_server,
)
from rlsrl.runtime.addresses import forwarded_address, own_address
from rlsrl.runtime.durable import make_folder
from rlsrl.runtime.exposition import HEALTH_PAGE, READY_PAGE, MetricsServer, Query, healthy
from rlsrl.runtime.metrics import Metrics
from rlsrl.runtime.printed_text import PrintedText
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.workers.build.parameters import open_objects, open_parameter_store
from rlsrl.workers.coordinator_pages import CoordinatorPages
from rlsrl.workers.coordinator_service import EXIT_SECONDS, CoordinatorService, RoleSettings
from rlsrl.workers.coordinator_state import take_over
from rlsrl.workers.kept_logs import LOGS_FOLDER, KeptLogs, LogCopies
from rlsrl.workers.kept_videos import KEPT_FOR_WANDB, VIDEOS_FOLDER, KeptVideos
from rlsrl.workers.learning_curve import LearningCurve
from rlsrl.workers.log_service import LogService
from rlsrl.workers.row_service import RowService
from rlsrl.workers.status import ExperimentInfo
from rlsrl.workers.version_table import VersionTable
from rlsrl.workers.wandb_mirror import WandbMirror
from rlsrl.workers.wandb_process import Options

START_SECONDS = 30.0
"""Seconds that the server may take to start."""
STOP_SECONDS = 1.0
"""Seconds that open streams may continue after ``CoordinatorServer.stop``."""
ANSWER_SECONDS = 5.0
"""Seconds that an HTTP page waits for the event loop."""
WAKE_SECONDS = 1.0
"""Seconds between two polls, unless ``exit`` or the end of the server wakes the poll."""

_Row = TypeVar("_Row")


class CoordinatorWorker(Worker[CoordinatorConfig]):
    """Serves leases, status, weights and the learning curve until ``exit``."""

    def __init__(
        self,
        *,
        token: str,
        viewing_token: str = "",
        metrics: Metrics,
        log: structlog.stdlib.BoundLogger,
        tls: Tls | None = None,
        printed: PrintedText | None = None,
    ) -> None:
        """``viewing_token`` opens the HTTP pages, as ``token`` does; empty: there is no such token.

        ``printed`` collects what this process prints, if it belongs to the kept logs.
        """
        super().__init__(log=log)
        self._printed = printed
        self._token = token
        self._viewing_token = viewing_token
        self._tls = tls
        self._metrics = metrics
        self._server: CoordinatorServer | None = None
        self._http: MetricsServer | None = None
        self._curve: LearningCurve | None = None
        self._wandb: WandbMirror | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._videos: KeptVideos | None = None
        self._num_heartbeats = 0
        self._num_rows = 0
        self._settings: SettingsFile | None = None
        self._retiring = False

    @property
    def http_address(self) -> tuple[str, int]:
        """Host and port of the HTTP pages, once configured."""
        assert self._http is not None, "configure() comes first"
        return self._http.address

    @override
    def exit(self) -> None:
        """Let ``run`` return at once."""
        super().exit()
        self._wake.put(None)

    def retire(self) -> None:
        """Let ``run`` return as after ``exit``, but serve the workers that exit at the same time to their end.

        If a whole experiment is deleted, all its pods get SIGTERM within about a second.
        """
        self._retiring = True
        self.exit()

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
        if config.first_attempt > 1:
            db = open_parameter_store(config.parameter_store)
            withdraw_failure(db, POLICY_NAME, first_attempt=config.first_attempt)
        self._curve = LearningCurve(folder, now=self._clock.time(), log=self._log)
        logs = KeptLogs(folder / LOGS_FOLDER, log=self._log)
        host, _, port = own_address(config.http_address).rpartition(":")
        self._http = MetricsServer(
            self._metrics.registry,
            host=host,
            port=int(port),
            token=self._token,
            viewing_token=self._viewing_token,
            pages={HEALTH_PAGE: self._health_page, READY_PAGE: self._health_page},
            guarded={STATUS_PAGE: self._status_document, **self._pages(config, logs).by_path()},
            on_refused=lambda kind: self._metrics.strangers_refused.labels(kind=kind).inc(),
        )
        self._videos = self._kept_videos(config, self._curve)
        endpoints = {"http": "{}:{}".format(*self._http.address)}
        self._server = CoordinatorServer(
            self._new_service(self._settings, self._curve, logs, self._videos, endpoints),
            self._log_service(config, logs),
            self._settings.config,
            token=self._token,
            tls=self._tls,
            metrics=self._metrics,
            log=self._log,
            on_end=lambda: self._wake.put(None),
        )
        self._server.start()
        self._wandb = self._wandb_mirror(config)
        self._log.info("serving", grpc=config.coordinator_address, http="{}:{}".format(*self._http.address))

    def _new_service(
        self,
        settings: SettingsFile,
        curve: LearningCurve,
        logs: KeptLogs,
        videos: KeptVideos,
        endpoints: Mapping[str, str],
    ) -> CoordinatorService:
        """Return the service with the state that the previous coordinator stored."""
        config = settings.config
        return CoordinatorService(
            experiment=ExperimentInfo(
                name=config.experiment,
                run_uid=config.run_uid,
                heartbeat_seconds=config.heartbeat_seconds,
                metrics_seconds=config.worker_seconds,
                endpoints=endpoints,
                done=False,
            ),
            state=take_over(config, now=self._clock.monotonic(), log=self._log),
            curve=curve,
            logs=logs,
            videos=videos,
            settings=settings.by_role,
            pauses=config.pauses,
            metrics=self._metrics,
            clock=self._clock,
            log=self._log,
        )

    def _pages(self, config: CoordinatorConfig, logs: KeptLogs) -> CoordinatorPages:
        store = config.parameter_store
        table = VersionTable(open_parameter_store(store), folder=Path(store.folder or ""), clock=self._clock)
        return CoordinatorPages(Path(config.record_folder), run_uid=config.run_uid, logs=logs, versions=table)

    def _kept_videos(self, config: CoordinatorConfig, curve: LearningCurve) -> KeptVideos:
        """Return where videos go: into files that stay, or pass through to W&B if no folder outlives this process."""
        passing = 0 if config.wandb is None else KEPT_FOR_WANDB
        limit = None if config.roster_path is not None else passing
        folder = Path(config.record_folder) / VIDEOS_FOLDER
        return KeptVideos(folder, curve, limit=limit, metrics=self._metrics, log=self._log)

    def _log_service(self, config: CoordinatorConfig, logs: KeptLogs) -> LogService:
        copies: LogCopies | None = None
        if config.roster_path is None:  # No file outlives this process.
            assert config.parameter_store.object_store is not None, "validation says so"
            copies = LogCopies(logs, open_objects(config.parameter_store.object_store), log=self._log)
        return LogService(logs, copies=copies, printed=self._printed)

    @override
    def _poll(self) -> PollResult:
        server = self._server
        assert server is not None, "configure() comes before run()"
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=WAKE_SECONDS)
        server.check()
        if self._settings is not None and self._settings.refresh():
            server.adopt(self._settings.by_role, self._settings.config, ANSWER_SECONDS)
        heartbeats, rows = server.service.num_heartbeats, server.service.rows.num_rows
        metrics_rows = _taken_from(server.service.metrics_rows)
        if self._wandb is not None:
            assert self._videos is not None, "built with the server"
            videos = _taken_from(self._videos.shown)
            self._wandb.poll(new_rows=rows > self._num_rows, metrics_rows=metrics_rows, videos=videos)
        result = PollResult(num_samples=rows - self._num_rows, num_batches=heartbeats - self._num_heartbeats)
        self._num_heartbeats, self._num_rows = heartbeats, rows
        return result

    @override
    def _shutdown(self) -> None:
        with contextlib.ExitStack() as closing:
            if self._wandb is not None:
                closing.callback(self._wandb.close)  # Callbacks run in reverse order: here all rows are stored.
            if self._curve is not None:
                closing.callback(self._curve.close)
            if self._server is not None:
                closing.callback(self._server.stop)
            if self._http is not None:
                closing.callback(self._http.close)
            if self._server is not None and self._retiring:
                closing.callback(self._server.drain)

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
        lost = self._metrics.worker_metrics_lost.labels(tracker="wandb")
        not_shown = self._metrics.videos.labels(outcome="not_shown")
        return WandbMirror(
            options, log=self._log, on_failed=failures.inc, on_lost=lost.inc, on_lost_videos=not_shown.inc
        )

    def _status_document(self, query: Query) -> tuple[str, bytes]:
        del query
        return "application/json", json.dumps(self._ask_status(), indent=1).encode()

    def _health_page(self) -> tuple[str, bytes]:
        self._ask_status()
        return healthy()

    def _ask_status(self) -> dict[str, Any]:
        if self._server is None:
            raise TimeoutError("the coordinator is starting")
        return self._server.status(ANSWER_SECONDS)


class CoordinatorServer:
    """Serves workers, logs and parameters over gRPC, on an event loop in its own thread.

    ``start`` returns once it serves, and ``stop`` once it has ended. ``check`` raises the error that ended it. The
    thread calls ``on_end`` when it ends.
    """

    def __init__(
        self,
        service: CoordinatorService,
        logs: LogService,
        config: CoordinatorConfig,
        *,
        token: str,
        tls: Tls | None,
        metrics: Metrics,
        log: structlog.stdlib.BoundLogger,
        on_end: Callable[[], None],
    ) -> None:
        self.service = service
        self._logs = logs
        self._config = config
        self._token = token
        self._tls = tls
        self._metrics = metrics
        self._log = log
        self._on_end = on_end
        self._serving: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="coordinator-service", daemon=True)

    def start(self) -> None:
        """Start the thread; return once workers can join.

        Raises:
            AddressTaken: another process listens at the address.
            TimeoutError: the server did not start within ``START_SECONDS``.
        """
        self._thread.start()
        self._serving.result(START_SECONDS)

    def status(self, timeout: float) -> dict[str, Any]:
        """Return the status document. Thread-safe.

        Raises:
            TimeoutError: the event loop did not answer within ``timeout`` seconds.
        """
        loop, _ = self._serving.result(timeout)
        if not self._thread.is_alive():
            raise TimeoutError("the event loop has ended")
        return asyncio.run_coroutine_threadsafe(self.service.status(), loop).result(timeout)

    def adopt(self, settings: RoleSettings, config: CoordinatorConfig, timeout: float) -> None:
        """Use new values of live settings. Thread-safe.

        Raises:
            TimeoutError: the event loop did not answer within ``timeout`` seconds.
        """
        loop, _ = self._serving.result(timeout)
        adopting = self.service.adopt(settings, config.num_workers, config.pauses)
        asyncio.run_coroutine_threadsafe(adopting, loop).result(timeout)

    def check(self) -> None:
        """Raise RuntimeError, with its cause, if the thread failed."""
        if self._failure is not None:
            raise RuntimeError("the coordinator's server failed") from self._failure

    def drain(self) -> None:
        """Serve on while workers exit. Return at once if the thread has ended.

        Raises:
            TimeoutError: the event loop does not answer.
        """
        if self._thread.is_alive():
            loop, _ = self._serving.result(START_SECONDS)
            asyncio.run_coroutine_threadsafe(self.service.drain(), loop).result(EXIT_SECONDS + ANSWER_SECONDS)

    def stop(self) -> None:
        """End all streams and the thread. Idempotent."""
        if self._thread.is_alive():
            loop, stopping = self._serving.result(START_SECONDS)
            loop.call_soon_threadsafe(stopping.set)
            self._thread.join(START_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:  # noqa: BLE001 - start() or check() raises it in the owner's thread
            self._failure = failure
            if not self._serving.done():
                self._serving.set_exception(failure)
        finally:
            self._on_end()

    async def _serve(self) -> None:
        parameters = ParameterService(
            open_parameter_store(self._config.parameter_store),
            log=self._log,
            on_refused=lambda kind: self._metrics.parameter_calls_refused.labels(kind=kind).inc(),
        )
        on_unauthenticated = self._metrics.strangers_refused.labels(kind="call").inc
        server = new_server(self._token, reads=READS, on_unauthenticated=on_unauthenticated)
        add_CoordinatorServicer_to_server(self.service, server)
        add_LogsServicer_to_server(self._logs, server)
        add_RowsServicer_to_server(RowService(self.service.rows), server)
        parameters.add_to(server)
        address = self._config.serving([self._config.coordinator_address], 0)
        bind(server, own_address(address), self._tls)
        if (forwarded := forwarded_address(address)) is not None:
            bind(server, forwarded, self._tls)
        await server.start()
        stopping = asyncio.Event()
        self._serving.set_result((asyncio.get_running_loop(), stopping))
        working = [asyncio.create_task(work) for work in (self.service.run_sweeps(), self._logs.run())]
        waiting = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait({*working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await server.stop(STOP_SECONDS)
            await asyncio.gather(self.service.flush(), self._logs.flush())
            await asyncio.to_thread(parameters.close)
            waiting.cancel()
        for task in working:
            if task.done():
                task.result()
            task.cancel()


class SettingsFile:
    """The file with the live settings of the experiment's newest edit."""

    def __init__(self, config: CoordinatorConfig, log: structlog.stdlib.BoundLogger) -> None:
        """Read the file. Without a file, the settings of ``config`` apply."""
        self._log = log
        self._content = b""
        self.config = config
        """The coordinator's own config, with the newest settings."""
        self.by_role: RoleSettings = {}
        """The newest settings of the other roles."""
        self.refresh()

    def refresh(self) -> bool:
        """Read the file again; return whether the settings changed. An invalid file is logged and has no effect."""
        if (path := self.config.settings_path) is None:
            return False
        try:
            content = Path(path).read_bytes()
            if content == self._content:
                return False
            self._content = content
            by_role = {role: _mapping(settings) for role, settings in _mapping(json.loads(content)).items()}
            self.config = with_settings(self.config, by_role.pop(COORDINATOR, {}))
        except (OSError, ValueError, KeyError) as error:
            self._log.warning("settings_not_read", path=path, error=str(error))
            return False
        self.by_role = by_role
        return True


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a JSON object")
    return value


def _taken_from(rows: deque[_Row]) -> list[_Row]:
    """Take all rows out, while another thread may append."""
    return [rows.popleft() for _ in range(len(rows))]
