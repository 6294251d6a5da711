"""What Kueue does, where a cluster has it, to workloads that wait in one of its queues. Pure.

It knows nothing of experiments. It holds all pods of a StatefulSet that names a queue back by a scheduling gate until
the queue has room for all of them, and takes them away again when others go first or the queue is stopped.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlsrl_operator.manifests.types import Manifest

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""On an experiment and on what waits for it: the LocalQueue of the namespace."""
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
"""Beside it: a WorkloadPriorityClass, which says who goes first in the queue and nothing to the scheduler."""
REMOVED_CONDITION = "TerminationTarget"
"""Of a pod: Kueue takes it away."""
GATE = "kueue.x-k8s.io/admission"
"""Of a pod: a scheduling gate, by which Kueue holds it back."""


def queue_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Of an experiment's labels, those that its workloads get too."""
    return {name: labels[name] for name in (QUEUE_LABEL, PRIORITY_LABEL) if name in labels}


def is_held(pod: Manifest) -> bool:
    """Whether a pod waits to be admitted."""
    return any(gate["name"] == GATE for gate in pod.get("spec", {}).get("schedulingGates", ()))


def begins_in_queue(wanted: Manifest, observed: Manifest) -> bool:
    """Whether pods are asked for, where there are none, of a queue: which may refuse it for now."""
    return _is_queued(wanted) and observed["spec"].get("replicas") == 0


def stepwise(wanted: Manifest, observed: Manifest | None) -> Manifest:
    """The object to ask for now: what is queued is resized by way of none, since Kueue refuses any other way."""
    if observed is None or not _is_queued(wanted):
        return wanted
    if observed["spec"].get("replicas", 1) in (0, wanted["spec"]["replicas"]):
        return wanted
    return {**wanted, "spec": {**wanted["spec"], "replicas": 0}}


def _is_queued(wanted: Manifest) -> bool:
    return QUEUE_LABEL in wanted["metadata"].get("labels", {}) and wanted.get("spec", {}).get("replicas", 0) > 0
