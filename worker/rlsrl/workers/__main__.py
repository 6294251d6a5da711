"""The entry point of every worker process: ``python -m rlsrl.workers --role ROLE --config FILE``.

Joins the experiment, configures the role's worker and runs it. SIGTERM lets a worker store its last state and end. A
worker that is not configured yet ends at once.

Exit codes: 0 the work is complete, or the coordinator or SIGTERM ended the worker; 2 the experiment cannot run as
written, 3 its environments end it, 4 its last version could not be stored, or 5 what it has stored is damaged, so a
restart does not help; 12 the call watch ended the worker; 75 another process or a store cannot be reached; 1 any other
error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from rlsrl.api.failures import CONFIGURATION_ERROR, ENVIRONMENT_FAULT, NOT_STORED, RUN_DAMAGED, TEMPORARY_FAILURE
from rlsrl.api.live import changed_settings, with_settings
from rlsrl.api.resolved import CoordinatorConfig, RoleConfig
from rlsrl.api.role_names import COORDINATOR, TRAINER
from rlsrl.api.roles import ROLES, STREAMS, role_named
from rlsrl.rpc.auth import TokenMissing, token_from_environment, viewing_token_from_environment
from rlsrl.rpc.settings import AddressTaken
from rlsrl.rpc.tls import Tls, tls_from_environment
from rlsrl.runtime.addresses import followed_roles, own_address
from rlsrl.runtime.call_board import CallBoard
from rlsrl.runtime.clock import SystemClock
from rlsrl.runtime.coordination import WorkerState
from rlsrl.runtime.errors import (
    ConfigurationError,
    EnvironmentFailed,
    EnvironmentFault,
    NotStored,
    RunDamaged,
    is_temporary,
    shortened,
)
from rlsrl.runtime.exposition import HEALTH_PAGE, READY_PAGE, MetricsServer, healthy
from rlsrl.runtime.join_session import JoinRequest, JoinSession
from rlsrl.runtime.logs import configure_logging
from rlsrl.runtime.metrics import Metrics
from rlsrl.runtime.printed_text import PrintedText, keep_printed
from rlsrl.runtime.process import PARENT_VARIABLE, die_with_parent, leave, raise_open_files_limit
from rlsrl.runtime.worker import Worker
from rlsrl.workers.call_watch import watched_calls
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.status import PAUSED_SINCE

JOIN_SECONDS = 120.0
"""Seconds that a worker waits for a coordinator. Then it exits and is restarted."""

RESULT_VARIABLE = "RLSRL_RESULT_FILE"
"""Environment variable with the path of the container's termination message: the result of a finished run, or the
failure of an environment."""
DONE = "done"
"""The first word of the result file."""
MakeWorker = Callable[[WorkerContext], Worker[Any]]


def main() -> int:
    """Run one worker to its end; return the exit code."""
    arguments = _arguments()
    if (parent := os.environ.get(PARENT_VARIABLE)) is not None:
        die_with_parent(int(parent))
    raise_open_files_limit()
    # Ctrl-C in a terminal signals the whole process group. Only the controller ends workers, in their order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        config = _read_config(arguments.role, arguments.config)
        # Where logs are files, standard output is one as well, which nothing deletes.
        printed = keep_printed() if config.log_folder is None else None
        if isinstance(config, CoordinatorConfig):
            _coordinate(config, printed)
        else:
            with watched_calls(arguments.role, config) as board:
                _Process(arguments, config, board, printed).run()
    except RunDamaged as error:
        sys.stderr.write(f"rlsrl: {shortened(str(error))}\n")
        return RUN_DAMAGED
    except (ConfigurationError, TokenMissing) as error:
        sys.stderr.write(f"rlsrl: {shortened(str(error))}\n")
        return CONFIGURATION_ERROR
    except AddressTaken as error:  # a restart helps once the address is free
        sys.stderr.write(f"rlsrl: {error}\n")
        return TEMPORARY_FAILURE
    except EnvironmentFailed as error:
        _report_failure(error)
        return TEMPORARY_FAILURE if is_temporary(error) else 1
    except EnvironmentFault as error:
        sys.stderr.write(f"rlsrl: {shortened(str(error))}\n")
        return ENVIRONMENT_FAULT
    except NotStored as error:
        sys.stderr.write(f"rlsrl: {shortened(str(error))}\n")
        return NOT_STORED if error.is_final else 1
    except Exception as error:
        if not is_temporary(error):
            raise
        traceback.print_exc()
        return TEMPORARY_FAILURE
    except (SystemExit, KeyboardInterrupt):
        # A user's code raised it, since this process ignores SIGINT. Its exit code could be one of ours.
        traceback.print_exc()
        return 1
    return 0


def _report_failure(error: EnvironmentFailed) -> None:
    """Print the environment's own traceback and the error; in a pod they are the termination message, too."""
    text = f"{error.traceback}rlsrl: {shortened(str(error))}\n"
    sys.stderr.write(text)
    if (path := os.environ.get(RESULT_VARIABLE)) is not None:
        Path(path).write_bytes(text.encode(errors="replace"))  # the kubelet takes the last 4 KB, of a log 2 KB


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rlsrl.workers", description="Run one worker process of an experiment.")
    parser.add_argument("--role", required=True, choices=[role.name for role in ROLES])
    parser.add_argument("--config", required=True, type=Path, help="the role's resolved config, JSON")
    needed = "the index that the worker needs; by default torchrun's rank for a trainer, and the lowest free for others"
    parser.add_argument("--index", type=int, help=needed)
    parser.add_argument("--attempt", type=int, default=0, help="the number of the trainer gang's attempt, from 1")
    arguments = parser.parse_args()
    if arguments.role == TRAINER and arguments.index is None:
        arguments.index = int(os.environ.get("RANK", "0"))
    return arguments


