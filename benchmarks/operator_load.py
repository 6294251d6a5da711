"""Measure the operator's load with many experiments against its budget, on a real control plane with kwok's nodes.

    python benchmarks/operator_load.py [--experiments 100] [--idle-seconds 60]

It needs root. It starts a cluster without nodes (`hack/cluster up 0`), stops it at the end, and builds kwok once
(`hack/addon`). The chart is installed as a user installs it. The operator runs on this machine with the chart's service
account and settings. kwok marks pods as running but runs nothing, so that the operator's status requests to
coordinators fail at first. Then the names of all coordinators lead to a server of this process, whose ``/status``
reports progress. The exit status is 1 if the budget is exceeded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml
from machine import REPOSITORY

from rlsrl.api.placement import HTTP_PORT
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import Namespace, run
from rlsrl.testing.waiting import until

SYSTEM, LOAD = "rlsrl-system", "load"
ACCOUNT = "rlsrl-operator"
"""Name of the operator's service account and ConfigMap, and first part of its Secret's name."""
BUILD_SECONDS = 1800.0
READY_SECONDS = 300
NUM_NODES = 5
SETTLED_SECONDS = 10.0
"""Time without a write after which the operator is idle: the interval of its status requests."""
ADDRESS = "127.7.0.1"
"""Address of every coordinator, for the operator."""
steps = itertools.count(1)
LEASE_SECONDS = 40
"""Lease duration of the nodes, a kubelet's default."""


@dataclass(frozen=True)
class Row:
    """A line of the table: a measured value and its limit."""

    what: str
    unit: str
    limit: float
    """Infinite for a value without a budget."""
    measured: float

    def __str__(self) -> str:
        end = "" if self.limit == math.inf else f"budget {self.limit:.0f} {'kept' if self.kept else 'EXCEEDED'}"
        return f"{self.what:70s} {self.measured:8.1f} {self.unit:3s} {end}"

    @property
    def kept(self) -> bool:
        return self.measured <= self.limit


def experiment(number: int) -> Object:
    """Return an experiment with five pods."""
    return {
        "apiVersion": "rlsrl.dev/v1alpha1",
        "kind": "RLExperiment",
        "metadata": {"name": f"load-{number}"},
        "spec": {
            "environment": {"id": "CartPole-v1"},
            "actors": {"environmentsPerActor": 8},
            "trainers": {"batchEnvironments": 8},
            "policyWorkers": {"replicas": 1},
            "bufferWorkers": {"replicas": 1},
            "parameters": {"store": {"objectStore": {"url": "s3://none/experiments"}}},
            "stop": {"wallSeconds": 86_400},
        },
    }


def node(number: int) -> Object:
    """Return a node that kwok manages."""
    name = f"shown-{number}"
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"},
        },
    }


class Coordinator(BaseHTTPRequestHandler):
    """Answers each request with the status of a run that is one step further."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        step = next(steps)
        totals = {"env_steps": 1000 * step, "train_steps": step, "env_steps_per_second": 1e4, "policy_lag": 1.0}
        page = json.dumps({"totals": {**totals, "version": f"1-{step}", "return_mean": 100.0}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def coordinators() -> Iterator[None]:
    """Serve the status of all coordinators during the body."""
    with ThreadingHTTPServer((ADDRESS, HTTP_PORT), Coordinator) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@contextmanager
def process(log: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process during the body; then kill it."""
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment
        )
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def operators_kubeconfig() -> Object:
    """Return the administrator's kubeconfig with the token of the chart's service account."""
    made: Object = json.loads(run("kubectl", "config", "view", "--raw", "--minify", "--output", "json"))
    (user,) = made["users"]
    user["user"] = {"token": run("kubectl", "create", "token", ACCOUNT, "--namespace", SYSTEM).strip()}
    return made


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of the process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_megabytes(pid: int) -> float:
    """Return the peak memory of the process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1000


def writes(audit_log: Path, offset: int) -> list[str]:
    """Return the operator's writes to the API server after ``offset`` in the audit log."""
    with audit_log.open("rb") as file:
        file.seek(offset)
        entries = [json.loads(line) for line in file if line.endswith(b"\n")]
    return [
        f"{entry['verb']} {entry['requestURI']}"
        for entry in entries
        if entry["user"]["username"] == f"system:serviceaccount:{SYSTEM}:{ACCOUNT}"
        and entry["verb"] not in ("get", "list", "watch")
    ]


def await_ready(where: Namespace, count: int) -> None:
    """Wait until ``count`` experiments are ready. Uses a watch, because polling would load the measured machine."""
    columns = r'jsonpath={.metadata.name} {.status.conditions[?(@.type=="Ready")].status}{"\n"}'
    command = ("kubectl", "--namespace", where.name, "get", "rlexperiments", "--watch", "--output", columns)
    ready: dict[str, bool] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        end = threading.Timer(READY_SECONDS, watch.kill)
        end.start()
        for line in watch.stdout or ():
            name, _, holds = line.strip().partition(" ")
            ready[name] = holds == "True"
            if sum(ready.values()) == count:
                break
        end.cancel()
        watch.kill()
    if sum(ready.values()) < count:
        raise TimeoutError(f"{sum(ready.values())} of {count} experiments are ready after {READY_SECONDS} s")


