"""Phases, conditions and reasons of an experiment: what each means, and what to do about it.

The operator reports them, `kubectl rlsrl why` explains them, and `make docs` generates the tables of
docs/kubernetes/operations.md from them. An Event reports each change of a condition, with the condition's reason. The
texts are Markdown, one paragraph each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, NewType

from rlsrl.api.status import Phase

ConditionType = Literal[
    "Accepted",
    "Ready",
    "GangComplete",
    "Progressing",
    "EnvironmentServerAway",
    "EnvironmentErrors",
    "NonFiniteValues",
    "Durable",
    "Resumed",
    "RolledBack",
    "VolumeIntact",
    "Finished",
]
"""The types of conditions."""
ACCEPTED: Final = "Accepted"
READY: Final = "Ready"
GANG_COMPLETE: Final = "GangComplete"
PROGRESSING: Final = "Progressing"
ENVIRONMENT_SERVER_AWAY: Final = "EnvironmentServerAway"
ENVIRONMENT_ERRORS: Final = "EnvironmentErrors"
NON_FINITE_VALUES: Final = "NonFiniteValues"
DURABLE: Final = "Durable"
RESUMED: Final = "Resumed"
ROLLED_BACK: Final = "RolledBack"
VOLUME_INTACT: Final = "VolumeIntact"
FINISHED: Final = "Finished"

AcceptedReason = Literal[
    "Accepted", "InvalidSpec", "ServiceUnusable", "SourceUnusable", "EditRefused", "NameConflict", "ObjectRefused"
]
EndReason = Literal[
    "Succeeded",
    "ConfigurationError",
    "EnvironmentFault",
    "RunDamaged",
    "BudgetExhausted",
    "RepeatedFailure",
    "NotStored",
    "UpdatesSkipped",
]
FinishedReason = Literal[EndReason, "Retried"]
GangReason = Literal["Starting", "Complete", "Restarting", "Suspended", "Finished"]
ProgressReason = Literal["Progressing", "LongCall", "Stalled", "Paused", "Starting", "Queued", "Suspended", "Finished"]
EnvironmentServerReason = Literal["ServerAway", "NoneWaits"]
EnvironmentErrorsReason = Literal["MadeAgain"]
NonFiniteReason = Literal["Dropped"]
DurableReason = Literal["Stored", "NotStored", "StoredLate", "EvaluationsFailed"]
ResumedReason = Literal["Restarting", "NextAttempt"]
RollbackReason = Literal["OlderVersion"]
VolumeReason = Literal["ClaimDeleting", "ClaimReplaced", "ShardClaimDeleting", "ShardClaimReplaced"]
ReadyReason = Literal[
    "Ready",
    "Starting",
    "Restarting",
    "FailedCreate",
    "Waiting",
    "Unschedulable",
    "Queued",
    "Suspended",
    "Finished",
]
Reason = (
    AcceptedReason
    | DurableReason
    | EnvironmentErrorsReason
    | EnvironmentServerReason
    | FinishedReason
    | GangReason
    | NonFiniteReason
    | ProgressReason
    | ReadyReason
    | ResumedReason
    | RollbackReason
    | VolumeReason
)
"""Reasons that the operator gives."""
PodReason = NewType("PodReason", str)
"""Kubernetes' reason of a pod's state, reported under ``Ready``, for example ``ImagePullBackOff``."""


@dataclass(frozen=True)
class Explanation:
    """The meaning of a phase or reason."""

    meaning: str
    cure: str
    """What to do about it."""


@dataclass(frozen=True)
class Judgement(Explanation):
    """The meaning of a condition's reason."""

    status: Literal["True", "False"]
    """The status of the condition with this reason."""


