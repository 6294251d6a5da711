"""Build the status from the status before, the pods and the time, and the Events about its changes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

from rlsrl.api.pods import CONTAINER, ROLE_LABEL, disruption, is_ready, terminations, unready_since
from rlsrl.api.reasons import (
    ACCEPTED,
    DURABLE,
    ENVIRONMENT_ERRORS,
    ENVIRONMENT_SERVER_AWAY,
    FACTS,
    GANG_COMPLETE,
    NON_FINITE_VALUES,
    PROGRESSING,
    READY,
    RESUMED,
    ROLLED_BACK,
    VOLUME_INTACT,
    AcceptedReason,
    ConditionType,
    DurableReason,
    PodReason,
    ProgressReason,
    ReadyReason,
    Reason,
    VolumeReason,
    is_trouble,
)
from rlsrl.api.role_names import COORDINATOR, TRAINER
from rlsrl.api.spec import API_VERSION, KIND
from rlsrl.api.spec.environment import MAX_INFO_KEY_LENGTH, MAX_INFO_KEYS
from rlsrl.api.status import (
    TERMINAL,
    Condition,
    EpisodeInfo,
    ExperimentStatus,
    Phase,
    RoleStatus,
    Training,
    return_text,
)
from rlsrl_operator.gang import attempt_of, parse_time
from rlsrl_operator.manifests.context import MANAGER, ExperimentContext
from rlsrl_operator.manifests.kueue import is_gated
from rlsrl_operator.manifests.pods import TLS_KEYS
from rlsrl_operator.manifests.servers import NO_RULE, ServerRule
from rlsrl_operator.manifests.types import Manifest, digest
from rlsrl_operator.roles import is_queued, roles_of

_PODLESS_PHASES: tuple[Phase, ...] = (*TERMINAL, "Suspended")
FIRST_NUMBERS_SECONDS = 2.0
"""Shortest time between two looks for a run's first numbers: a short run may be over before the first status period."""
_MESSAGE_LENGTH = 1024
_MAX_NUMBER = 1e15
"""Larger numbers do not fit the schema of the status."""
_MAX_VERSION_LENGTH = 64
_IS_BEING_DELETED = " is being deleted"
_LONG_CALL_SECONDS = 60.0
"""Duration from which a call of an environment is in the condition Progressing."""
_REST: Mapping[Phase, tuple[ProgressReason, str]] = {
    "Queued": ("Queued", "the trainers wait for their queue"),
    "Starting": ("Starting", "the trainers are starting"),
    "Suspended": ("Suspended", "the experiment is suspended"),
    "Succeeded": ("Finished", "the experiment has finished"),
    "Failed": ("Finished", "the experiment has finished"),
}
"""The reason and the message of the condition Progressing in phases in which no steps are taken."""
_STEADY = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of a waiting container that need no attention."""


def read(document: Mapping[str, Any]) -> ExperimentStatus:
    """Return the status of an experiment; an empty status if it has none."""
    return ExperimentStatus.model_validate(document.get("status") or {}, by_alias=True, by_name=False)


def write(status: ExperimentStatus) -> dict[str, Any]:
    """Return the status as JSON for the API server."""
    written: dict[str, Any] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return written


def stamp(now: datetime) -> str:
    """Return a time as Kubernetes writes it."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(status: ExperimentStatus, name: str) -> Condition | None:
    """Return the condition of that type, or None."""
    return next((each for each in status.conditions if each.type == name), None)


def with_condition(
    status: ExperimentStatus,
    name: ConditionType,
    holds: Literal["True", "False", "Unknown"],
    reason: Reason | PodReason,
    message: str,
    *,
    generation: int,
    now: datetime,
) -> ExperimentStatus:
    """Return the status with one condition replaced. Its transition time changes only if ``holds`` changes."""
    before = condition(status, name)
    same = before is not None and before.status == holds
    made = Condition(
        type=name,
        status=holds,
        reason=reason,
        message=message[:_MESSAGE_LENGTH],
        last_transition_time=before.last_transition_time if same and before is not None else stamp(now),
        observed_generation=generation,
    )
    others = [each for each in status.conditions if each.type != name]
    return status.model_copy(update={"conditions": tuple(sorted([*others, made], key=lambda each: each.type))})


