"""The operator's words: phases, conditions, why they stand as they do; what each means and what to do about it.

The operator says them, `kubectl rlsrl why` explains them, and the tables of docs/kubernetes/operations.md are made from
them (`make docs`). Events have the same reasons. What stands in tables is Markdown, one paragraph a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NewType

from rlsrl.api.status import Phase

ConditionType = Literal["Accepted", "Ready", "GangComplete", "Durable", "Finished"]
"""The types of conditions."""
ACCEPTED: Final = "Accepted"
READY: Final = "Ready"
GANG_COMPLETE: Final = "GangComplete"
DURABLE: Final = "Durable"
FINISHED: Final = "Finished"

AcceptedReason = Literal["Accepted", "InvalidSpec", "EditRefused", "NameConflict"]
EndReason = Literal["Succeeded", "ConfigurationError", "BudgetExhausted"]
GangReason = Literal["Starting", "Complete", "Restarting", "Suspended"]
DurableReason = Literal["Stored", "NotStored"]
ReadyReason = Literal[
    "Ready", "Starting", "FailedCreate", "Waiting", "Unschedulable", "Queued", "Suspended", "Finished"
]
Reason = AcceptedReason | DurableReason | EndReason | GangReason | ReadyReason
"""What the operator says by itself."""
PodReason = NewType("PodReason", str)
"""What Kubernetes says of a pod, passed on under ``Ready``: ``ImagePullBackOff``, ``CrashLoopBackOff`` and others."""


@dataclass(frozen=True)
class Explanation:
    """A word, for people."""

    meaning: str
    cure: str
    """What to do about it."""


@dataclass(frozen=True)
class Judgement(Explanation):
    """A reason of a condition, for people."""

    status: Literal["True", "False"]
    """Whether the condition holds then."""


UNSEEN = Explanation(
    "No operator has looked at it: it does not run.",
    "See that the operator is there (`kubectl get deployments -A -l app.kubernetes.io/name=rlsrl`), and that "
    "`namespaces` of the chart does not leave this namespace out.",
)
"""Of an experiment without a status."""
STALE = Explanation(
    "The coordinator does not answer the operator, so the numbers are old.",
    "See that its pod is ready, and that a NetworkPolicy of somebody else's does not keep the operator away from it. "
    "Training may well go on.",
)
"""Of numbers that should be newer while an experiment runs."""
PHASES: Mapping[Phase, Explanation] = {
    "Pending": Explanation(
        "Nothing was made: the experiment was not accepted, or a moment ago.", "Look at the condition `Accepted`."
    ),
    "Queued": Explanation(
        "Its trainers wait until its queue admits them all at once; nobody else of it is there.",
        "Nothing, if others go first. Else look at the condition `Ready`.",
    ),
    "Starting": Explanation(
        "Its objects are made; not all trainers are ready, for the first time or again.",
        "If it stays: look at the condition `Ready`.",
    ),
    "Running": Explanation("The trainers train.", "Nothing."),
    "Suspended": Explanation(
        "`suspend` is true: the trainers stored what they had, and its pods are gone or going.",
        "Set `suspend` to false, and it goes on from there.",
    ),
    "Succeeded": Explanation(
        "It has its result, for good. The coordinator stays, so that weights can be fetched, until the experiment is "
        "deleted or `ttlSecondsAfterFinished` is over.",
        "`kubectl rlsrl params export NAME -o weights.safetensors`, then delete it.",
    ),
    "Failed": Explanation(
        "It ended without a result, for good. What was stored until then can be fetched as above.",
        "Look at the condition `Finished`. To try again: delete it and apply it anew.",
    ),
}

REASONS: Mapping[ConditionType, Mapping[Reason, Judgement]] = {
    ACCEPTED: {
        "Accepted": Judgement(
            "Every object is as it should be; one that is edited or deleted by hand comes back.", "Nothing.", "True"
        ),
        "InvalidSpec": Judgement(
            "The spec is none, or the API server refused an object made from it, by an admission policy or a quota for "
            "instance. The message is what it said.",
            "Mend the spec or what refuses it. The operator tries again every 30 seconds.",
            "False",
        ),
        "EditRefused": Judgement(
            "A field was edited that cannot be: it would be another experiment. The run goes on as it was before; the "
            "message names the field.",
            "Take the edit back, or apply the new experiment under another name.",
            "False",
        ),
        "NameConflict": Judgement(
            "An object that the experiment needs is there and belongs to somebody else. It is left alone.",
            "Rename or delete that object, or name the experiment otherwise. The operator tries again every 30 "
            "seconds.",
            "False",
        ),
    },
    READY: {
        "Ready": Judgement("Every pod is ready.", "Nothing.", "True"),
        "Starting": Judgement(
            "Pods are being made, started, or ended to make room for others.",
            "Nothing, unless it stays: then the pod's log says how far it came; where there is no pod, `kubectl "
            "describe` of the role's Deployment or StatefulSet `NAME-ROLE` says what refuses it, a quota or Pod "
            "Security for instance.",
            "False",
        ),
        "FailedCreate": Judgement(
            "A role's pods may not be made. The message is the API server's: a quota, an admission policy, a limit "
            "range.",
            "Raise the quota or change the policy of the namespace; pods come by themselves then.",
            "False",
        ),
        "Unschedulable": Judgement(
            "No node takes the pod. The message is the scheduler's: too little CPU, memory or GPUs, a taint, a node "
            "selector, a volume on another node.",
            "Add nodes, or change `resources`, `nodeSelector`, `tolerations` of the role in the chart's values, or the "
            "experiment's replicas.",
            "False",
        ),
        "Queued": Judgement(
            "The queue that the label `kueue.x-k8s.io/queue-name` names has not admitted the trainers, or took them "
            "out again: there is no room beside those that go first, or the queue is stopped or not there.",
            "`kubectl describe workloads.kueue.x-k8s.io` in this namespace says what is missing. The experiment goes "
            "on by itself once it is admitted.",
            "False",
        ),
        "Waiting": Judgement("A container waits, and Kubernetes gives no reason.", "`kubectl describe pod`.", "False"),
        "Suspended": Judgement(
            "`suspend` is true; the message says how many pods are still ending.",
            "Set `suspend` to false to go on.",
            "False",
        ),
        "Finished": Judgement(
            "The experiment is over; its pods are gone but for the coordinator's.", "Nothing.", "False"
        ),
    },
    GANG_COMPLETE: {
        "Starting": Judgement("The first attempt begins.", "Nothing.", "False"),
        "Complete": Judgement("All trainers are ready.", "Nothing.", "True"),
        "Restarting": Judgement(
            "An attempt is over; the message says which pod ended it and how. A failure counts towards "
            "`restarts.budget`; an eviction, a preemption or an edit of the spec does not.",
            "Nothing, unless it comes again and again: read the log of that pod, `--previous`.",
            "False",
        ),
        "Suspended": Judgement("`suspend` is true.", "Set `suspend` to false to go on.", "False"),
    },
    DURABLE: {
        "Stored": Judgement("The versions that were due are stored.", "Nothing.", "True"),
        "NotStored": Judgement(
            "Training goes on, but its last versions could not be stored: a volume that is full, a bucket that takes "
            "no writes. A trainer that is lost now goes back to the newest version that is stored.",
            "Make room on the volume, or let the bucket be written to. The next version that is due is stored then. "
            "The trainer's log says what the store answered: `checkpoint_failed`.",
            "False",
        ),
    },
    FINISHED: {
        "Succeeded": Judgement(
            "One of `stop` holds; the message says which, and the mean return.", "Fetch the weights.", "True"
        ),
        "ConfigurationError": Judgement(
            "A worker cannot run as the experiment is written, however often it is started: an environment that is not "
            "in the image, a network that does not fit it, a module that is missing. The message names the pod and "
            "says what is wrong.",
            "Mend the spec or the image, delete the experiment, apply it anew.",
            "True",
        ),
        "BudgetExhausted": Judgement(
            "More failures than `restarts.budget`, not counting those that `restarts.decaySeconds` let be forgotten. "
            "The message has the last one.",
            "Read the trainers' logs. Mend it, or allow for more; delete the experiment, apply it anew.",
            "True",
        ),
    },
}
"""By condition."""
QUIET: frozenset[str] = frozenset(
    {"Accepted", "Ready", "Queued", "Starting", "Complete", "Stored", "Suspended", "Finished", "Succeeded"}
)
"""The reasons that call for nobody."""

_NO_IMAGE = Explanation(
    "The node does not get the image.",
    "Check `images` in the chart's values: registry, tag, digest; and that the Secrets of `images.pullSecrets` are in "
    "this namespace.",
)
_NOT_MADE = Explanation(
    "The node could not make or start the container.",
    "`kubectl describe pod`; often the node's disk or the image's command.",
)
POD_REASONS: Mapping[str, Explanation] = {
    "ErrImagePull": _NO_IMAGE,
    "ImagePullBackOff": _NO_IMAGE,
    "ErrImageNeverPull": Explanation(
        "`images.pullPolicy` is Never, and the node does not have the image.", "Load it on every node."
    ),
    "InvalidImageName": Explanation("The image's name is none.", "Check `images` in the chart's values."),
    "CrashLoopBackOff": Explanation(
        "The worker ends again and again; its last words are in the message.",
        "Read its log, also the one of the time before: `kubectl logs POD --previous`.",
    ),
    "CreateContainerConfigError": Explanation(
        "The container cannot be made: a Secret that it names is not there (`credentialsSecret`), or the image's user "
        "is root.",
        "Make the Secret; let the image run as a user of its own.",
    ),
    "CreateContainerError": _NOT_MADE,
    "RunContainerError": _NOT_MADE,
    "SchedulingGated": Explanation("Something else, a queue for instance, holds the pod back.", "Look there."),
}
"""The usual ones of Kubernetes' own words under ``Ready``."""
ENDS: Mapping[str, Explanation] = {
    "OOMKilled": Explanation(
        "The container used more memory than its limit.",
        "Raise `roles.ROLE.resources` in the chart's values, or let a pod hold less: fewer environments an actor, a "
        "smaller batch.",
    ),
    "Error": Explanation(
        "The worker failed; its last words are beside it. Exit code 2 is a configuration that cannot work, 137 a kill, "
        "143 an end that was asked for.",
        "Read its log: `kubectl rlsrl logs NAME --previous`.",
    ),
    "ContainerStatusUnknown": Explanation(
        "The node went away with the container.", "Look at the node: `kubectl describe node`."
    ),
}
"""How containers end that did not end well, in Kubernetes' words."""
CLAIM_PENDING = Explanation(
    "The volume is not there yet.",
    "Its events say why: there is no default StorageClass, or nothing that makes volumes of that one; "
    "`parameters.store.filesystem.storageClassName` chooses another.",
)
"""Of a volume's claim that is not bound."""
_OTHER_POD_REASON = Explanation("Kubernetes' own word for why the pod does not run.", "`kubectl describe pod`.")


def explain(condition_type: str, reason: str) -> Explanation:
    """What a condition's reason means; of Kubernetes' own words that are not in the table, where to look."""
    own: dict[tuple[str, str], Explanation] = {
        (name, word): said for name, reasons in REASONS.items() for word, said in reasons.items()
    }
    return own.get((condition_type, reason)) or POD_REASONS.get(reason) or _OTHER_POD_REASON


def is_trouble(reason: str) -> bool:
    """Whether somebody should look at it."""
    return reason not in QUIET