UNSEEN = Explanation(
    "No operator manages the experiment, so nothing runs.",
    "Check that the operator runs (`kubectl get deployments -A -l "
    "app.kubernetes.io/name=rlsrl,app.kubernetes.io/component=operator`), and that the chart's `namespaces` includes "
    "this namespace.",
)
"""For an experiment without a status."""
STALE = Explanation(
    "The coordinator does not answer the operator, so the numbers are old.",
    "Check that its pod is ready, and that no other NetworkPolicy blocks the operator. Training may go on meanwhile.",
)
"""For numbers that are old while the experiment runs."""
PHASES: Mapping[Phase, Explanation] = {
    "Pending": Explanation(
        "The experiment is new, or it was not accepted. It has no pods.", "Look at the condition `Accepted`."
    ),
    "Queued": Explanation(
        "The trainers wait until their queue admits all of them. The other workers start after that.",
        "Nothing, if others are ahead in the queue. Otherwise look at the condition `Ready`.",
    ),
    "Starting": Explanation(
        "The objects exist, and not all trainers are ready yet: at the start, or after a restart.",
        "If it stays: look at the condition `Ready`.",
    ),
    "Running": Explanation("The trainers train.", "Nothing."),
    "Suspended": Explanation(
        "`suspend` is true. The trainers stored a version, and the pods are terminating or gone.",
        "Set `suspend` to false to continue from that version.",
    ),
    "Succeeded": Explanation(
        "The experiment has finished with a result. This is final. The coordinator keeps serving the weights until the "
        "experiment is deleted or `ttlSecondsAfterFinished` has passed.",
        "`kubectl rlsrl params export NAME -o weights.safetensors`, then delete the experiment.",
    ),
    "Failed": Explanation(
        "The experiment has ended without a result. `kubectl rlsrl params export NAME` exports versions that were "
        "stored before.",
        "Look at the condition `Finished`. After correcting the cause, `kubectl rlsrl retry NAME` continues from the "
        "newest version, and so does an edit of the spec. `kubectl rlsrl retry --fresh NAME` begins from step 0.",
    ),
}

