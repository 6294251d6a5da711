"""The cluster's features that other tests assume: pods on each node, DNS, volumes, Pod Security, access."""

from __future__ import annotations

import json
import subprocess
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import TAG, KubectlFailed, Namespace, namespace, run
from rlsrl.testing.waiting import until

pytestmark = pytest.mark.e2e

IMAGE = f"rlsrl/operator:{TAG}"
"""Any image on the nodes with Python."""
USER = 10001
PORT = 8000
SERVE = f"""
import http.server, os, socket
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(socket.gethostname().encode())
print("serving as", os.getuid(), flush=True)
http.server.HTTPServer(("", {PORT}), Handler).serve_forever()
"""
ASK = """
import sys, time, urllib.request
answers = []
for url in sys.argv[1:]:
    while True:  # DNS names and endpoints appear a moment after their pod
        try:
            answers.append(urllib.request.urlopen(url, timeout=2).read().decode())
            break
        except OSError as error:
            print(url, error, flush=True)
            time.sleep(0.5)
print(*answers)
"""
WRITE = """
import os, sys
open("/data/file", "w").write(sys.argv[1])
try:
    open("/file", "w")
except OSError as error:
    print(os.getuid(), os.strerror(error.errno))
"""
READ = 'print(open("/data/file").read())'


@pytest.fixture(scope="module")
def place() -> Iterator[Namespace]:
    with namespace(f"cluster-{uuid.uuid4().hex[:8]}") as made:
        yield made


def pod(name: str, program: str, *arguments: str, **spec: Any) -> Object:
    """Return a pod that runs a Python program under Pod Security `restricted`."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "python",
                    "image": IMAGE,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["python", "-c", program, *arguments],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [{"name": each["name"], "mountPath": "/data"} for each in spec.get("volumes", ())],
                }
            ],
            **spec,
        },
    }


def server(name: str, **spec: Any) -> Object:
    """Return a pod that answers HTTP with its host name, and is ready once it answers."""
    made = pod(name, SERVE, **spec)
    made["spec"]["containers"][0]["readinessProbe"] = {"httpGet": {"path": "/", "port": PORT}, "periodSeconds": 1}
    return made


def service(name: str, app: str, **spec: Any) -> Object:
    ports = [{"port": 80, "targetPort": PORT}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": app}, "ports": ports, **spec},
    }


def await_ready(place: Namespace, name: str) -> None:
    place.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=90s")


def output(place: Namespace, name: str) -> str:
    """Wait for the end of a pod's program and return its output."""
    phase = until(lambda: ended(place, name), f"{name} ended")
    log = place.kubectl("logs", name)
    assert phase == "Succeeded", log
    return log


def ended(place: Namespace, name: str) -> str | None:
    found = place.get("pod", name)
    phase = found and found["status"].get("phase")
    return phase if phase in ("Succeeded", "Failed") else None


def workers() -> list[str]:
    """Return the names of the schedulable nodes."""
    nodes = json.loads(run("kubectl", "get", "nodes", "--output", "json"))["items"]
    kept_free = "node-role.kubernetes.io/"
    return [
        node["metadata"]["name"]
        for node in nodes
        if not any(taint["key"].startswith(kept_free) for taint in node["spec"].get("taints", ()))
    ]


def test_a_pod_runs_on_each_node(place: Namespace) -> None:
    nodes = workers()
    assert len(nodes) >= 2
    for number, node in enumerate(nodes):
        place.apply(pod(f"on-{number}", "print('here')", nodeSelector={"kubernetes.io/hostname": node}))
    for number, node in enumerate(nodes):
        assert output(place, f"on-{number}") == "here\n"
        found = place.get("pod", f"on-{number}")
        assert found is not None
        assert found["spec"]["nodeName"] == node


def test_pods_of_different_nodes_find_each_other_by_name(place: Namespace) -> None:
    here, there = workers()[:2]
    place.apply(
        server("web", hostname="web-0", subdomain="peers", nodeSelector={"kubernetes.io/hostname": there}),
        service("front", "web"),
        service("peers", "web", clusterIP="None"),
    )
    await_ready(place, "web")
    urls = ("http://front", f"http://front.{place.name}.svc.cluster.local", f"http://web-0.peers:{PORT}")
    place.apply(pod("client", ASK, *urls, nodeSelector={"kubernetes.io/hostname": here}, activeDeadlineSeconds=90))
    assert output(place, "client").splitlines()[-1].split() == ["web-0"] * len(urls)


def test_a_claim_outlives_the_pod_that_wrote_to_it_as_a_user(place: Namespace) -> None:
    content = uuid.uuid4().hex
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "standard",
        "resources": {"requests": {"storage": "1Gi"}},
    }
    place.apply({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": claim})
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    place.apply(pod("writer", WRITE, content, volumes=volumes))
    assert output(place, "writer") == f"{USER} Read-only file system\n"
    place.delete("pod", "writer", wait=True)
    place.apply(pod("reader", READ, volumes=volumes))
    assert output(place, "reader") == f"{content}\n"


def test_a_pod_that_may_become_root_is_refused(place: Namespace) -> None:
    bold = pod("bold", "print('here')")
    del bold["spec"]["securityContext"]["runAsNonRoot"]
    with pytest.raises(KubectlFailed, match="violates PodSecurity"):
        place.apply(bold)
    assert place.get("pod", "bold") is None


def test_commands_logs_and_ports_are_reached_from_here(place: Namespace) -> None:
    place.apply(server("echo"))
    await_ready(place, "echo")
    assert place.kubectl("logs", "echo").startswith(f"serving as {USER}\n")
    assert place.kubectl("exec", "echo", "--", "python", "-c", "print(6 * 7)") == "42\n"
    with pytest.raises(KubectlFailed, match="exit code 7"):
        place.kubectl("exec", "echo", "--", "python", "-c", "raise SystemExit(7)")
    with forwarded(place, "echo") as port, urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=30) as answer:
        assert answer.read() == b"echo"


@contextmanager
def forwarded(place: Namespace, name: str) -> Iterator[int]:
    """Yield a local port that forwards to the pod's."""
    command = ("kubectl", "--namespace", place.name, "port-forward", f"pod/{name}", f":{PORT}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        # The line comes, or the end of the output when kubectl gives up or is made to.
        deadline = threading.Timer(60, process.kill)
        deadline.start()
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline().split("127.0.0.1:")[1].split()[0])
        finally:
            deadline.cancel()
            process.kill()
