"""What the operator takes for many experiments, beside its budget, on a real control plane with nodes that kwok shows.

    python benchmarks/operator_load.py [--experiments 100] [--idle-seconds 60]

As root: it brings up a cluster of no nodes (`hack/cluster up 0`), takes it down, and builds kwok once (`hack/addon`).
The chart is installed as a user does it; the operator runs on this machine as the chart's service account, with the
chart's settings. Pods are shown to run by kwok, which answers nothing: the idle operator asks each coordinator for its
numbers in vain. Then all coordinators' names lead to a server of this process, whose ``/status`` tells of progress.
Ends with 1 where the budget is exceeded.
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
"""Of the operator: its service account, and what its ConfigMap and its Secret are named by."""
BUILD_SECONDS = 1800.0
READY_SECONDS = 300
NUM_NODES = 5
SETTLED_SECONDS = 10.0
"""Without a write: what was begun has ended. As long as between two looks at a run."""
ADDRESS = "127.7.0.1"
"""Of every coordinator, as the operator sees it."""
steps = itertools.count(1)
LEASE_SECONDS = 40
"""Of the nodes, as kubelets have it."""


@dataclass(frozen=True)
class Row:
    """A line of the table: what was measured, and how much it may be."""

    what: str
    unit: str
    limit: float
    """Infinite for what is only told."""
    measured: float

    def __str__(self) -> str:
        end = "" if self.limit == math.inf else f"budget {self.limit:.0f} {'kept' if self.kept else 'EXCEEDED'}"
        return f"{self.what:70s} {self.measured:8.1f} {self.unit:3s} {end}"

    @property
    def kept(self) -> bool:
        return self.measured <= self.limit


def experiment(number: int) -> Object:
    """One of five pods."""
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
    """One that kwok looks after."""
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
    """Answers whatever is asked with the page of a run that is another step further."""

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
        """Nothing."""


@contextmanager
def coordinators() -> Iterator[None]:
    """Answers for all of them."""
    with ThreadingHTTPServer((ADDRESS, HTTP_PORT), Coordinator) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


@contextmanager
def process(log: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours, until the end."""
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
    """The administrator's, but as the chart's service account."""
    made: Object = json.loads(run("kubectl", "config", "view", "--raw", "--minify", "--output", "json"))
    (user,) = made["users"]
    user["user"] = {"token": run("kubectl", "create", "token", ACCOUNT, "--namespace", SYSTEM).strip()}
    return made


def cpu_seconds(pid: int) -> float:
    """User and system time that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_megabytes(pid: int) -> float:
    """The most that it had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1000


def writes(audit_log: Path, offset: int) -> list[str]:
    """What the operator changed on the API server from there on in the log."""
    with audit_log.open("rb") as file:
        file.seek(offset)
        told = [json.loads(line) for line in file if line.endswith(b"\n")]
    return [
        f"{each['verb']} {each['requestURI']}"
        for each in told
        if each["user"]["username"] == f"system:serviceaccount:{SYSTEM}:{ACCOUNT}"
        and each["verb"] not in ("get", "list", "watch")
    ]


def await_ready(where: Namespace, count: int) -> None:
    """Until so many experiments are: by a watch, since questions would take the two cores from what is measured."""
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
        raise TimeoutError(f"of {count} experiments {sum(ready.values())} are ready after {READY_SECONDS} s")


def measure(stack: ExitStack, folder: Path, count: int, idle_seconds: float) -> Iterator[Row]:
    """On the cluster that KUBECONFIG names."""
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
    (folder / "hosts").write_text("".join(f"{ADDRESS} load-{each}-coordinator.{LOAD}.svc\n" for each in range(count)))
    operator = stack.enter_context(
        process(
            folder / "operator.log",
            "unshare", "--mount", "bash", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(folder / "hosts"),
            sys.executable, "-m", "rlsrl_operator", "--settings", str(folder / "settings.yaml"),
            "--health", f"http://{ADDRESS}:8081/healthz", "--metrics-port", "0",
            KUBECONFIG=str(folder / "kubeconfig"), TMPDIR=str(folder),
        )
    )  # fmt: skip
    until(lambda: Namespace(SYSTEM).get("secret", f"{ACCOUNT}-key"), "the operator has begun", timeout=30)

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
        """The operator's share of a core meanwhile, in percent, and what it wrote."""
        used, offset = cpu_seconds(operator.pid), audit_log.stat().st_size
        pause.wait(seconds)
        return 100 * (cpu_seconds(operator.pid) - used) / seconds, writes(audit_log, offset)

    until(lambda: not rest(SETTLED_SECONDS)[1], "the operator has nothing more to write", timeout=300)
    share, written = rest(idle_seconds)
    print(*written, sep="\n", end="\n" if written else "")
    yield Row(f"idle for {idle_seconds:.0f} s: the operator's share of a core", "%", 2, share)
    yield Row("its writes in that time", "", 0, len(written))
    stack.enter_context(coordinators())
    share, written = rest(idle_seconds)
    yield Row("runs that tell of progress: the operator's share of a core", "%", math.inf, share)
    yield Row("its writes", "/s", math.inf, len(written) / idle_seconds)
    yield Row("its memory at most", "MB", 200, peak_megabytes(operator.pid))


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
            said = {log.name: log.read_text()[-2000:] for log in folder.glob("*.log")}
            raise SystemExit(f"{error}\n" + "\n".join(f"{name}: {text}" for name, text in said.items())) from None
    print(*rows, sep="\n")
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