REASONS: Mapping[ConditionType, Mapping[Reason, Judgement]] = {
    ACCEPTED: {
        "Accepted": Judgement(
            "Every object matches the spec. The operator restores objects that are edited or deleted.",
            "Nothing.",
            "True",
        ),
        "InvalidSpec": Judgement(
            "The spec is invalid, or the administrator does not allow a field of a `podTemplate`, a destination of "
            "`environment.egress` or the server of `environment.http`. The message names the field.",
            "Correct the spec. The administrator allows more by the chart's values `podTemplates` and "
            "`environments.egress`.",
            "False",
        ),
        "ServiceUnusable": Judgement(
            "No network rule follows from the Service in `environment.http.url`: the Service does not exist, has no "
            "such port or no selector, or is an ExternalName, or the operator may not read it. A new experiment does "
            "not begin. A run goes on, and its environments wait.",
            "Correct the Service: the operator looks at it again within 30 seconds. Or write a rule for the server in "
            "`environment.egress`.",
            "False",
        ),
        "SourceUnusable": Judgement(
            "The experiment in `parameters.from.experiment` does not exist or has no version yet, or its workers have "
            "certificates and those of this experiment have none. A new experiment does not begin.",
            "Create that experiment, or correct the name: the operator looks again within 30 seconds.",
            "False",
        ),
        "ObjectRefused": Judgement(
            "The API server refused an object of the experiment, because of a quota, a limit range, an admission "
            "policy or a webhook. The message names the object and has the API server's reason.",
            "Raise the quota, or change the policy or the webhook. The operator tries again every 30 seconds.",
            "False",
        ),
        "EditRefused": Judgement(
            "An edit changed a field that must not change during an experiment. The message names the field. The run "
            "continues as before the edit.",
            "Take the edit back, or apply the new experiment under another name.",
            "False",
        ),
        "NameConflict": Judgement(
            "An object with a name that the experiment needs belongs to somebody else. The operator does not touch it.",
            "Rename or delete that object, or give the experiment another name. The operator tries again every 30 "
            "seconds.",
            "False",
        ),
    },
    READY: {
        "Ready": Judgement("Every pod is ready.", "Nothing.", "True"),
        "Starting": Judgement(
            "Pods are being created or started, or they terminate to be replaced.",
            "Nothing, unless it stays. Then read the pod's log. If there is no pod, `kubectl describe` the role's "
            "Deployment or StatefulSet `NAME-ROLE`: its events say what refuses the pod.",
            "False",
        ),
        "Restarting": Judgement(
            "A worker has failed and starts again in its pod. The message has the last line of its log, for example "
            "the error of the environment.",
            "Nothing, unless it happens repeatedly. Then read its log: `kubectl rlsrl logs NAME --previous`.",
            "False",
        ),
        "FailedCreate": Judgement(
            "The API server refuses the pods of a role. The message has its reason: a quota, an admission policy, a "
            "limit range.",
            "Raise the quota or change the policy of the namespace. The pods are then created without further action.",
            "False",
        ),
        "Unschedulable": Judgement(
            "No node can run the pod. The message has the scheduler's reason: too little CPU, memory or GPUs, a taint, "
            "a node selector, a volume on another node.",
            "Add nodes, or change `resources`, `nodeSelector` or `tolerations` in the role's `podTemplate`, or of the "
            "role in the chart's values, or the experiment's replicas.",
            "False",
        ),
        "Queued": Judgement(
            "The queue of the label `kueue.x-k8s.io/queue-name` has not admitted the trainers, or has evicted them: "
            "its capacity is used by others, or the queue is stopped or does not exist.",
            "`kubectl describe workloads.kueue.x-k8s.io` in this namespace shows what is missing. The experiment "
            "continues as soon as the queue admits it.",
            "False",
        ),
        "Waiting": Judgement(
            "A container waits, and Kubernetes gives no reason.", "Look at `kubectl describe pod`.", "False"
        ),
        "Suspended": Judgement(
            "`suspend` is true. The message has the number of pods that are still terminating.",
            "Set `suspend` to false to continue.",
            "False",
        ),
        "Finished": Judgement(
            "The experiment has finished. The coordinator's pod is left, and for up to 10 minutes evaluators that play "
            "the last versions.",
            "Nothing.",
            "False",
        ),
    },
    GANG_COMPLETE: {
        "Starting": Judgement("The first attempt begins.", "Nothing.", "False"),
        "Complete": Judgement("All trainers are ready.", "Nothing.", "True"),
        "Restarting": Judgement(
            "An attempt is over. The message names the pod that ended it, and how. A failure counts as a restart and "
            "towards `restarts.budget`; a drain, an eviction, a preemption or an edit of the spec does not.",
            "Nothing, unless it happens repeatedly. Then read the log of that worker in all attempts: "
            "`kubectl rlsrl logs NAME --kept`.",
            "False",
        ),
        "Suspended": Judgement("`suspend` is true.", "Set `suspend` to false to continue.", "False"),
        "Finished": Judgement(
            "The experiment has finished, and its trainers are gone or terminating.", "Nothing.", "False"
        ),
    },
    PROGRESSING: {
        "Progressing": Judgement(
            "Environment steps and training steps are taken, or the last one was less than a minute ago.",
            "Nothing.",
            "True",
        ),
        "LongCall": Judgement(
            "Training goes on, but a call of an environment has lasted longer than a minute. The message names the "
            "environment by its rank, the call and the worker.",
            "Nothing, if the environment is meant to be so slow. Otherwise delete the worker's pod, and set "
            "`environment.stepSeconds`: a worker whose call lasts longer is then restarted.",
            "True",
        ),
        "Stalled": Judgement(
            "The experiment has taken no environment step and no training step for a minute, or for ten minutes while "
            "a worker works. If steps are rare, twice their interval counts. The message says what the workers wait "
            "for, and names environments that hang.",
            "An environment hangs: correct it, or set `environment.stepSeconds`; to go on now, delete the pod of the "
            "worker. A worker does not answer: read its log. Trainers wait for `batch`: look at the actors. Actors "
            "wait for `credit`: look at the trainers; a hanging disk stops training. Actors wait for `inference`: "
            "look at the policy workers.",
            "False",
        ),
        "Paused": Judgement(
            "Workers without which no step is taken are paused (`spec.paused`). The message names them.",
            "`kubectl rlsrl control NAME resume` lets them go on.",
            "False",
        ),
        "Starting": Judgement("The trainers are starting, at first or again.", "Nothing.", "False"),
        "Queued": Judgement("The trainers wait for their queue.", "Nothing.", "False"),
        "Suspended": Judgement("`suspend` is true.", "Set `suspend` to false to continue.", "False"),
        "Finished": Judgement("The experiment has finished.", "Nothing.", "False"),
    },
    ENVIRONMENT_SERVER_AWAY: {
        "ServerAway": Judgement(
            "Environments wait because their server (`environment.http`) does not answer. The message has their "
            "number, the time since when the first of them waits, the server's URL, and what happens when it is "
            "called. They go on by themselves once the server answers; no restart is spent.",
            "Look at the server. A time-out although it runs: no NetworkPolicy rule leads to it, so look at the "
            "condition `Accepted`, at `environment.egress`, and at NetworkPolicies of the server's namespace.",
            "True",
        ),
        "NoneWaits": Judgement("No environment waits for its server.", "Nothing.", "False"),
    },
    ENVIRONMENT_ERRORS: {
        "MadeAgain": Judgement(
            "Environments raised errors, and training goes on: each was closed and made again. The message has the "
            "number of errors, the rank of the environment that raised last, and the error.",
            "Correct the environment. `kubectl rlsrl logs NAME` has the tracebacks: `environment_fault`. An "
            "environment that raises six times ends its actor; one of its errors is forgiven every ten minutes.",
            "True",
        ),
    },
    NON_FINITE_VALUES: {
        "Dropped": Judgement(
            "Rewards or observations of environments were NaN or infinite, and training goes on without these steps: "
            "each was dropped, its episode truncated, and the environment reset. The message has the number of steps "
            "and resets, and the last value, with the rank of its environment.",
            "Correct the environment. `kubectl rlsrl logs NAME` names each environment that had such values: "
            "`environment_fault`. If no environment gives a finite step `environment.maxNonFinite` times in a row, the "
            "experiment fails.",
            "True",
        ),
    },
    DURABLE: {
        "Stored": Judgement("All scheduled versions are stored, in time.", "Nothing.", "True"),
        "NotStored": Judgement(
            "Training continues, but the last versions could not be stored, for example because a volume is full or a "
            "bucket is read-only. The message has the store's error: of a full volume also the path, and the bytes "
            "that are needed and free. A trainer that restarts now continues from the newest stored version. At the "
            "end of training, it waits for `parameters.retryLastSeconds` until its last version can be stored.",
            "Free space on the volume or enlarge its claim, or allow writes to the bucket. The newest version is then "
            "stored within ten seconds.",
            "False",
        ),
        "StoredLate": Judgement(
            "The store is slow: a version was not stored a minute after it was due, when the next one was due, too. "
            "The message names the version. If two versions are due, training waits for the store. A trainer that "
            "restarts now continues from the newest stored version.",
            "Look at the latency of the volume or the bucket, and at the coordinator's log "
            "(`kubectl rlsrl logs NAME --role coordinator`). If the store is meant to be so slow, store versions less "
            "often: `parameters.everySeconds` or `parameters.everySteps`.",
            "False",
        ),
        "EvaluationsFailed": Judgement(
            "Versions are stored, but the store failed to read or to write the last evaluations, whose results are "
            "lost. The message has their number, and the store's error for the last one. Training goes on.",
            "Free space on the volume or enlarge its claim, or allow reads and writes of the bucket. Later evaluations "
            "are then stored.",
            "False",
        ),
    },
    RESUMED: {
        "Restarting": Judgement(
            "An attempt is over, and the next one has not resumed yet. The message has the cause.", "Nothing.", "False"
        ),
        "NextAttempt": Judgement(
            "The attempt has resumed from a stored version, or begun from step 0 if there was none. The message has "
            "the version, the training steps after it that are known to be lost, and why the attempt before it ended. "
            "Training repeats the lost steps.",
            "Nothing. To lose fewer steps, store versions more often: `parameters.everySeconds` or "
            "`parameters.everySteps`.",
            "True",
        ),
    },
    ROLLED_BACK: {
        "OlderVersion": Judgement(
            "The newest version was damaged or incomplete, so training resumed from an older one. The message names "
            "both, what is wrong with the newest, and the training steps that were lost. Training repeats them.",
            "Find what damaged the version: the volume, or another writer into the bucket. "
            "`kubectl rlsrl params list NAME` marks all damaged versions.",
            "True",
        ),
    },
    VOLUME_INTACT: {
        "ClaimDeleting": Judgement(
            "The experiment's volume claim is being deleted, which cannot be undone. Kubernetes keeps the volume until "
            "the coordinator's pod ends. All stored versions disappear with the volume.",
            "Export the weights now: `kubectl rlsrl params export NAME -o weights.safetensors`. If you delete the "
            "coordinator's pod after that, the operator creates an empty claim, and training stores its next versions "
            "there.",
            "False",
        ),
        "ClaimReplaced": Judgement(
            "The experiment's volume claim was deleted, and an empty one has taken its place. The message has what was "
            "lost. Trainers that run go on and store their next version in the new volume. A restart before that "
            "leaves nothing to resume from.",
            "Nothing can bring the versions back, unless the cluster has a snapshot of the volume.",
            "False",
        ),
        "ShardClaimDeleting": Judgement(
            "A volume claim of a buffer worker is being deleted, which cannot be undone. Kubernetes keeps the volume "
            "until the pod ends. The transitions on it disappear with the volume. The weights are on another one.",
            "Nothing. Training goes on with the other buffer workers. When the pod is replaced, Kubernetes creates an "
            "empty claim, and the ledger counts the transitions as `lost.receiver_died`.",
            "False",
        ),
        "ShardClaimReplaced": Judgement(
            "A volume claim of a buffer worker was deleted with the transitions on it. The weights are on another one.",
            "Nothing. The buffer worker begins with an empty store, and training goes on.",
            "False",
        ),
    },
    FINISHED: {
        "Succeeded": Judgement(
            "A criterion of `stop` is met. The message names it, with the mean return.", "Export the weights.", "True"
        ),
        "ConfigurationError": Judgement(
            "A worker cannot run with this configuration, so no restart would help: the image lacks the environment or "
            "a module, or the network does not fit the environment. The message names the pod and the error.",
            "Correct the spec or the image; docs/kubernetes/your-own-environment.md shows how to build an image with "
            "your own modules. An edit of the spec, or `kubectl rlsrl retry NAME`, then tries the experiment again. A "
            "field that cannot be edited, such as `environment.id`, needs a new experiment: `kubectl delete rlx NAME`, "
            "and apply the corrected file.",
            "True",
        ),
        "EnvironmentFault": Judgement(
            "The environments of all actors gave only rewards or observations that are NaN or infinite, "
            "`environment.maxNonFinite` times in a row. The message names the pod, and the environment by its rank.",
            "Correct the environment. `kubectl rlsrl retry NAME` then continues from the newest version.",
            "True",
        ),
        "RunDamaged": Judgement(
            "Training cannot resume, since a file that the run has stored is damaged or missing. The message names the "
            "file. Training does not begin again from step 0 unless you ask for it.",
            "Restore the file, or remove it if the message says so, then `kubectl rlsrl retry NAME`. Or give the "
            "stored versions up: `kubectl rlsrl retry --fresh NAME` begins from step 0 and keeps the old files.",
            "True",
        ),
        "BudgetExhausted": Judgement(
            "The trainers have failed more often than `restarts.budget` allows; `restarts.decaySeconds` lets older "
            "failures expire. The message has the last failure.",
            "Read the trainers' logs (`kubectl rlsrl logs NAME --role trainer`) and correct the cause. "
            "`kubectl rlsrl retry NAME`, or an edit of the spec, then continues from the newest version with a whole "
            "budget.",
            "True",
        ),
        "RepeatedFailure": Judgement(
            "The trainers failed three times in a row with the same exception at the same place, and training got no "
            "further, so no restart would help. The message has the exception.",
            "Read the trainers' logs (`kubectl rlsrl logs NAME --role trainer`) and correct the cause. "
            "`kubectl rlsrl retry NAME`, or an edit of the spec, then continues from the newest version.",
            "True",
        ),
        "NotStored": Judgement(
            "The last version could not be stored within `parameters.retryLastSeconds`, or the first one at all. The "
            "message has the path and the bytes that are needed and free. The training since the newest stored version "
            "is lost.",
            "Free space on the volume or enlarge its claim, or allow writes to the bucket. `kubectl rlsrl retry NAME` "
            "then continues from the newest stored version.",
            "True",
        ),
        "Retried": Judgement(
            "The experiment had failed and is tried again, with a whole restart budget. The message says how.",
            "Nothing.",
            "False",
        ),
        "UpdatesSkipped": Judgement(
            "Training did not learn: the loss or the gradient of more than half of the last 200 minibatches was not "
            "finite. Trainers skip such minibatches. Runs with fewer than 200 minibatches are judged at their end.",
            "Look for extreme rewards and observations of the environment. `normalizeRewards`, `rewardClip` and "
            "`normalizeObservations` bound them. Or lower `learningRate`. An edit of the spec continues from the "
            "newest version, `kubectl rlsrl retry --fresh NAME` begins from step 0.",
            "True",
        ),
    },
}
"""By condition."""
FACTS: frozenset[ConditionType] = frozenset({ENVIRONMENT_ERRORS, NON_FINITE_VALUES, RESUMED, ROLLED_BACK})
"""Conditions that report, if True, what happened while training went on. They are no problems; `why` shows them below
those."""
QUIET: frozenset[str] = frozenset(
    {
        "Accepted",
        "Ready",
        "Queued",
        "Starting",
        "Complete",
        "NextAttempt",
        "NoneWaits",
        "Progressing",
        "Paused",
        "Stored",
        "Suspended",
        "Finished",
        "Succeeded",
        "Retried",
    }
)
"""Reasons that need no attention."""