def measure(stack: ExitStack, folder: Path, count: int, idle_seconds: float) -> Iterator[Row]:
    """Yield the rows of the table, measured on the cluster of KUBECONFIG."""
    kwok = Path(run(str(REPOSITORY / "hack" / "addon"), "kwok", seconds=BUILD_SECONDS).strip())
    stack.enter_context(
        process(
            folder / "kwok.log", str(kwok / "kwok"), "--config", str(kwok / "manifests.yaml"),
            "--manage-nodes-with-annotation-selector", "kwok.x-k8s.io/node=fake",
            "--node-lease-duration-seconds", str(LEASE_SECONDS),
        )
    )  # fmt: skip
    run("kubectl", "create", "-f", "-", stdin=yaml.safe_dump_all(map(node, range(NUM_NODES))))
    run("helm", "install", "rlsrl", str(REPOSITORY / "charts"), "--namespace", SYSTEM, "--create-namespace")
    settings = run(
        "kubectl", "--namespace", SYSTEM, "get", "configmap", ACCOUNT, "-o", r"jsonpath={.data.settings\.yaml}"
    )
    (folder / "settings.yaml").write_text(settings)
    (folder / "kubeconfig").write_text(json.dumps(operators_kubeconfig()))
    run("kubectl", "create", "namespace", LOAD)
    where = Namespace(LOAD)
    (folder / "hosts").write_text(
        "".join(f"{ADDRESS} load-{number}-coordinator.{LOAD}.svc\n" for number in range(count))
    )
    operator = stack.enter_context(
        process(
            folder / "operator.log",
            "unshare", "--mount", "bash", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(folder / "hosts"),
            sys.executable, "-m", "rlsrl_operator", "--settings", str(folder / "settings.yaml"),
            "--health", f"http://{ADDRESS}:8081/healthz", "--metrics-port", "0",
            KUBECONFIG=str(folder / "kubeconfig"), TMPDIR=str(folder),
        )
    )  # fmt: skip
    until(lambda: Namespace(SYSTEM).get("secret", f"{ACCOUNT}-key"), "the operator has started", timeout=30)

    used, began = cpu_seconds(operator.pid), time.monotonic()
    where.apply(*map(experiment, range(count)))
    applied = time.monotonic() - began
    await_ready(where, count)
    yield Row(
        f"{count} experiments, {len(where.list('pods'))} pods, from apply to Ready",
        "s",
        30 * count / 100,
        time.monotonic() - began,
    )
    print(
        f"kubectl apply took {applied:.1f} s, the operator {cpu_seconds(operator.pid) - used:.1f} s of processor time"
    )

    audit_log = Path(run(str(REPOSITORY / "hack" / "cluster"), "audit-log").strip())
    pause = threading.Event()

    def rest(seconds: float) -> tuple[float, list[str]]:
        """Wait; return the operator's share of a core meanwhile, in percent, and its writes."""
        used, offset = cpu_seconds(operator.pid), audit_log.stat().st_size
        pause.wait(seconds)
        return 100 * (cpu_seconds(operator.pid) - used) / seconds, writes(audit_log, offset)

    until(lambda: not rest(SETTLED_SECONDS)[1], "the operator writes nothing more", timeout=300)
    share, written = rest(idle_seconds)
    print(*written, sep="\n", end="\n" if written else "")
    yield Row(f"idle for {idle_seconds:.0f} s: the operator's share of a core", "%", 2, share)
    yield Row("the operator's writes in that time", "", 0, len(written))
    stack.enter_context(coordinators())
    share, written = rest(idle_seconds)
    yield Row("runs that report progress: the operator's share of a core", "%", math.inf, share)
    yield Row("the operator's writes", "/s", math.inf, len(written) / idle_seconds)
    yield Row("the operator's peak memory", "MB", 200, peak_megabytes(operator.pid))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=100)
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    cluster = str(REPOSITORY / "hack" / "cluster")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(run, cluster, "down")
        run(cluster, "up", "0", seconds=BUILD_SECONDS)
        os.environ["KUBECONFIG"] = run(cluster, "kubeconfig").strip()
        os.environ["PATH"] = f"{run(cluster, 'tools').strip()}:{os.environ['PATH']}"
        try:
            rows = list(measure(stack, folder, arguments.experiments, arguments.idle_seconds))
        except TimeoutError as error:
            logs = {log.name: log.read_text()[-2000:] for log in folder.glob("*.log")}
            raise SystemExit(f"{error}\n" + "\n".join(f"{name}: {text}" for name, text in logs.items())) from None
    print(*rows, sep="\n")
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
