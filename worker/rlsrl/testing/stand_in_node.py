"""A simulated node without a kubelet: it reports the pods that select it as running, without starting them.

The API server knows about pods only from kubelets; this node reports them at once. It leaves out images, volumes,
probes, restarts, and the time for these.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

from rlsrl.api.pods import CONTAINER, is_ready
from rlsrl.testing.cluster_api import Api, Object
from rlsrl.testing.waiting import DEADLINE_SECONDS

SELECTOR = "rlsrl.dev/stand-in"
"""Node label that pods use to select a simulated node."""
_POLL_SECONDS = 0.05
_BEAT_SECONDS = 5.0
"""Seconds between two heartbeats. After ten times as long the controllers treat a node as lost."""


class StandInNode:
    """A ready node from enter to exit; the exit waits for the deletion of its last pod."""

    def __init__(self, address: str, name: str) -> None:
        """``address`` is an API server without credentials."""
        self._api, self._name = Api(address), name
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._next_beat = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def selector(self) -> Mapping[str, str]:
        """The node selector for pods."""
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
            raise AssertionError(f"pods of {self._name} still exist: their namespaces should have been deleted")
        self._api.send("DELETE", f"/api/v1/nodes/{self._name}")
        self._api.send("DELETE", f"{_LEASES}/{self._name}")
        self._api.close()
        if self._failure is not None:
            raise AssertionError("the node's thread failed") from self._failure

    def _run(self) -> None:
        pause = threading.Event()
        try:
            while True:
                self._send_due_heartbeat()
                pods = [each for each in self._api.items("/api/v1/pods?resourceVersion=0") if self._is_mine(each)]
                if self._stop.is_set() and not pods:
                    return
                for pod in pods:
                    self._update(pod)
                    self._send_due_heartbeat()  # hundreds of pods take a while
                pause.wait(_POLL_SECONDS)
        except Exception as error:  # noqa: BLE001 - raised at the exit
            self._failure = error

    def _is_mine(self, pod: Object) -> bool:
        return bool(pod["spec"].get("nodeSelector", {}).get(SELECTOR) == self._name)

    def _update(self, pod: Object) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        if "deletionTimestamp" in metadata:
            self._api.send("DELETE", path, {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}})
        elif not pod["spec"].get("nodeName"):
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}}
            self._api.send("POST", f"{path}/binding", {**binding, "target": {"kind": "Node", "name": self._name}})
        elif pod["status"].get("phase") == "Pending" or _is_marked_lost(pod):
            running = _status(metadata["creationTimestamp"], {"running": {"startedAt": metadata["creationTimestamp"]}})
            self._api.merge(f"{path}/status", {"metadata": {"uid": metadata["uid"]}, "status": running})

    def _send_due_heartbeat(self) -> None:
        """Renew the node's lease and condition, as kubelets do."""
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


def end_container(api: Api, pod: Object, *, message: str) -> None:
    """Report that a pod's worker has ended with success and does not restart."""
    metadata = pod["metadata"]
    since = metadata["creationTimestamp"]
    state = {"exitCode": 0, "reason": "Completed", "message": message, "startedAt": since, "finishedAt": since}
    status = _status(since, {"terminated": state}, ready=False)
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
    api.merge(path, {"metadata": {"uid": metadata["uid"]}, "status": status})


_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


def _node(name: str) -> Object:
    # The taint keeps out all pods but those that this node binds.
    taint = {"key": SELECTOR, "value": name, "effect": "NoSchedule"}
    metadata = {"name": name, "labels": {SELECTOR: name}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"taints": [taint]}}


def _is_marked_lost(pod: Object) -> bool:
    """Return whether the controllers marked a running pod as not ready, as if its node were lost."""
    return not is_ready(pod) and all(each["ready"] for each in pod["status"].get("containerStatuses", ()))


def _node_status(now: datetime) -> Object:
    ready = {"type": "Ready", "status": "True", "reason": "StandIn", "lastHeartbeatTime": now.strftime("%FT%TZ")}
    room = {"pods": "1000", "cpu": "1000", "memory": "10Ti"}  # The pods do not run, but they request resources.
    return {"conditions": [ready], "capacity": room, "allocatable": room}


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