_NO_IMAGE = Explanation(
    "The node cannot pull the image.",
    "Check `image` in the role's `podTemplate`, or `images` in the chart's values (registry, tag, digest), and that "
    "the Secrets of `images.pullSecrets` exist in this namespace.",
)
_NOT_CREATED = Explanation(
    "The node could not create or start the container.",
    "Look at `kubectl describe pod`. The cause is often the node's disk or the image's command.",
)
POD_REASONS: Mapping[str, Explanation] = {
    "ErrImagePull": _NO_IMAGE,
    "ImagePullBackOff": _NO_IMAGE,
    "ErrImageNeverPull": Explanation(
        "`images.pullPolicy` is Never, and the node does not have the image.", "Load the image on every node."
    ),
    "InvalidImageName": Explanation("The name of the image is invalid.", "Correct `images` in the chart's values."),
    "CrashLoopBackOff": Explanation(
        "The worker ends repeatedly. The message has the last line of its log.",
        "Read its log before the last restart: `kubectl logs POD --previous`.",
    ),
    "CreateContainerConfigError": Explanation(
        "The container cannot be created: its Secret (`credentialsSecret`) does not exist, or the image's user is "
        "root.",
        "Create the Secret, or give the image a user that is not root.",
    ),
    "CreateContainerError": _NOT_CREATED,
    "RunContainerError": _NOT_CREATED,
    "SchedulingGated": Explanation(
        "Another controller, for example a queue, holds the pod back.", "Look at that controller's objects."
    ),
}
"""The most frequent reasons of Kubernetes under ``Ready``."""
ENDS: Mapping[str, Explanation] = {
    "OOMKilled": Explanation(
        "The container used more memory than its limit.",
        "Raise the memory limit: `resources` of the worker in the role's `podTemplate`, or `resources.ROLE` in the "
        "chart's values. Or reduce the memory of a pod: fewer environments for each actor, a smaller batch or network.",
    ),
    "Error": Explanation(
        "The worker failed; the last line of its log is next to it. Exit code 2 is a configuration error, 3 an "
        "environment's fault, 4 a version that could not be stored, 5 a damaged run, 12 an environment's call that "
        "reached its limit, 75 a process or a store that could not be reached, 137 a kill, 143 a requested end.",
        "Read its log: `kubectl rlsrl logs NAME --previous`.",
    ),
    "ContainerStatusUnknown": Explanation(
        "The node was lost together with the container.", "Look at the node: `kubectl describe node`."
    ),
}
"""How containers end in failure, in Kubernetes' terms."""
EVICTED_BY_TAINT = Explanation(
    "A taint of its node evicts the pod, for example because the node does not answer. Another pod replaces it: at "
    "once, or for a trainer and the coordinator when this pod is gone. The operator removes the pod 30 seconds after "
    "its end was due.",
    "Look at the node: `kubectl describe node`.",
)
"""For a terminating pod that is evicted by a taint."""
CLAIM_PENDING = Explanation(
    "The volume does not exist yet.",
    "Look at the events of the claim: the cluster has no default StorageClass, or no provisioner for it. "
    "`parameters.store.filesystem.storageClassName`, or for a buffer worker `bufferWorkers.volume.storageClassName`, "
    "chooses another class.",
)
"""For a volume claim that is not bound."""
_OTHER_POD_REASON = Explanation("Kubernetes' reason why the pod does not run.", "Look at `kubectl describe pod`.")


def explain(condition_type: str, reason: str, message: str = "") -> Explanation:
    """Return what a condition's reason means. For unknown reasons of Kubernetes, return where to look.

    If the message says that a worker ended in one of ``ENDS`` that has a cure of its own, that cure comes first.
    """
    found = _explained(condition_type, reason)
    end = next((each for name, each in ENDS.items() if name != "Error" and f"ended: {name}," in message), None)
    if end is None:
        return found
    return Explanation(f"{found.meaning} {end.meaning}", f"{end.cure} {found.cure}")


def _explained(condition_type: str, reason: str) -> Explanation:
    own: dict[tuple[str, str], Explanation] = {
        (name, word): explanation for name, reasons in REASONS.items() for word, explanation in reasons.items()
    }
    return own.get((condition_type, reason)) or POD_REASONS.get(reason) or _OTHER_POD_REASON


def is_trouble(reason: str) -> bool:
    """Return whether the reason needs attention."""
    return reason not in QUIET
