"""One look at one experiment: observe, judge, write down what was decided, act, say how it stands.

Pods are asked for anew each time, and what is there is never taken from events, so a look that was cut short anywhere
is made good by the next. What is remembered between looks (see ``objects``) only saves calls.

An experiment of which all is as it should be is looked at when it was woken, and every ``STEADY_SECONDS`` besides.
Between, only its coordinator is asked for the run's numbers.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from rlsrl.api.edits import refused
from rlsrl.api.load import SpecError, load_text
from rlsrl.api.pods import ROLE_LABEL, TOKEN_KEY, is_driven_out, is_held_back, terminations, unready_since
from rlsrl.api.reasons import ACCEPTED, READY, AcceptedReason, is_trouble
from rlsrl.api.spec import API_VERSION, KIND, RLExperiment
from rlsrl.api.status import ExperimentStatus
from rlsrl_operator import status as statuses
from rlsrl_operator.cluster import Cluster, Refused, ResourceConflict
from rlsrl_operator.coordinator_status import CoordinatorStatus
from rlsrl_operator.drift import digest
from rlsrl_operator.gang import attempt_of, parse_time, template_of
from rlsrl_operator.informer_cache import InformerCache, NotAdmitted, NotOwned, in_the_way
from rlsrl_operator.lifecycle import decide, is_settled, overlaid
from rlsrl_operator.manifests import (
    ExperimentContext,
    Manifest,
    Revision,
    first_revision,
    is_anothers,
    next_revision,
    read_revision,
    revision_object,
    token_secret,
    volume_claim,
)
from rlsrl_operator.manifests.context import MANAGER, SETTINGS_ANNOTATION, SETTINGS_KEY
from rlsrl_operator.manifests.kueue import queue_labels
from rlsrl_operator.manifests.templates import refusals
from rlsrl_operator.operator_key import token_of
from rlsrl_operator.roles import COORDINATOR, roles_of
from rlsrl_operator.settings import OperatorSettings
from rlsrl_operator.status import TERMINAL

RETRY_SECONDS = 0.2
"""When to look again after somebody else was faster."""
QUEUE_SECONDS = 2.0
"""When to ask again for trainers that their queue does not take yet: it wants those of before to be gone altogether."""
TROUBLE_SECONDS = 30.0
"""When to look again at what only somebody else can mend."""
LOST_SECONDS = 30.0
"""How long a pod may outstay its grace, if it has any, before it is given up: its node is dead or cut off."""
STEADY_SECONDS = 300.0
"""How long an experiment that nobody wakes may go without a look: lost news of it are made good then."""
MAKING_SECONDS = 3.0
"""How long controllers may take to make pods before they are asked what keeps them."""
WORKED_SECONDS = 60.0
"""A worker that lived for so long does not fail at once: it need not wait before it is started again."""
_log = structlog.stdlib.get_logger("reconcile")


@dataclass(frozen=True, order=True)
class ExperimentKey:
    """One experiment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ManagedByAnother(Exception):
    """Another operator looks after the experiment. Whatever we would do, it would undo, and the other way around."""


@dataclass
class _SteadyState:
    """An experiment of which all is as it should be: what it takes to tell its numbers."""

    document: Manifest
    """As it was written last."""
    status: ExperimentStatus
    context: ExperimentContext
    until: datetime
    """When it is to be looked at anew."""


@dataclass(frozen=True)
class Reconciled:
    """What one look came to."""

    status: ExperimentStatus
    again_in: float | None
    steady: _SteadyState | None = None


@dataclass
class _Memory:
    """What is remembered of an experiment between two looks. All of it may be lost: then more is asked and written."""

    objects: InformerCache
    context: ExperimentContext | None = None
    """Of the present generation."""
    token: str = ""
    asked_at: datetime | None = None
    """When its coordinator was asked for numbers last."""
    revision: tuple[str, Revision] | None = None
    """The present generation's revision, by the uid of its object, which never changes."""
    pruned: int = 0
    """The generation for which what earlier ones needed was removed."""
    wakes: int = 0
    """How often it was woken."""
    steady: _SteadyState | None = None
    said: str = ""
    """The resourceVersion that the last write of its status made."""


