"""The rules of Kueue, where a cluster has it, for workloads in one of its queues. Pure.

Kueue does not know experiments. If a StatefulSet names a queue, a scheduling gate holds back all its pods until the
queue has capacity for all of them. Kueue evicts them for workloads with higher priority, or if the queue is stopped.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlsrl_operator.manifests.types import Manifest

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of an experiment and of its queued workload: the LocalQueue in the namespace."""
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
"""Label beside it: a WorkloadPriorityClass, which orders the queue and means nothing to the scheduler."""
GATE = "kueue.x-k8s.io/admission"
"""Scheduling gate of a pod that Kueue has not admitted."""


def queue_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of an experiment that its queued workload gets, too."""
    return {name: labels[name] for name in (QUEUE_LABEL, PRIORITY_LABEL) if name in labels}


def is_gated(pod: Manifest) -> bool:
    """Return whether Kueue's scheduling gate keeps a pod waiting for its queue."""
    return any(gate["name"] == GATE for gate in pod.get("spec", {}).get("schedulingGates", ()))


def begins_in_queue(wanted: Manifest, observed: Manifest | None) -> bool:
    """Return whether a queued workload is scaled up from 0, which its queue may refuse for a while."""
    return observed is not None and _is_queued(wanted) and observed["spec"].get("replicas") == 0


def next_size(wanted: Manifest, observed: Manifest | None) -> Manifest:
    """Return the manifest to apply now. Kueue refuses to resize a queued workload, so it is scaled to 0 first."""
    if observed is None or not _is_queued(wanted):
        return wanted
    if observed["spec"].get("replicas", 1) in (0, wanted["spec"]["replicas"]):
        return wanted
    return {**wanted, "spec": {**wanted["spec"], "replicas": 0}}


def _is_queued(wanted: Manifest) -> bool:
    return QUEUE_LABEL in wanted["metadata"].get("labels", {}) and wanted.get("spec", {}).get("replicas", 0) > 0