def failures(status: ExperimentStatus, *, decay_seconds: float, now: datetime) -> tuple[int, datetime]:
    """Return the failures that still count, and when the count last changed.

    The count falls by one each ``decay_seconds`` since then. A new failure restarts these seconds.
    """
    count = status.recent_failures or 0
    since = parse_time(status.last_failure_at) if status.last_failure_at is not None else now
    # The clock that wrote it may be ahead of this one.
    elapsed = max(0.0, (now - since).total_seconds())
    forgotten = int(min(count, elapsed // decay_seconds))
    return count - forgotten, since + timedelta(seconds=forgotten * decay_seconds)


def with_numbers(
    status: ExperimentStatus, reported: Mapping[str, Any], *, generation: int, now: datetime
) -> ExperimentStatus:
    """Return the status with the run's numbers from the coordinator's ``/status``, and with the conditions that follow
    from it: Progressing and Durable if it says whether steps are taken and versions are stored, Resumed if training
    resumed, RolledBack if it did so from an older version than the newest, EnvironmentErrors if environments raised,
    NonFiniteValues if they gave NaN or infinity, EnvironmentServerAway if they wait for their server.

    While the experiment starts, its numbers stay, and only an environment that hangs or waits is reported.
    """
    status = _with_server(status, reported, generation=generation, now=now)
    if status.phase == "Starting":
        return _with_hanging_start(status, reported, generation=generation, now=now)
    totals = reported.get("totals")
    totals = totals if isinstance(totals, dict) else {}
    status = status.model_copy(update={"training": training(totals, now)})
    if "stall" in reported:
        status = with_condition(status, PROGRESSING, *_progress(reported), generation=generation, now=now)
    if (message := _environment_errors(reported)) is not None:
        status = with_condition(
            status, ENVIRONMENT_ERRORS, "True", "MadeAgain", message, generation=generation, now=now
        )
    if (message := _non_finite_values(reported)) is not None:
        status = with_condition(status, NON_FINITE_VALUES, "True", "Dropped", message, generation=generation, now=now)
    rollback = totals.get("rollback")
    if isinstance(rollback, str) and rollback:
        status = with_condition(status, ROLLED_BACK, "True", "OlderVersion", rollback, generation=generation, now=now)
    status = _with_resumption(status, reported, generation=generation, now=now)
    if (judged := _durability(totals, reported)) is not None:
        status = with_condition(status, DURABLE, *judged, generation=generation, now=now)
    return status


def _with_resumption(
    status: ExperimentStatus, reported: Mapping[str, Any], *, generation: int, now: datetime
) -> ExperimentStatus:
    """Return the status with the condition Resumed, if the present attempt has resumed from a stored version.

    The cause is what ``lifecycle`` said at the end of the attempt before. A coordinator that was restarted since then
    no longer knows what was lost.
    """
    found, before = reported.get("resumption"), condition(status, RESUMED)
    if not isinstance(found, dict) or found.get("attempt") != status.attempt:
        return status
    text = found.get("text")
    if not isinstance(text, str) or (before is None and found.get("version") is None):
        return status  # The experiment has just begun.
    if before is not None and before.message.startswith(text):
        return status
    cause = "" if before is None or before.status == "True" else f"; {before.message}"
    return with_condition(status, RESUMED, "True", "NextAttempt", text + cause, generation=generation, now=now)


def _durability(
    totals: Mapping[str, Any], reported: Mapping[str, Any]
) -> tuple[Literal["True", "False"], DurableReason, str] | None:
    """Return the status, the reason and the message of the condition Durable; None if the coordinator does not say.

    The worst failure gives the reason, and the message has all of them.
    """
    unstored = _number(totals, "unstored_versions")
    if unstored is None:
        return None
    found: list[tuple[DurableReason, str]] = []
    if unstored >= 1:
        reason = totals.get("unstored_reason")
        why = reason if isinstance(reason, str) else "the trainer's log has the error"
        found.append(("NotStored", f"the last {unstored:.0f} scheduled versions could not be stored: {why}"))
    elif isinstance(late := totals.get("late_version"), str) and late:
        found.append(("StoredLate", f"the store is slow: {late}"))
    if (failed := _counted(reported, "failed_evaluations")) is not None:
        number, last = failed
        found.append(("EvaluationsFailed", f"the newest {number:.0f} evaluations failed, the last of {last}"))
    if not found:
        return "True", "Stored", "versions are stored as scheduled"
    return "False", found[0][0], "; ".join(text for _, text in found)


def _progress(reported: Mapping[str, Any]) -> tuple[Literal["True", "False"], ProgressReason, str]:
    """Return the status, the reason and the message of the condition Progressing."""
    paused = reported.get("paused")
    paused_text = str(paused.get("text")) if isinstance(paused, dict) else None
    if reported.get("phase") == "paused":
        return "False", "Paused", paused_text or "workers are paused"
    stall = reported["stall"]
    if isinstance(stall, dict) and (seconds := _number(stall, "seconds")) is not None:
        reasons = stall.get("reasons")
        texts = [each for each in reasons if isinstance(each, str)] if isinstance(reasons, list) else []
        message = f"no environment step and no training step for {seconds:.0f} s"
        return "False", "Stalled", f"{message}: {'; '.join(texts)}" if texts else message
    if (text := _long_call(reported)) is not None:
        return "True", "LongCall", f"training goes on; {text}"
    return "True", "Progressing", f"steps are taken; {paused_text}" if paused_text else "steps are taken"


def _long_call(reported: Mapping[str, Any]) -> str | None:
    """Return a text about the call of an environment that has lasted longest, if it is long; else None."""
    calls = reported.get("environment_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and (_number(call, "seconds") or 0.0) > _LONG_CALL_SECONDS:
            return str(call.get("text"))
    return None


def _with_hanging_start(
    status: ExperimentStatus, reported: Mapping[str, Any], *, generation: int, now: datetime
) -> ExperimentStatus:
    """Return the status of a starting experiment, with the condition Progressing if an environment holds it up.

    Trainers are not ready before they have made an environment, so its making may hang without a running phase.
    """
    if isinstance(reported.get("stall"), dict) and _long_call(reported) is not None:
        return with_condition(status, PROGRESSING, *_progress(reported), generation=generation, now=now)
    before = condition(status, PROGRESSING)
    if before is None or before.reason != "Stalled":
        return status
    return with_condition(status, PROGRESSING, "False", *_REST["Starting"], generation=generation, now=now)


def _with_server(
    status: ExperimentStatus, reported: Mapping[str, Any], *, generation: int, now: datetime
) -> ExperimentStatus:
    """Return the status with the condition EnvironmentServerAway, once environments have waited for their server."""
    waits = reported.get("server_waits")
    text = waits.get("text") if isinstance(waits, dict) else None
    if isinstance(text, str):
        return with_condition(
            status, ENVIRONMENT_SERVER_AWAY, "True", "ServerAway", text, generation=generation, now=now
        )
    return _without_waits(status, generation=generation, now=now)


def _without_waits(status: ExperimentStatus, *, generation: int, now: datetime) -> ExperimentStatus:
    """Return the status of an experiment of which no environment waits for a server."""
    before = condition(status, ENVIRONMENT_SERVER_AWAY)
    if before is None or before.status == "False":
        return status
    message = "no environment waits for its server"
    return with_condition(
        status, ENVIRONMENT_SERVER_AWAY, "False", "NoneWaits", message, generation=generation, now=now
    )


def _environment_errors(reported: Mapping[str, Any]) -> str | None:
    """Return the message of the condition EnvironmentErrors, or None without errors."""
    if (found := _counted(reported, "environment_errors")) is None:
        return None
    number, last = found
    total = "1 error" if number == 1 else f"{number:.0f} errors"
    return (
        f"{total} of environments since their actors started; each environment was made again, and training goes on; "
        f"the last of {last}"
    )


def _non_finite_values(reported: Mapping[str, Any]) -> str | None:
    """Return the message of the condition NonFiniteValues, or None without such values."""
    if (found := _counted(reported, "non_finite_steps")) is None:
        return None
    number, last = found
    total = "1 step or reset" if number == 1 else f"{number:.0f} steps or resets"
    return (
        f"NaN or infinity in {total} of environments since their actors started; none of them is "
        f"trained, and training goes on; the last of {last}"
    )


def _counted(reported: Mapping[str, Any], name: str) -> tuple[float, str] | None:
    """Return how many failures of that name the workers report, and a text about the last; None without a failure."""
    found = reported.get(name)
    if not isinstance(found, dict) or not (number := _number(found, "number") or 0.0):
        return None
    last = found.get("last")
    return number, last if isinstance(last, str) else "a worker; its log has the error"


def _at_rest(status: ExperimentStatus, *, generation: int, now: datetime) -> ExperimentStatus:
    """Return the status of an experiment that has taken steps, and takes none in its present phase."""
    if status.phase in _PODLESS_PHASES:
        status = _without_waits(status, generation=generation, now=now)
    if status.phase is None or status.phase not in _REST or condition(status, PROGRESSING) is None:
        return status
    status = with_condition(status, PROGRESSING, "False", *_REST[status.phase], generation=generation, now=now)
    if status.training is None or status.phase in TERMINAL:
        return status
    still = status.training.model_copy(update={"env_steps_per_second": 0})
    return status.model_copy(update={"training": still})


def with_claim(
    status: ExperimentStatus, name: str, claim: Manifest | None, *, generation: int, now: datetime
) -> ExperimentStatus:
    """Return the status with the condition VolumeIntact, if the experiment's volume claim is or was being deleted.

    ``claim`` is the claim with that name, or None if this pass creates it. Before the run has numbers, nothing is lost.
    """
    before = condition(status, VOLUME_INTACT)
    since = None if claim is None else claim["metadata"].get("deletionTimestamp")
    if since is not None:
        message = f"PersistentVolumeClaim {name} is being deleted since {since}: its volume ends with the coordinator"
        return with_condition(status, VOLUME_INTACT, "False", "ClaimDeleting", message, generation=generation, now=now)
    is_lost = claim is None or (before is not None and before.reason == "ClaimDeleting")
    if not is_lost or status.training is None:
        return status
    lost = f"version {status.training.version} after {status.training.train_steps} training steps, and all before"
    message = f"PersistentVolumeClaim {name} was deleted with what it held at {stamp(now)}: {lost}"
    return with_condition(status, VOLUME_INTACT, "False", "ClaimReplaced", message, generation=generation, now=now)


def with_shard_claims(
    status: ExperimentStatus, deleted: Sequence[str], *, generation: int, now: datetime
) -> ExperimentStatus:
    """Return the status with the condition VolumeIntact, if claims of buffer workers are or were being deleted.

    ``deleted`` names those that are. What ``with_claim`` reports of the weights stays.
    """
    before = condition(status, VOLUME_INTACT)
    if before is not None and not before.reason.startswith("ShardClaim"):
        return status
    reason: VolumeReason
    if deleted:
        reason, message = "ShardClaimDeleting", f"PersistentVolumeClaim {', '.join(deleted)}{_IS_BEING_DELETED}"
    elif before is not None and before.reason == "ShardClaimDeleting":
        claims = before.message.removesuffix(_IS_BEING_DELETED)
        reason, message = "ShardClaimReplaced", f"{claims} was deleted with what it held by {stamp(now)}"
    else:
        return status
    return with_condition(status, VOLUME_INTACT, "False", reason, message, generation=generation, now=now)


def has_numbers(status: ExperimentStatus) -> bool:
    """Return whether the status has the run's first numbers."""
    training = status.training
    return training is not None and bool(training.env_steps) and bool(training.env_steps_per_second)


def seconds_to_next_look(status: ExperimentStatus, looked_at: datetime, status_seconds: float) -> float:
    """Return how long after a look at the run's numbers the next one is due: ``status_seconds`` at most.

    The first numbers are looked for more often: after 2 seconds, and then as late as the trainers have been ready.
    """
    complete = condition(status, GANG_COMPLETE)
    if status.phase != "Running" or complete is None or complete.status != "True" or has_numbers(status):
        return status_seconds
    since = (looked_at - parse_time(complete.last_transition_time)).total_seconds()
    return min(status_seconds, max(FIRST_NUMBERS_SECONDS, since))


def events(document: Manifest, before: ExperimentStatus, after: ExperimentStatus, now: datetime) -> Iterator[Manifest]:
    """Yield an Event for each condition with a new status or reason, except facts that do not hold. Equal changes give
    Events of the same name, so that an Event that exists is not posted again.
    """
    metadata, posted_at = document["metadata"], stamp(now)
    about = {"apiVersion": API_VERSION, "kind": KIND, **{name: metadata[name] for name in ("name", "namespace", "uid")}}
    for each in after.conditions:
        was = condition(before, each.type)
        if was is not None and (was.status, was.reason) == (each.status, each.reason):
            continue
        if each.type in FACTS and each.status == "False":
            continue
        mark = digest([metadata["uid"], each.type, each.reason, each.last_transition_time])[:16]
        yield {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{mark}", "namespace": metadata["namespace"]},
            "involvedObject": about,
            "type": "Warning" if is_trouble(each.reason) else "Normal",
            "reason": each.reason,
            "message": each.message,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "firstTimestamp": posted_at,
            "lastTimestamp": posted_at,
            "count": 1,
        }


def training(totals: Mapping[str, Any], now: datetime) -> Training:
    """Return the run's numbers. A number that is missing or no number is None."""

    def whole(name: str) -> int | None:
        return None if (value := _number(totals, name)) is None else max(0, round(value))

    version = totals.get("version")
    returns, lengths = _number(totals, "return_mean"), _number(totals, "length_mean")
    return Training(
        env_steps=whole("env_steps"),
        train_steps=whole("train_steps"),
        env_steps_per_second=whole("env_steps_per_second"),
        version=version if isinstance(version, str) and len(version) <= _MAX_VERSION_LENGTH else None,
        policy_lag=whole("policy_lag"),
        return_mean=None if returns is None else return_text(returns),
        length_mean=None if lengths is None else f"{lengths:.1f}",
        episode_info=_episode_info(totals.get("episode_info")) or None,
        updated_at=stamp(now),
    )


def _episode_info(found: Any) -> tuple[EpisodeInfo, ...]:
    statistics = list(found.items()) if isinstance(found, dict) else []
    return tuple(
        EpisodeInfo(
            key=key,
            mean=None if (mean := _number(values, "mean")) is None else f"{mean:.4g}",
            count=max(0, round(_number(values, "count") or 0)),
        )
        for key, values in statistics[:MAX_INFO_KEYS]
        if len(key) <= MAX_INFO_KEY_LENGTH and isinstance(values, dict)
    )


def _number(totals: Mapping[str, Any], name: str) -> float | None:
    """Return one of the totals, or None if it is not a number: workers run users' code."""
    value = totals.get(name)
    return value if isinstance(value, int | float) and abs(value) < _MAX_NUMBER else None


def outcome(before: Training | None, record: Mapping[str, Any] | None, now: datetime) -> tuple[Training | None, str]:
    """Return the final numbers and the message of Finished, from the run's terminal record if there is one."""
    result = (record or {}).get("result")
    if record is None or not isinstance(result, dict):
        return before, "the experiment has finished"
    final = training({**result, "version": record.get("version")}, now)
    known = {name: value for name, value in final if value is not None}
    merged = final if before is None else before.model_copy(update=known)
    return (
        merged,
        f"stop.{record.get('reason')} holds: mean return {merged.return_mean} after {merged.env_steps} transitions",
    )


def failure(record: Mapping[str, Any] | None) -> str | None:
    """Return why the run failed, from its terminal record; None if a criterion of ``stop`` ended it."""
    text = (record or {}).get("failure")
    return text if isinstance(text, str) else None


def summarize(
    status: ExperimentStatus,
    context: ExperimentContext,
    pods: Sequence[Manifest],
    now: datetime,
    *,
    failed_create: str | None = None,
    refused_edits: Sequence[str] = (),
    disallowed: Sequence[str] = (),
    server: ServerRule = NO_RULE,
) -> ExperimentStatus:
    """Return the status with what the pods show, given the attempt and the phase that were decided.

    Args:
        status: the status with its attempt and phase.
        context: the experiment that runs.
        pods: the experiment's pods, of all attempts.
        now: the present time.
        failed_create: why pods cannot be created, if they cannot.
        refused_edits: fields of the document that were edited and must not be.
        disallowed: what the administrator does not allow of the document.
        server: the network rule for the environments' server.
    """
    generation, before = context.generation, status
    counts = _role_counts(status, context, pods)
    status = with_condition(
        status, ACCEPTED, *_accepted(refused_edits, disallowed, server), generation=generation, now=now
    )
    holds, reason, message = _readiness(status, context, pods, counts, failed_create)
    status = with_condition(status, READY, holds, reason, message, generation=generation, now=now)
    complete = condition(status, GANG_COMPLETE)
    phase = status.phase
    if phase not in _PODLESS_PHASES and phase != "Queued":
        phase = "Running" if complete is not None and complete.status == "True" else "Starting"
    status = status.model_copy(
        update={
            "phase": phase,
            "observed_generation": generation,
            "actors": counts["actor"],
            "trainers": counts[TRAINER],
        }
    )
    progress = condition(before, PROGRESSING)
    if before.phase == phase == "Starting" and progress is not None and progress.reason == "Stalled":
        return status  # An environment hangs: ``with_numbers`` has reported it, and reports its end.
    return _at_rest(status, generation=generation, now=now)


def _role_counts(
    status: ExperimentStatus, context: ExperimentContext, pods: Sequence[Manifest]
) -> dict[str, RoleStatus]:
    """Return the pods of each role: how many should exist in this phase, and how many are ready."""
    counts = {}
    for role in roles_of(context.configs):
        is_absent = (
            status.phase == "Suspended"
            or (status.phase == "Queued" and not is_queued(role))
            or (status.phase in TERMINAL and role.name != COORDINATOR)
        )
        replicas = 0 if is_absent else role.num_pods(context.experiment.spec)
        num_ready = sum(is_ready(pod) for pod in pods if pod["metadata"]["labels"][ROLE_LABEL] == role.name)
        labels = sorted(context.selector(role.name).items())
        counts[role.name] = RoleStatus(
            replicas=replicas,
            ready=min(replicas, num_ready),
            selector=",".join(f"{name}={value}" for name, value in labels),
        )
    return counts


def _readiness(
    status: ExperimentStatus,
    context: ExperimentContext,
    pods: Sequence[Manifest],
    counts: Mapping[str, RoleStatus],
    failed_create: str | None,
) -> tuple[Literal["True", "False"], ReadyReason | PodReason, str]:
    """Return the status, the reason and the message of the condition Ready."""
    if status.phase == "Suspended":
        return "False", "Suspended", f"{len(pods)} pods are terminating" if pods else "no pod is left"
    if status.phase in TERMINAL:
        return "False", "Finished", "the experiment has finished"
    if status.phase == "Queued":
        message = f"queue {context.queue} has not admitted the trainers"
        return "False", "Queued", message if failed_create is None else f"{message}: {failed_create}"
    missing = [f"{name} {each.ready}/{each.replicas}" for name, each in counts.items() if each.ready < each.replicas]
    if not missing:
        return "True", "Ready", "every pod is ready"
    reason, message = blocker(pods, attempt=status.attempt or 1) or ("Starting", "pods are being created")
    if reason == "Starting" and failed_create is not None:
        reason, message = "FailedCreate", failed_create
    elif reason == "Starting" and (secret := context.experiment.spec.security.tls_secret) is not None:
        # A missing Secret shows only in the events of the pod.
        message += f"; pods wait for a Secret {secret} with the keys {', '.join(TLS_KEYS)}"
    return "False", reason, f"{', '.join(missing)} ready: {message}"


def _accepted(
    refused_edits: Sequence[str], disallowed: Sequence[str], server: ServerRule
) -> tuple[Literal["True", "False"], AcceptedReason, str]:
    if disallowed:
        return "False", "InvalidSpec", "\n".join(disallowed)
    if refused_edits:
        fields = ", ".join(refused_edits)
        cure = "take the edit back, or apply the new experiment under another name"
        return "False", "EditRefused", f"{fields} cannot be edited: {cure}"
    if server.fault:
        return "False", server.reason, server.fault
    return "True", "Accepted", "every object matches the spec"


def replica_failure(deployment: Manifest) -> str | None:
    """Return why a Deployment cannot create its pods, or None."""
    for each in deployment.get("status", {}).get("conditions", ()):
        if each["type"] == "ReplicaFailure" and each["status"] == "True":
            return str(each.get("message", ""))
    return None


def blocker(pods: Sequence[Manifest], *, attempt: int) -> tuple[ReadyReason | PodReason, str] | None:
    """Return reason and message of the pod that most needs attention, or None if every pod is ready."""
    blocking = [found for pod in pods if (found := _blocking(pod, attempt)) is not None]
    return min(blocking, key=lambda each: each[0] == "Starting", default=None)


def _blocking(pod: Manifest, attempt: int) -> tuple[ReadyReason | PodReason, str] | None:
    if is_ready(pod):
        return None
    name, status = pod["metadata"]["name"], pod.get("status", {})
    since = pod["metadata"].get("creationTimestamp", "")
    if attempt_of(pod) not in (0, attempt):
        return "Starting", f"{name} of attempt {attempt_of(pod)} is terminating"
    if is_gated(pod):
        return "Queued", f"{name} has waited for its queue since {since}"
    if (cause := disruption(pod)) is not None:
        return "Starting", f"{name} {cause}"
    for each in status.get("conditions", ()):
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return _reason_of(each, "Unschedulable"), f"{name}, since {since}: {each.get('message', '')}"
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting")
        if container["name"] == CONTAINER and waiting and waiting.get("reason") not in _STEADY:
            ended = terminations(pod)
            lines = (ended[0].get("message") or "").strip().splitlines() if ended else []
            text = lines[-1] if lines else waiting.get("message", "")
            return _reason_of(waiting, "Waiting"), f"{name}, since {since}: {text}"
    if failed := [each for each in terminations(pod) if each.get("exitCode")]:
        lines = (failed[0].get("message") or "").strip().splitlines()
        end = f"{failed[0].get('reason') or 'Error'}, exit code {failed[0]['exitCode']}"
        return "Restarting", f"{name} ended: {end}{f': {lines[-1]}' if lines else ''}"
    if "deletionTimestamp" in pod["metadata"]:
        return "Starting", f"{name} is terminating"
    if _has_started(pod) and (unready := unready_since(pod)) is not None:
        return "Starting", f"{name} runs, and has not been ready since {unready}"
    return "Starting", f"{name} has been starting since {since}"


def _has_started(pod: Manifest) -> bool:
    """Return whether the worker runs and has passed its startup probe."""
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return any(container["name"] == CONTAINER and container.get("started") for container in statuses)


def _reason_of(state: Manifest, otherwise: ReadyReason) -> ReadyReason | PodReason:
    """Return Kubernetes' reason for a pod's state, or ``otherwise`` if it gives none."""
    return PodReason(state["reason"]) if state.get("reason") else otherwise