class Reconciler:
    """Looks at experiments, each as often as it is asked to; never at one twice at a time."""

    def __init__(
        self,
        cluster: Cluster,
        settings: OperatorSettings,
        coordinator_status: CoordinatorStatus,
        *,
        key: bytes,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        seen: Callable[[ExperimentKey, ExperimentStatus | None], None] = lambda _, __: None,
    ) -> None:
        """``seen`` is new_status how an experiment stands after each look; None when it is gone."""
        self._cluster = cluster
        self._settings = settings
        self._coordinator_status = coordinator_status
        self._now = now
        self._seen = seen
        self._memories: dict[ExperimentKey, _Memory] = {}
        self._key = key
        """Tokens derive from it, so that one that was deleted comes back as it was."""

    def wake(self, key: ExperimentKey, *, kind: str, name: str, version: str = "") -> bool:
        """Something of the experiment has changed: it itself, or an object of it, which has that resourceVersion now
        or, if that is empty, is gone.

        Returns whether it is to be looked at: what we wrote ourselves is no news.
        """
        memory = self._memory(key)
        if kind == KIND:
            is_news = not version or version != memory.said
        else:
            is_news = kind == "Pod" or memory.objects.tell(kind, name, version)
        if is_news:
            memory.wakes, memory.steady = memory.wakes + 1, None
        return is_news

    def _memory(self, key: ExperimentKey) -> _Memory:
        if key not in self._memories:
            self._memories[key] = _Memory(InformerCache(self._cluster))
        return self._memories[key]

    async def reconcile(self, key: ExperimentKey) -> float | None:
        """Bring the experiment closer to what it should be; returns the seconds after which to look again."""
        memory = self._memory(key)
        steady, memory.steady = memory.steady, None
        if steady is None or self._now() >= steady.until:
            return await self._look_at(key)
        try:
            return await self._ask(key, steady)
        except ResourceConflict:
            return RETRY_SECONDS

    async def _ask(self, key: ExperimentKey, steady: _SteadyState) -> float:
        """Tell the numbers of a run of which all else is as it was said to be."""
        wakes = self._memory(key).wakes
        now = self._now()
        page = await self._page(steady.context, steady.status, self._memory(key), now)
        new_status = _with_training(steady.status, page, generation=steady.document["metadata"]["generation"], now=now)
        version = await self._write_status(steady.document, new_status)
        steady.document["metadata"]["resourceVersion"] = version
        self._seen(key, new_status)
        self._stay_steady(key, replace(steady, status=new_status), wakes)
        return self._settings.status_seconds

    def _stay_steady(self, key: ExperimentKey, steady: _SteadyState, wakes: int) -> None:
        """Unless it was woken since."""
        memory = self._memory(key)
        memory.said = steady.document["metadata"]["resourceVersion"]
        if memory.wakes == wakes:
            memory.steady = steady

    async def _look_at(self, key: ExperimentKey) -> float | None:
        wakes = self._memory(key).wakes
        document = await self._cluster.get(API_VERSION, KIND, key.namespace, key.name)
        if document is None or "deletionTimestamp" in document["metadata"]:
            # Its objects go with it: the cluster's garbage collector follows their owner references.
            self._memories.pop(key, None)
            self._seen(key, None)
            return None
        try:
            reconciled = await self._reconcile_once(document, statuses.read(document))
            if reconciled is None:
                return None
            document["metadata"]["resourceVersion"] = await self._write_status(document, reconciled.status)
        except ResourceConflict as conflict:
            _log.info("conflict", key=str(key), said=str(conflict))
            return RETRY_SECONDS
        except ManagedByAnother as error:
            _log.warning("left_to_another_operator", key=str(key), said=str(error))
            return TROUBLE_SECONDS
        self._seen(key, reconciled.status)
        if reconciled.steady is not None:
            self._stay_steady(key, reconciled.steady, wakes)
        return reconciled.again_in

    async def _reconcile_once(self, document: Manifest, status: ExperimentStatus) -> Reconciled | None:
        now = self._now()
        generation = document["metadata"]["generation"]
        memory = self._memory(ExperimentKey(document["metadata"]["namespace"], document["metadata"]["name"]))

        def not_accepted(reason: AcceptedReason, message: str) -> Reconciled:
            new_status = statuses.with_condition(
                status.model_copy(update={"phase": status.phase or "Pending", "observed_generation": generation}),
                ACCEPTED,
                "False",
                reason,
                message,
                generation=generation,
                now=now,
            )
            return Reconciled(new_status, TROUBLE_SECONDS)

        try:
            context = memory.context = self._context(document, memory.context)
        except SpecError as error:
            return not_accepted("InvalidSpec", str(error))
        if (left := self._time_left(status, context, now)) is not None and left <= 0:
            await self._cluster.delete(document)
            return None
        await memory.objects.begin(context, now, is_new=generation == 1 and status.phase is None)
        try:
            revision, found_revision = await self._revision(context, memory)
        except NotOwned as error:
            return not_accepted("NameConflict", str(error))
        if revision is None:
            return not_accepted("InvalidSpec", "\n".join(self._not_to_say(context)))
        asked = context
        if revision.experiment != context.experiment:
            context = replace(context, experiment=revision.experiment)
        templates = {
            each["metadata"]["labels"][ROLE_LABEL]: template_of(each["spec"]["template"])
            for each in revision.manifests
            if "template" in each.get("spec", {})
        }
        pods = await self._pods(context)
        judged = decide(status, context, templates, pods, now)
        if (judged.attempt, judged.phase) != (status.attempt, status.phase):
            # Written before it is acted upon: whoever takes over from here has to come to the same attempt.
            document["metadata"]["resourceVersion"] = await self._write_status(document, judged)
        try:
            if memory.revision is None:
                # Whoever comes second has a conflict, and looks again at what the first has written.
                made = await memory.objects.create(revision_object(context, revision, self._key))
                memory.revision = (made["metadata"]["uid"], revision)
            elif found_revision is not None:
                await memory.objects.keep(found_revision)
            refusal = await self._apply(context, revision, judged, pods, memory)
        except NotOwned as error:
            return not_accepted("NameConflict", str(error))
        except Refused as error:
            return not_accepted("InvalidSpec", str(error))
        await self._remove_pods(judged, pods, now)
        await self._tell_settings(revision, pods)
        queue_refuses = refusal is not None
        new_status = statuses.summarize(
            judged,
            context,
            pods,
            now,
            refusal=refusal or await self._refusal(context, judged, pods, now),
            refused_edits=refused(revision.experiment, asked.experiment),
            not_to_say=() if revision.experiment == asked.experiment else self._not_to_say(asked),
        )
        page = await self._page(context, new_status, memory, now)
        new_status = _with_training(new_status, page, generation=generation, now=now)
        steady = None
        if is_settled(new_status, templates, pods):
            await self._prune(context, revision, memory)
            if new_status.phase not in TERMINAL:
                until = now + timedelta(seconds=STEADY_SECONDS)
                steady = _SteadyState(document=document, status=new_status, context=context, until=until)
        memory.objects.end(now)
        soon = min(self._settings.status_seconds, QUEUE_SECONDS) if queue_refuses else self._settings.status_seconds
        return Reconciled(new_status, left if new_status.phase in TERMINAL else soon, steady)

    def _context(self, document: Manifest, before: ExperimentContext | None) -> ExperimentContext:
        """Whom the document is about; ``before``, if it still says the same."""
        metadata = document["metadata"]
        labels = queue_labels(metadata.get("labels", {}))
        marks = metadata["uid"], metadata["generation"], labels
        if before is not None and marks == (before.uid, before.generation, before.queue_labels):
            return before
        written = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": metadata["name"], "labels": labels}}
        experiment: RLExperiment = load_text(json.dumps({**written, "spec": document["spec"]}))
        return ExperimentContext(
            experiment=experiment,
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            settings=self._settings,
        )

    def _not_to_say(self, context: ExperimentContext) -> list[str]:
        """What the experiment says of its pods that the administrator does not let it say."""
        return [] if self._settings.pod_templates == "any" else refusals(context.experiment)

    async def _revision(self, context: ExperimentContext, memory: _Memory) -> tuple[Revision | None, Manifest | None]:
        """What this generation is made of: as it is on revision, with the object that says so unless that is as we left
        it; or as it follows from the one before, and then none is remembered. An edit that cannot be leaves everything
        as it was; None for what cannot be from the beginning.

        Raises:
            NotOwned: an object that is not ours is in the revision's place.
            ManagedByAnother: another operator wrote it, or the one before it.
        """
        place = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": context.metadata(context.revision_name)}
        if memory.revision is not None and memory.objects.is_as_left(place):
            return memory.revision[1], None
        found = await memory.objects.find(place)
        if found is not None:
            uid = found["metadata"]["uid"]
            if memory.revision is None or memory.revision[0] != uid:
                known = read_revision(context, found, self._key)
                memory.revision = None if known is None else (uid, known)
            if memory.revision is not None:
                return memory.revision[1], {**found, "metadata": place["metadata"]}
            if context.uid not in {owner["uid"] for owner in found["metadata"].get("ownerReferences", ())}:
                raise NotOwned(in_the_way(place))
            _refuse_anothers(context, found)
            await self._cluster.delete(found)
        memory.revision = None
        return self._new_revision(context, await self._earlier_revision(context, memory)), None

    async def _earlier_revision(self, context: ExperimentContext, memory: _Memory) -> Revision | None:
        """What the generation before this one was made of, as far as it is on revision."""
        there = await memory.objects.of_earlier(context) if context.generation > 1 else {}
        for generation in range(context.generation - 1, 0, -1):
            found = there.get(replace(context, generation=generation).revision_name)
            if found is not None:
                if (revision := read_revision(context, found, self._key)) is None:
                    _refuse_anothers(context, found)
                return revision
        return None

    def _new_revision(self, context: ExperimentContext, before: Revision | None) -> Revision | None:
        if self._not_to_say(context):
            return before
        if before is None:
            return first_revision(context)
        if refused(before.experiment, context.experiment):
            return before
        # Nothing runs that would have to stay as it is.
        return first_revision(context) if before.experiment.spec.suspend else next_revision(before, context)

    @staticmethod
    def _time_left(status: ExperimentStatus, context: ExperimentContext, now: datetime) -> float | None:
        """Seconds until a finished experiment is to be deleted; None for never."""
        ttl = context.experiment.spec.ttl_seconds_after_finished
        if ttl is None or status.phase not in TERMINAL or status.finished_at is None:
            return None
        return (parse_time(status.finished_at) + timedelta(seconds=ttl) - now).total_seconds()

    async def _pods(self, context: ExperimentContext) -> list[Manifest]:
        found = await self._cluster.list("v1", "Pod", context.namespace, context.own_labels)
        return [pod for pod in found if ROLE_LABEL in pod["metadata"]["labels"]]

    async def _apply(
        self,
        context: ExperimentContext,
        revision: Revision,
        status: ExperimentStatus,
        pods: Sequence[Manifest],
        memory: _Memory,
    ) -> str | None:
        """Make all objects what they should be; returns why the experiment's queue does not take the trainers yet if it
        does not.

        Raises:
            NotOwned: an object that is not ours is in the way.
            Refused: the API server does not take one.
            ResourceConflict: somebody else was faster.
        """
        secret = await memory.objects.keep(token_secret(context, token_of(self._key, context.uid)))
        if secret is not None:
            memory.token = base64.b64decode(secret["data"][TOKEN_KEY]).decode()
        if (claim := volume_claim(context)) is not None:
            await memory.objects.claim(claim)
        refusal = None
        for manifest in revision.manifests:
            if manifest.get("immutable"):
                await memory.objects.keep(manifest)
                continue
            try:
                await memory.objects.apply(overlaid(manifest, status, pods, self._now()))
            except NotAdmitted as error:
                refusal = str(error)
        return refusal

    async def _refusal(
        self, context: ExperimentContext, status: ExperimentStatus, pods: Sequence[Manifest], now: datetime
    ) -> str | None:
        """Why a role has no pod at all, if its controller may not make any: a quota, an admission policy."""
        ready = statuses.condition(status, READY)
        if ready is None or now < parse_time(ready.last_transition_time) + timedelta(seconds=MAKING_SECONDS):
            return None
        there = {pod["metadata"]["labels"][ROLE_LABEL] for pod in pods}
        for role in roles_of(context.configs) if status.phase not in TERMINAL else ():
            if role.name in there or (status.phase == "Queued" and not role.queued):
                continue
            workload = await self._cluster.get("apps/v1", role.workload, context.namespace, context.name_of(role.name))
            if workload is None:
                continue
            said = statuses.replica_failure(workload) or await self._cluster.last_event(workload, "FailedCreate")
            if said is not None:
                return f"{role.workload} {context.name_of(role.name)}: {said}"
        return None

    async def _remove_pods(self, status: ExperimentStatus, pods: Sequence[Manifest], now: datetime) -> None:
        """Pods of another attempt, those whose node does not end them, and those that it lets wait without need.

        Fences make the second safe: what an earlier attempt still writes is refused, and a coordinator that has been
        followed ends. The third: a node starts whatever ended twice within ten minutes only after a while, up to five
        minutes, be it broken or not. In another pod it begins at once.
        """
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"]:
                if now > _given_up_at(pod):
                    await self._cluster.delete(pod, grace_seconds=0)
            elif status.phase not in TERMINAL and (
                attempt_of(pod) not in (0, status.attempt) or _waits_needlessly(pod)
            ):
                await self._cluster.delete(pod)

    async def _tell_settings(self, revision: Revision, pods: Sequence[Manifest]) -> None:
        """A node looks at a pod's volumes about once a minute, and at once when the pod has changed."""
        settings = next(each for each in revision.manifests if SETTINGS_KEY in each.get("data", {}))
        wanted = {SETTINGS_ANNOTATION: digest(settings["data"])[:10]}
        for pod in pods:
            known = pod["metadata"].get("annotations", {})
            if pod["metadata"]["labels"][ROLE_LABEL] == COORDINATOR and wanted.items() - known.items():
                await self._cluster.annotate(pod, wanted)

    async def _page(
        self, context: ExperimentContext, status: ExperimentStatus, memory: _Memory, now: datetime
    ) -> Mapping[str, Any] | None:
        """The coordinator's page, if it is time for one."""
        if status.phase != "Running":
            return None
        if memory.asked_at is not None and (now - memory.asked_at).total_seconds() < self._settings.status_seconds:
            return None
        memory.asked_at = now
        return await self._coordinator_status.ask(
            f"{context.name_of(COORDINATOR)}.{context.namespace}.svc", memory.token
        )

    async def _prune(self, context: ExperimentContext, revision: Revision, memory: _Memory) -> None:
        """Remove what earlier generations needed and this one does not, once."""
        if context.generation not in (1, memory.pruned):
            wanted = {(each["kind"], each["metadata"]["name"]) for each in revision.manifests}
            await memory.objects.prune(context, wanted | {("ConfigMap", context.revision_name)})
        memory.pruned = context.generation

    async def _write_status(self, document: Manifest, status: ExperimentStatus) -> str:
        """Write the status if it is another than the document has; returns the document's resourceVersion then."""
        written = statuses.write(status)
        if written == (document.get("status") or {}):
            return str(document["metadata"]["resourceVersion"])
        before = statuses.read(document)
        answer = await self._cluster.replace_status({**document, "status": written})
        document["status"] = written
        for each in status.conditions:
            was = statuses.condition(before, each.type)
            if was is None or (was.status, was.reason) != (each.status, each.reason):
                await self._announce(document, each.type, each.reason, each.message, each.last_transition_time)
        return str(answer["metadata"]["resourceVersion"])

    async def _announce(self, document: Manifest, condition_type: str, reason: str, message: str, since: str) -> None:
        """An event for whoever asks ``kubectl describe``. The same news has the same name, and so comes once."""
        metadata = document["metadata"]
        mark = digest([metadata["uid"], condition_type, reason, since])[:16]
        stamp = statuses.stamp(self._now())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{mark}", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": "Warning" if is_trouble(reason) else "Normal",
            "reason": reason,
            "message": message,
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "firstTimestamp": stamp,
            "lastTimestamp": stamp,
            "count": 1,
        }
        try:
            await self._cluster.create(event)
        except ResourceConflict:
            pass
        except Refused as error:
            _log.warning("event_refused", reason=reason, error=str(error))


