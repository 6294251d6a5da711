"""The cluster of KUBECONFIG for tests, through kubectl and helm, and privileged access to its nodes."""

from __future__ import annotations

import atexit
import base64
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path

from rlsrl.api.placement import STATUS_PAGE
from rlsrl.testing.cluster_api import ApiReader, Object
from rlsrl.testing.waiting import until

TAG = os.environ.get("TAG", version("rlsrl"))
"""The tag of the images on the nodes; hack/images reads the same variable."""
COMMAND_SECONDS = 120.0
CLUSTER_SECONDS = 180.0
"""Deadline for events that take seconds, on a machine with other load."""
TRAINED_CARTPOLE = 300.0
"""A return that no network reaches without its training: one with random weights has 9 to 25. A run ends when the mean
over its last episodes is 475; of a single version, greedy episodes had means of 425 and 449."""
_SMALL_BYTES = 50_000_000
_NUM_SMALL = 10
_HELD_SECONDS = 10
_RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}


class KubectlFailed(Exception):
    """The command failed. The text is its error output."""


def run(*command: str, stdin: str | None = None, seconds: float = COMMAND_SECONDS) -> str:
    """Return the output of a command.

    Raises:
        KubectlFailed: the command failed.
    """
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise KubectlFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Namespace:
    """One namespace of the cluster."""

    name: str

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Return kubectl's output for this namespace."""
        return run("kubectl", "--namespace", self.name, *arguments, stdin=stdin)

    def apply(self, *objects: Object) -> None:
        """Create or change objects."""
        self.kubectl(
            "apply", "--filename", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )

    def get(self, kind: str, name: str) -> Object | None:
        """Return an object, or None."""
        return _reader().get(kind, self.name, name)

    def list(self, kind: str, **labels: str) -> list[Object]:
        """Return the objects with those labels, each of them with the prefix ``rlsrl.dev/``."""
        selector = ",".join(f"rlsrl.dev/{name}={value}" for name, value in labels.items())
        return _reader().list(kind, self.name, selector)

    def delete(self, kind: str, name: str, *, wait: bool = False) -> None:
        """Delete an object if it exists."""
        self.kubectl("delete", kind, name, f"--wait={str(wait).lower()}", "--ignore-not-found")


@contextmanager
def namespace(name: str, *, wait: bool = True) -> Iterator[Namespace]:
    """Yield a new namespace that allows only restricted pods; delete it at the end.

    Raises ``KubectlFailed``, and deletes nothing, if the name is taken.

    With ``wait=False`` the deletion continues in the background.
    """
    made = Namespace(name)
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": _RESTRICTED}}
    # Created, not applied: an existing namespace belongs to somebody else and must not be deleted at the end.
    run("kubectl", "create", "--filename", "-", stdin=json.dumps(document))
    try:
        yield made
    finally:
        command = ["delete", "namespace", name, f"--wait={str(wait).lower()}", f"--timeout={CLUSTER_SECONDS:.0f}s"]
        run("kubectl", *command, seconds=CLUSTER_SECONDS)


@contextmanager
def release(system: Namespace, chart: Path, *values: str) -> Iterator[Callable[[], None]]:
    """Change values of the release ``rlsrl``, each ``name=value``; yield a function that restores them.

    They are restored at the end at the latest.
    """

    def helm(*arguments: str) -> None:
        run("helm", *arguments, "--namespace", system.name, "--wait", "--timeout", "2m")

    settings = [word for each in values for word in ("--set", each)]
    helm("upgrade", "rlsrl", str(chart), "--reuse-values", *settings)
    with ExitStack() as stack:
        stack.callback(helm, "rollback", "rlsrl")
        yield stack.close