def _read_config(role: str, path: Path) -> RoleConfig:
    """Return the role's config.

    Raises:
        ConfigurationError: the file cannot be read or is invalid; the text lists every fault on one line.
    """
    try:
        return role_named(role).config.from_json(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, fault['loc'])) or 'the document'}: {fault['msg']}" for fault in error.errors())
        raise ConfigurationError(f"{path} is not a valid config of role {role}: {'; '.join(faults)}") from error


def _coordinate(config: CoordinatorConfig, printed: PrintedText | None) -> None:
    from rlsrl.workers.coordinator import CoordinatorWorker

    _log(config, COORDINATOR, 0)
    worker = CoordinatorWorker(
        token=token_from_environment(),
        viewing_token=viewing_token_from_environment(),
        tls=tls_from_environment(),
        metrics=Metrics(CollectorRegistry()),
        log=structlog.stdlib.get_logger(COORDINATOR),
        printed=printed,
    )
    signal.signal(signal.SIGTERM, lambda *_: worker.retire())
    worker.configure(config)
    worker.start()
    worker.run()


class _Process:
    """A worker's process: joins the experiment, uses the settings that the coordinator sends, and leaves."""

    def __init__(
        self, arguments: argparse.Namespace, config: RoleConfig, board: CallBoard | None, printed: PrintedText | None
    ) -> None:
        self._arguments = arguments
        self._config = config
        self._board = board
        self._printed = printed
        self._lock = threading.Lock()
        self._worker: Worker[Any] | None = None
        self._join_session: JoinSession | None = None
        self._configured = False

    def run(self) -> None:
        """Join, work, leave."""
        metrics = Metrics(CollectorRegistry())
        host, _, port = own_address(self._config.metrics_address).rpartition(":")
        token, tls = token_from_environment(), tls_from_environment()
        pages = {HEALTH_PAGE: healthy, READY_PAGE: self._ready_page}
        with MetricsServer(
            metrics.registry,
            host=host,
            port=int(port),
            token=token,
            pages=pages,
            on_refused=lambda kind: metrics.strangers_refused.labels(kind=kind).inc(),
        ) as server:
            endpoints = {"metrics": "{}:{}".format(*server.address)}
            if self._config.serves_at is not None:
                endpoints[STREAMS] = own_address(self._config.serves_at)
            # Import before joining, while the coordinator starts: importing torch takes a second.
            make_worker = _import_worker(self._arguments.role)
            join_session = self._join_session = JoinSession.join(
                self._join_request(endpoints, token, tls),
                on_settings=self._on_settings,
                timeout=JOIN_SECONDS,
                printed=self._printed,
                registry=metrics.registry,
            )
            reason = "failed"
            try:
                self._config = self._with_live_settings(join_session)
                self._work(self._context(join_session, metrics, tls), make_worker)
                reason = "exit"
            except Exception:
                if self._printed is not None:  # main() prints the error when no heartbeat follows
                    self._printed.add(traceback.format_exc())
                raise
            finally:
                join_session.leave(reason, done=self._worker is not None and self._worker.done)
            result = None if self._worker is None else self._worker.result
            if result is not None and join_session.index == 0 and (path := os.environ.get(RESULT_VARIABLE)) is not None:
                Path(path).write_text(f"{DONE} {json.dumps(result)}", encoding="ascii")

    def _join_request(self, endpoints: Mapping[str, str], token: str, tls: Tls | None) -> JoinRequest:
        role = self._arguments.role
        return JoinRequest(
            address=self._config.coordinator_address,
            token=token,
            tls=tls,
            role=role,
            index=self._arguments.index,
            attempt=self._arguments.attempt,
            endpoints=endpoints,
            follows=followed_roles(self._config.connects_to),
        )

    def _context(self, join_session: JoinSession, metrics: Metrics, tls: Tls | None) -> WorkerContext:
        role, index = self._arguments.role, join_session.index
        _log(self._config, role, index)
        return WorkerContext(
            role=role,
            index=index,
            incarnation=join_session.incarnation,
            attempt=self._arguments.attempt,
            token=token_from_environment(),
            tls=tls,
            log=structlog.stdlib.get_logger(role),
            metrics=metrics,
            clock=SystemClock(),
            join_session=join_session,
            ledger_folder=Path(self._config.ledger_folder),
            call_board=self._board,
        )

    def _work(self, context: WorkerContext, make_worker: MakeWorker) -> None:
        worker = make_worker(context)
        with self._lock:
            self._worker = worker
            self._start_or_pause(worker, context.join_session)
        context.log.info("configuring", incarnation=context.incarnation, attempt=context.attempt, pid=os.getpid())
        worker.configure(self._config)
        # Until here SIGTERM ends the process at once: there is nothing to store, and a handler would wait for whatever
        # the worker waits for, such as the other ranks.
        signal.signal(signal.SIGTERM, lambda *_: worker.exit())
        with self._lock:
            if worker.is_running:
                context.join_session.report(state=WorkerState.RUNNING)
            self._configured = True
        self._on_settings()
        context.log.info("configured")
        worker.run(
            on_last_poll=lambda: context.join_session.report(state=WorkerState.EXITING),
            on_rest=lambda rests: _report_rest(context, rests=rests),
        )

    def _ready_page(self) -> tuple[str, bytes]:
        if not self._configured:
            raise TimeoutError("the worker is not configured yet")
        return healthy()

    def _on_settings(self) -> None:
        """Start or pause the worker, and pass new live settings to it once it is configured."""
        with self._lock:
            if self._worker is None or self._join_session is None:
                return
            self._start_or_pause(self._worker, self._join_session)
            if not self._configured:
                return
            if (config := self._with_live_settings(self._join_session)) != self._config:
                changed = changed_settings(self._config, config)
                structlog.stdlib.get_logger(self._arguments.role).info("settings_taken", changed=changed)
                self._config = config
                self._worker.adopt(config)

    def _with_live_settings(self, join_session: JoinSession) -> RoleConfig:
        """Return the config with the newest live settings. If they are invalid, return it unchanged."""
        try:
            return with_settings(self._config, join_session.settings)
        except (KeyError, ValueError) as error:
            structlog.stdlib.get_logger(self._arguments.role).warning("settings_not_taken", error=str(error))
            return self._config

    @staticmethod
    def _start_or_pause(worker: Worker[Any], join_session: JoinSession) -> None:
        if join_session.is_paused == worker.is_running:
            (worker.pause if join_session.is_paused else worker.start)()


def _report_rest(context: WorkerContext, *, rests: bool) -> None:
    if rests:
        context.join_session.report(state=WorkerState.PAUSED, stats={PAUSED_SINCE: context.clock.time()})
    else:
        context.join_session.report(state=WorkerState.RUNNING)
    context.log.info("paused" if rests else "resumed")


def _import_worker(role: str) -> MakeWorker:
    """Return the class of the role's worker. Importing it here spares other roles its imports, such as torch."""
    module, _, name = role_named(role).worker.partition(":")
    make_worker: MakeWorker = getattr(importlib.import_module(module), name)
    return make_worker


def _log(config: RoleConfig, role: str, index: int) -> None:
    path: Path | None = None
    if config.log_folder is not None:
        path = Path(config.log_folder, f"{role}-{index}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
    configure_logging(experiment=config.experiment, role=role, index=index, path=path)


if __name__ == "__main__":
    leave(main())
