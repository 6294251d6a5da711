"""Decide whether a failed experiment is tried again, and with which status. Pure.

A user asks for it by an annotation (``rlsrl.api.retry``) or by an edit of the spec. The next attempt begins when all
pods of the failed one are gone, the coordinator's too: an old coordinator would hand out its own roster and weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from rlsrl.api.reasons import DURABLE, ENVIRONMENT_SERVER_AWAY, FACTS, FINISHED, GANG_COMPLETE
from rlsrl.api.retry import FRESH_ANNOTATION, RETRY_ANNOTATION
from rlsrl.api.status import Condition, ExperimentStatus
from rlsrl_operator import status as statuses
from rlsrl_operator.manifests.context import ExperimentContext
from rlsrl_operator.manifests.types import Manifest


@dataclass(frozen=True, kw_only=True)
class Retry:
    """A request to try a failed experiment again."""

    cause: str
    """How the user asked for it."""
    is_fresh: bool = False
    """Whether training begins from step 0. Otherwise it continues from the newest intact version."""


def requested_retry(
    status: ExperimentStatus, document: Manifest, context: ExperimentContext, *, is_edit_accepted: bool
) -> Retry | None:
    """Return the user's request, or None. A suspended experiment waits until it is resumed, which is an edit.

    Args:
        status: the status with its attempt and phase.
        document: the experiment, with its annotations.
        context: the experiment that runs.
        is_edit_accepted: whether ``context`` has every edit of the document.
    """
    if status.phase != "Failed" or context.experiment.spec.suspend:
        return None
    annotations, failed = document["metadata"].get("annotations", {}), str(status.attempt)
    if annotations.get(FRESH_ANNOTATION) == failed:
        return Retry(cause="kubectl rlsrl retry --fresh", is_fresh=True)
    if annotations.get(RETRY_ANNOTATION) == failed:
        return Retry(cause="kubectl rlsrl retry")
    finished = statuses.condition(status, FINISHED)
    generation = None if finished is None else finished.observed_generation
    is_edited = generation is not None and generation < context.generation
    return Retry(cause="the spec was edited") if is_edited and is_edit_accepted else None


def begin_retry(status: ExperimentStatus, retry: Retry, context: ExperimentContext, now: datetime) -> ExperimentStatus:
    """Return the status of the next attempt, with a whole restart budget. ``context`` is that of the failed attempt."""
    failed = status.attempt or 1
    attempt = failed + 1
    if retry.is_fresh:
        message = f"attempt {attempt} begins from step 0 ({retry.cause}); {_place(context)} keeps all earlier versions"
    else:
        message = f"attempt {attempt} continues attempt {failed} ({retry.cause})"
    begun = status.model_copy(
        update={
            "phase": "Queued" if context.queue else "Starting",
            "attempt": attempt,
            "first_attempt": attempt,
            "fresh_attempt": attempt if retry.is_fresh else status.fresh_attempt,
            "recent_failures": None,
            "last_failure_at": None,
            "last_failure": None,
            "finished_at": None,
            **({"training": None, "conditions": _of_any_run(status)} if retry.is_fresh else {}),
        }
    )
    generation = context.generation
    begun = statuses.with_condition(begun, FINISHED, "False", "Retried", message, generation=generation, now=now)
    return statuses.with_condition(begun, GANG_COMPLETE, "False", "Starting", message, generation=generation, now=now)


def _of_any_run(status: ExperimentStatus) -> tuple[Condition, ...]:
    """Return the conditions that are not about the versions or the environments of one run."""
    of_one_run = {DURABLE, ENVIRONMENT_SERVER_AWAY, *FACTS}
    return tuple(each for each in status.conditions if each.type not in of_one_run)


def _place(context: ExperimentContext) -> str:
    """Return where the versions of the failed attempt are."""
    coordinator = context.configs.coordinator
    if (bucket := coordinator.parameter_store.object_store) is not None:
        return bucket.url
    return f"the folder {coordinator.record_folder} of volume {context.name_of('data')}"