@contextmanager
def api_proxy() -> Iterator[str]:
    """Yield a local address that forwards to the API server without credentials.

    Raises:
        KubectlFailed: the proxy does not start.
    """
    command = ["kubectl", "proxy", "--address", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            found = re.search(r"Starting to serve on (127\.0\.0\.1:\d+)", process.stdout.readline())
            if found is None:
                raise KubectlFailed(f"{' '.join(command)}: {process.stderr.read().strip()}")
            yield found[1]
        finally:
            process.kill()


@cache
def _reader() -> ApiReader:
    """Return the process's reader of the cluster."""
    proxy = ExitStack()
    atexit.register(proxy.close)
    return ApiReader(proxy.enter_context(api_proxy()))


@dataclass(frozen=True)
class ClusterExperiment:
    """An experiment in a namespace."""

    where: Namespace
    name: str

    @property
    def object(self) -> Object:
        """The current object."""
        found = self.where.get("rlexperiment", self.name)
        if found is None:
            raise KubectlFailed(f"the experiment {self.name} is gone")
        return found

    @property
    def document(self) -> Object:
        """The current object as a user writes it."""
        spec = {key: self.object[key] for key in ("apiVersion", "kind", "spec")}
        return {**spec, "metadata": {"name": self.name}}

    @property
    def status(self) -> Object:
        """The current status."""
        status: Object = self.object.get("status", {})
        return status

    @property
    def phase(self) -> str:
        """The current phase."""
        return str(self.status.get("phase", ""))

    def env_steps(self) -> int:
        """Return the trained transitions in the status."""
        return int(self.status.get("training", {}).get("envSteps") or 0)

    def ledger(self) -> Object:
        """Return the run's ledger from the coordinator."""
        found: Object = json.loads(self.page("coordinator", STATUS_PAGE))["ledger"]
        return found

    def page(self, role: str, path: str) -> str:
        """Return an HTTP page of the role's first pod."""
        return self._python(role, _PAGE, path)

    def copy_run_files(self, pattern: str, folder: Path) -> None:
        """Copy the files of the run's folder that match the pattern from the coordinator's volume into a local folder.

        The run must not have begun again from step 0.
        """
        run_folder = f"/data/{self.object['metadata']['uid']}"
        for path, content in json.loads(self._python("coordinator", _FILES, run_folder, pattern)).items():
            copy = folder / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(base64.b64decode(content))

    def _python(self, role: str, program: str, *arguments: str) -> str:
        """Return the output of a Python program in the role's first pod."""
        name = self.pods(role)[0]["metadata"]["name"]
        return self.where.kubectl("exec", name, "--", "python", "-c", program, *arguments)

    def exported_return(self, folder: Path) -> float:
        """Export the newest version's weights into a folder, play greedy episodes with them, and return their mean."""
        weights, document = folder / "weights.safetensors", folder / "experiment.json"
        document.write_text(json.dumps(self.document))
        print(run("kubectl", "rlsrl", "params", "list", self.name, "-n", self.where.name))
        run("kubectl", "rlsrl", "params", "export", self.name, "-n", self.where.name, "-o", str(weights))
        evaluation = run("rlsrl", "eval", str(weights), "--experiment", str(document), "--json")
        return float(json.loads(evaluation)["return_mean"])

    def condition(self, name: str) -> Object:
        """Return a condition; empty before it exists."""
        return next((each for each in self.status.get("conditions", ()) if each["type"] == name), {})

    def pods(self, role: str | None = None) -> list[Object]:
        """Return its pods, or those of one role."""
        return self.where.list("pods", experiment=self.name, **({} if role is None else {"role": role}))

    def await_phase(self, *phases: str, seconds: float = CLUSTER_SECONDS) -> None:
        """Wait for one of these phases."""
        try:
            until(lambda: self.phase in phases, f"{self.name} is {' or '.join(phases)}", timeout=seconds)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.status_text()}") from None

    def status_text(self) -> str:
        """Return the descriptions of the experiment and its pods, for error messages."""
        return self.where.kubectl("describe", "rlexperiment", self.name) + self.where.kubectl(
            "get", "pods", "-o", "wide"
        )


@dataclass(frozen=True)
class Nodes:
    """A privileged pod on each node, which sees the processes of all pods."""

    where: Namespace
    by_node: Mapping[str, str] = field(default_factory=dict)

    def python(self, node: str, program: str, *arguments: str) -> str:
        """Return the output of a Python program on a node."""
        return self.where.kubectl("exec", self.by_node[node], "--", "python", "-c", program, *arguments)

    def kill(self, pod: Object, *, command: str = "rlsrl.workers", sig: int = 9) -> int:
        """Signal the pod's processes that run this module; return their number."""
        return int(self.python(pod["spec"]["nodeName"], _KILL, pod["metadata"]["uid"], command, str(sig)))

    def on_node(self, node: str, script: str) -> str:
        """Return the output of a shell script on the node itself, as root."""
        return self.where.kubectl(
            "exec", self.by_node[node], "--", "nsenter", "-t", "1", "-m", "--", "sh", "-c", script
        )

    def exhaust_memory(self, pod: Object) -> None:
        """Use up the pod's half gigabyte of memory, so that the kernel kills the worker."""
        node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
        cgroup = self.python(node, _MARK_FOR_OOM, uid).strip()
        folder = f"$(ls -d /sys/fs/cgroup/memory{cgroup} /sys/fs/cgroup{cgroup} 2>/dev/null | head -1)"
        # Many processes smaller than the worker, because the kernel kills the largest. They end soon.
        small = f"(head -c {_SMALL_BYTES} /dev/zero; sleep {_HELD_SECONDS}) | tail >/dev/null"
        eat = f"for i in $(seq {_NUM_SMALL}); do {small} & done; wait"
        with suppress(KubectlFailed):
            self.on_node(node, f"echo $$ > {folder}/cgroup.procs && {eat}")

    def usage(self, pod: Object) -> dict[str, int]:
        """Return the memory in bytes, the descriptors and the threads of all processes of the pod."""
        found: dict[str, int] = json.loads(self.python(pod["spec"]["nodeName"], _USAGE, pod["metadata"]["uid"]))
        return found

    def connections(self, pods: Sequence[Object]) -> set[tuple[str, str, int]]:
        """Return the TCP connections that the pods opened: role, address, port."""
        found = set()
        for pod in pods:
            if pod["status"].get("phase") != "Running":
                continue
            lines = self.python(pod["spec"]["nodeName"], _CONNECTIONS, pod["metadata"]["uid"]).splitlines()
            for line in lines:
                address, port = line.rsplit(" ", 1)
                found.add((pod["metadata"]["labels"]["rlsrl.dev/role"], address, int(port)))
        return found


