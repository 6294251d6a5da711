"""The operator as a local process that reaches the cluster's API server through a test's proxy."""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kubernetes.aio.config import kube_config

from rlsrl.testing.http_proxy import FaultyProxy, Request

_MODULE = "rlsrl_operator"
_BESIDE = ("/events", "/apis/coordination.k8s.io/", "/apis/authorization.k8s.io/", "/apis/authentication.k8s.io/")
"""Writes that change no object of an experiment."""

# Operators are forks of a process that has imported their modules. Importing takes most of the second of a start, and
# these tests start hundreds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([f"{_MODULE}.handlers"])
_numbers = itertools.count(1)
"""Numbers of the operators. Each has its own address, because kopf reads port 0 as port 80."""


def is_write(request: Request) -> bool:
    """Return whether a request to the API server changes an object of an experiment."""
    return request.method not in ("GET", "HEAD") and not any(part in request.path for part in _BESIDE)


class OperatorProcess:
    """One life of an operator. SIGKILL ends it, at the latest at the exit of the context."""

    def __init__(
        self,
        api: str,
        settings: Mapping[str, Any],
        folder: Path,
        *,
        kill_at: int | None = None,
        steady_seconds: float | None = None,
    ) -> None:
        """Start an operator.

        Args:
            api: URL of the API server, without credentials.
            settings: The operator's settings.
            folder: For its files and its log.
            kill_at: See ``count``.
            steady_seconds: Longest time without a pass over an experiment in a steady state; minutes by default.
        """
        self.proxy = FaultyProxy(api)
        self.proxy.before = self._before
        self.proxy.after = self._after
        self.log = folder / "operator.log"
        self.killed_at: Request | None = None
        """The write at which ``kill_at`` killed the operator; None before."""
        self._lock = threading.Lock()
        self._num_writes = 0
        self._kill_at = kill_at
        self._last = time.monotonic()
        self._in_flight = 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.yaml").write_text(json.dumps(settings))
        (folder / "kubeconfig").write_text(json.dumps(_kubeconfig(self.proxy.endpoint)))
        number = next(_numbers)
        self._process = _context.Process(
            target=_run, args=(folder, f"127.81.{number >> 8}.{number & 255}", steady_seconds), daemon=True
        )
        self._process.start()

    @property
    def num_writes(self) -> int:
        """Forwarded writes since the last call of ``count``."""
        return self._num_writes

    def count(self, *, kill_at: int | None = None) -> None:
        """Count writes from 0. After ``kill_at`` writes, drop the operator's next write and kill it."""
        with self._lock:
            self._num_writes, self._kill_at = 0, kill_at

    def is_idle(self, seconds: float) -> bool:
        """Return whether the operator has sent requests, and only watches in the last seconds."""
        with self._lock:
            return not self._in_flight and bool(self.proxy.requests) and time.monotonic() - self._last > seconds

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def check(self) -> None:
        """Raise ``AssertionError`` if the operator has ended by itself."""
        code = self._process.exitcode
        if code is not None and self.killed_at is None:
            raise AssertionError(f"the operator ended with {code}: {self.log.read_text()[-2000:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        self._process.join()
        self._process.close()
        self.proxy.close()

    def _before(self, request: Request) -> bool:
        with self._lock:
            if self.killed_at is not None:
                return False
            self._last = time.monotonic()
            if is_write(request):
                if self._num_writes == self._kill_at:
                    self.killed_at = request
                    self.kill()
                    return False
                self._num_writes += 1
            self._in_flight += 1
            return True

    def _after(self, _: Request) -> bool:
        with self._lock:
            self._in_flight -= 1
            self._last = time.monotonic()
            return True


def _kubeconfig(server: str) -> Mapping[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "proxy",
        "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "nobody"}}],
        "clusters": [{"name": "proxy", "cluster": {"server": server}}],
        "users": [{"name": "nobody", "user": {}}],
    }


def _run(folder: Path, address: str, steady_seconds: float | None) -> None:
    """Run ``python -m rlsrl_operator`` in a forked process."""
    log = os.open(folder / "operator.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # kopf reads the variable now; the client read it when it was imported.
    os.environ["KUBECONFIG"] = kube_config.KUBE_CONFIG_DEFAULT_LOCATION = str(folder / "kubeconfig")
    tempfile.tempdir = str(folder)  # the client stores its discovery cache there
    if steady_seconds is not None:
        importlib.import_module(f"{_MODULE}.reconcile").STEADY_SECONDS = steady_seconds  # type: ignore[attr-defined]
    health = f"http://{address}:8081/healthz"
    sys.argv = [_MODULE, "--settings", str(folder / "settings.yaml"), "--health", health, "--metrics-port", "0"]
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
