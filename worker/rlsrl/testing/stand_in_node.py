"""A node without a kubelet, for tests of what happens around pods: those that ask for it are shown to run, none does.

What a kubelet would say, and when, is the API server's only source about pods; this says it at once. What it leaves
out: images, volumes, probes, restarts, and the time that all of them take.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from rlsrl.api.pods import CONTAINER
from rlsrl.testing.cluster_api import Api, Object
from rlsrl.testing.waiting import DEADLINE_SECONDS

SELECTOR = "rlsrl.dev/stand-in"
"""Label of nodes by which pods ask for one."""
_LOOK_SECONDS = 0.05
_BEAT_SECONDS = 5.0
"""Between two of them; the controllers think a node lost that was silent ten times as long."""


class StandInNode:
    """From enter to exit a node is there, and ready; at the exit it waits for its last pod to go."""

    def __init__(self, address: str, name: str) -> None:
        """``address`` is the API server's, without credentials."""
        self._api, self._name = Api(address), name
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._next_beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def selector(self) -> Mapping[str, str]:
        """What pods ask for it by."""
        return {SELECTOR: self._name}

    def __enter__(self) -> Self:
        self._api.send("POST", "/api/v1/nodes", _node(self._name))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_SECONDS)
        if self._thread.is_alive():
            raise AssertionError(f"pods of {self._name} do not go: their namespaces should have been deleted")
        self._api.send("DELETE", f"/api/v1/nodes/{self._name}")
        self._api.send("DELETE", f"{_LEASES}/{self._name}")
        self._api.close()
        if self._failure is not None:
            raise AssertionError("the node's thread failed") from self._failure

    def _run(self) -> None:
        pause = threading.Event()
        try:
            while True:
                self._beat_in_time()
                pods = [each for each in self._api.items("/api/v1/pods?resourceVersion=0") if self._is_mine(each)]
                if self._stop.is_set() and not pods:
                    return
                for pod in pods:
                    self._look(pod)
                    self._beat_in_time()  # a look at hundreds of pods takes its time
                pause.wait(_LOOK_SECONDS)
        except Exception as error:  # noqa: BLE001 - told at the exit
            self._failure = error

    def _is_mine(self, pod: Object) -> bool:
        return bool(pod["spec"].get("nodeSelector", {}).get(SELECTOR) == self._name)

    def _look(self, pod: Object) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if "deletionTimestamp" in metadata:
            self._api.send("DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}})
        elif not pod["spec"].get("nodeName"):
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}}
            self._api.send("POST", f"{path}/binding", {**binding, "target": {"kind": "Node", "name": self._name}})
        elif pod["status"].get("phase") == "Pending" or _is_wronged(pod):
            running = _status(metadata["creationTimestamp"], {"running": {"startedAt": metadata["creationTimestamp"]}})
            self._api.merge(f"{path}/status", {"metadata": {"uid": metadata["uid"]}, "status": running})

    def _beat_in_time(self) -> None:
        """As kubelets do: a lease is renewed, and the node's condition says what it says."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + _BEAT_SECONDS
        now = datetime.now(UTC)
        self._api.merge(f"/api/v1/nodes/{self._name}/status", {"status": _node_status(now)})
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": {"holderIdentity": self._name, "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")},
        }
        if self._api.merge(f"{_LEASES}/{self._name}", lease) is None:
            self._api.send("POST", _LEASES, lease)


def end_container(api: Api, pod: Object, *, message: str, exit_code: int = 0) -> None:
    """Show that a pod's worker ended, and is not started again."""
    metadata = pod["metadata"]
    since = metadata["creationTimestamp"]
    state = {"exitCode": exit_code, "reason": "Completed", "message": message, "startedAt": since, "finishedAt": since}
    status = _status(since, {"terminated": state}, ready=False)
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
    api.merge(path, {"metadata": {"uid": metadata["uid"]}, "status": status})


_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


def _node(name: str) -> Object:
    # Only who asks for it by name and binds itself comes here.
    taint = {"key": SELECTOR, "value": name, "effect": "NoSchedule"}
    metadata = {"name": name, "labels": {SELECTOR: name}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [taint]}}


def _is_wronged(pod: Object) -> bool:
    """Whether the controllers took its node for lost, and said so of a pod that runs: only the node takes that back."""
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", ()))
    return not ready and all(each["ready"] for each in pod["status"].get("containerStatuses", ()))


def _node_status(now: datetime) -> Object:
    ready = {"type": "Ready", "status": "True", "reason": "StandIn", "lastHeartbeatTime": now.strftime("%FT%TZ")}
    return {"conditions": [ready], "capacity": {"pods": "1000"}, "allocatable": {"pods": "1000"}}


def _status(since: str, state: Object, *, ready: bool = True) -> Object:
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    conditions = [
        {
            "type": kind,
            "status": str(ready or kind not in ("ContainersReady", "Ready")),
            "lastTransitionTime": since,
        }
        for kind in kinds
    ]
    container = {"name": CONTAINER, "image": "none", "imageID": "", "restartCount": 0, "ready": ready, "state": state}
    return {"phase": "Running", "conditions": conditions, "startTime": since, "containerStatuses": [container]}