@contextmanager
def nodes(image: str) -> Iterator[Nodes]:
    """Yield privileged access to all nodes."""
    where = Namespace("rlsrl-e2e-nodes")
    labels = {"app": "hand"}
    where.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": where.name}},
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "hand", "namespace": where.name},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels},
                    "spec": {
                        "hostPID": True,
                        "terminationGracePeriodSeconds": 0,
                        "containers": [
                            {
                                "name": "hand",
                                "image": image,
                                "command": ["sleep", "infinity"],
                                "securityContext": {"privileged": True, "runAsUser": 0},
                            }
                        ],
                    },
                },
            },
        },
    )
    try:
        where.kubectl("rollout", "status", "daemonset/hand", f"--timeout={COMMAND_SECONDS:.0f}s")
        yield Nodes(where, {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in where.list("pods")})
    finally:
        run("kubectl", "delete", "namespace", where.name, "--wait=true")


_PROCESSES = """
import os, sys
def command_of(pid):
    return open(f"/proc/{pid}/cmdline").read().split("\\0")
def processes(uid):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            groups = open(f"/proc/{pid}/cgroup").read().replace("_", "-")
            command = command_of(pid)
            parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]
            if "rlsrl.workers.gang_launcher" in command and command_of(parent) == command:
                command = ["rlsrl.workers", "a rank, forked by its launcher"]
        except OSError:
            continue
        if uid in groups and command[0]:
            yield int(pid), command
"""
_PAGE = """
import os, pathlib, sys, urllib.request
token = pathlib.Path(os.environ["RLSRL_TOKEN_FILE"]).read_text().strip()
url = f"http://{os.environ['RLSRL_HOST']}:8080{sys.argv[1]}"
request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
print(urllib.request.urlopen(request, timeout=10).read().decode())
"""
_FILES = """
import base64, json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
paths = {str(path.relative_to(folder)): path for path in folder.glob(sys.argv[2])}
print(json.dumps({name: base64.b64encode(path.read_bytes()).decode() for name, path in paths.items()}))
"""

_USAGE = f"""{_PROCESSES}
import json
bytes_, descriptors, threads = 0, 0, 0
for pid, command in processes(sys.argv[1]):
    try:
        status = dict(line.split(":", 1) for line in open(f"/proc/{{pid}}/status"))
        descriptors += len(os.listdir(f"/proc/{{pid}}/fd"))
    except OSError:
        continue
    bytes_ += int(status.get("RssAnon", "0 kB").split()[0]) * 1024
    threads += int(status["Threads"])
print(json.dumps({{"bytes": bytes_, "descriptors": descriptors, "threads": threads}}))
"""
_MARK_FOR_OOM = f"""{_PROCESSES}
(pid,) = (pid for pid, command in processes(sys.argv[1]) if "rlsrl.workers" in command)
open(f"/proc/{{pid}}/oom_score_adj", "w").write("1000")
groups = [line.strip().split(":", 2) for line in open(f"/proc/{{pid}}/cgroup")]
print(next(path for _, names, path in groups if names in ("", "memory")))
"""
_KILL = f"""{_PROCESSES}
found = [pid for pid, command in processes(sys.argv[1]) if sys.argv[2] in command]
for pid in found:
    os.kill(pid, int(sys.argv[3]))
print(len(found))
"""
_CONNECTIONS = f"""{_PROCESSES}
import socket, struct
def address(text):
    host, port = text.split(":")
    words = [struct.pack("<I", int(host[i:i+8], 16)) for i in range(0, len(host), 8)]
    packed = b"".join(words)
    if len(packed) == 16 and packed[:12] == bytes(10) + b"\\xff\\xff":
        packed = packed[12:]
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed), int(port, 16)
listening, established = set(), set()
for pid, command in processes(sys.argv[1]):
    if "/pause" in command[0]:
        continue
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/{{pid}}/net/{{table}}").read().splitlines()[1:]:
            fields = line.split()
            (_, port), there, state = address(fields[1]), address(fields[2]), fields[3]
            if state == "0A":
                listening.add(port)
            elif state in ("01", "02"):
                established.add((port, there))
    break
for port, (host, there) in sorted(established):
    if port not in listening and not host.startswith("127."):
        print(host, there)
"""
