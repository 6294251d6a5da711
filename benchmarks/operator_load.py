"""What the operator takes for many experiments, beside its budget, on a real control plane with nodes that kwok shows.

    python benchmarks/operator_load.py [--experiments 100] [--idle-seconds 60]

As root: it brings up a cluster of no nodes (`hack/cluster up 0`), takes it down, and builds kwok once (`hack/addon`).
The chart is installed as a user does it; the operator runs on this machine as the chart's service account, with the
chart's settings. Pods are shown to run by kwok, at addresses of the loopback network, where each coordinator's
``/status`` tells of a run that makes no progress: an operator that writes then writes for nothing.
Ends with 1 where the budget is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from rlsrl.api.placement import HTTP_PORT
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import Namespace, run
from rlsrl.testing.waiting import until

REPOSITORY = Path(__file__).parents[1]
SYSTEM, LOAD = "rlsrl-system", "load"
BUILD_SECONDS = 1800.0
NUM_NODES = 5
ADDRESSES = [f"127.7.{high}.{low}" for high in range(4) for low in range(256)]
"""Of kwok's pods, which it gives out in this order."""
PAGE = json.dumps(
    {
        "totals": {
            "env_steps": 1_000_000,
            "train_steps": 1000,
            "env_steps_per_second": 10_000.0,
            "version": "1-1000",
            "policy_lag": 1.0,
            "return_mean": 100.0,
            "unstored_versions": 0,
        }
    }
).encode()
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(PAGE), PAGE)


@dataclass(frozen=True)
class Budget:
    """A line of the table: what was measured, and how much it may be."""

    what: str
    unit: str
    limit: float
    measured: float

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


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Every request with the page, for as long as the connection stays."""
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(ANSWER)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


@contextmanager
def coordinators() -> Iterator[None]:
    """Answers ``/status`` on every pod's address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(asyncio.start_server(answer, ADDRESSES, HTTP_PORT), loop).result()
    yield
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


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


ACCOUNT = "rlsrl-operator"


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


def are_ready(where: Namespace, count: int) -> Callable[[], bool]:
    def ask() -> bool:
        conditions = [each.get("status", {}).get("conditions", ()) for each in where.list("rlexperiments")]
        ready = [any(one["type"] == "Ready" and one["status"] == "True" for one in each) for each in conditions]
        return sum(ready) == count

    return ask


def measure(stack: ExitStack, folder: Path, count: int, idle_seconds: float) -> Iterator[Budget]:
    """On the cluster that KUBECONFIG names."""
    kwok = Path(run(str(REPOSITORY / "hack" / "addon"), "kwok", seconds=BUILD_SECONDS).strip())
    shown = (
        "--config",
        str(kwok / "manifests.yaml"),
        "--manage-nodes-with-annotation-selector",
        "kwok.x-k8s.io/node=fake",
    )
    stack.enter_context(process(folder / "kwok.log", str(kwok / "kwok"), *shown, "--cidr", "127.7.0.1/16"))
    stack.enter_context(coordinators())
    run("kubectl", "create", "-f", "-", stdin=yaml.safe_dump_all(map(node, range(NUM_NODES))))
    run("helm", "install", "rlsrl", str(REPOSITORY / "charts"), "--namespace", SYSTEM, "--create-namespace")
    settings = run(
        "kubectl", "--namespace", SYSTEM, "get", "configmap", ACCOUNT, "-o", r"jsonpath={.data.settings\.yaml}"
    )
    (folder / "settings.yaml").write_text(settings)
    (folder / "kubeconfig").write_text(json.dumps(operators_kubeconfig()))
    run("kubectl", "create", "namespace", LOAD)
    where = Namespace(LOAD)
    command = ("rlsrl_operator", "--settings", str(folder / "settings.yaml"), "--health", "http://127.0.0.1:0/healthz")
    operator = stack.enter_context(
        process(
            folder / "operator.log", sys.executable, "-m", *command, "--metrics-port", "0",
            KUBECONFIG=str(folder / "kubeconfig"), TMPDIR=str(folder),
        )
    )  # fmt: skip
    until(lambda: where.list("rlexperiments") == [] and cpu_seconds(operator.pid) > 1, "the operator has begun")

    used, began = cpu_seconds(operator.pid), time.monotonic()
    where.apply(*map(experiment, range(count)))
    applied = time.monotonic() - began
    until(are_ready(where, count), f"{count} experiments are ready", timeout=600)
    yield Budget(
        f"{count} experiments, {len(where.list('pods'))} pods, from apply to Ready",
        "s",
        30 * count / 100,
        time.monotonic() - began,
    )
    print(
        f"kubectl apply took {applied:.1f} s, the operator {cpu_seconds(operator.pid) - used:.1f} s of processor time"
    )

    audit_log = Path(run(str(REPOSITORY / "hack" / "cluster"), "audit-log").strip())
    silent = [audit_log.stat().st_size]
    pause = threading.Event()
    while writes(audit_log, silent[-1]) or len(silent) == 1:
        silent.append(audit_log.stat().st_size)
        pause.wait(5.0)
    used, offset = cpu_seconds(operator.pid), audit_log.stat().st_size
    pause.wait(idle_seconds)
    idle = (cpu_seconds(operator.pid) - used) / idle_seconds
    found = writes(audit_log, offset)
    print(*found, sep="\n", end="\n" if found else "")
    yield Budget(f"the operator's processor time in {idle_seconds:.0f} idle seconds", "%", 2, 100 * idle)
    yield Budget("its writes in that time", "", 0, len(found))
    yield Budget("its memory at most", "MB", 200, peak_megabytes(operator.pid))


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
        rows = list(measure(stack, folder, arguments.experiments, arguments.idle_seconds))
    for row in rows:
        end = "kept" if row.kept else "EXCEEDED"
        print(f"{row.what:60s} {row.measured:8.1f} {row.unit:2s} budget {row.limit:5.0f} {end}")
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