def _with_training(
    status: ExperimentStatus, page: Mapping[str, Any] | None, *, generation: int, now: datetime
) -> ExperimentStatus:
    """The status with what the coordinator new_status; as it was if it new_status nothing."""
    if page is None:
        return status
    new_status = status.model_copy(update={"training": statuses.training(page, now)})
    return statuses.durable(new_status, page, generation=generation, now=now)


def _given_up_at(pod: Manifest) -> datetime:
    """Until when a pod that is to go may stay: for its grace, and a while.

    One that a taint drives out and whose node was not heard of before already has no grace: nobody tells it to go.
    """
    ending = parse_time(pod["metadata"]["deletionTimestamp"])
    asked = ending - timedelta(seconds=pod["metadata"].get("deletionGracePeriodSeconds", 0))
    unready = unready_since(pod)
    is_lost = is_driven_out(pod) and unready is not None and parse_time(unready) < asked
    return (asked if is_lost else ending) + timedelta(seconds=LOST_SECONDS)


def _waits_needlessly(pod: Manifest) -> bool:
    """Whether its node does not start a worker again that had worked until it was ended."""
    return is_held_back(pod) and any(_lived_seconds(each) > WORKED_SECONDS for each in terminations(pod))


def _lived_seconds(ended: Mapping[str, Any]) -> float:
    """How long a container ran; 0 where its node does not know."""
    if (started := ended.get("startedAt")) is None or (finished := ended.get("finishedAt")) is None:
        return 0.0
    return (parse_time(finished) - parse_time(started)).total_seconds()


def _refuse_anothers(context: ExperimentContext, found: Manifest) -> None:
    if is_anothers(context, found):
        raise ManagedByAnother(f"ConfigMap {found['metadata']['name']} is another operator's, with another key")
