"""One look at one experiment: observe, judge, write down what was decided, act, say how it stands.

Pods are asked for anew each time, and what is there is never taken from events, so a look that was cut short anywhere
is made good by the next. What is remembered between looks (see ``objects``) only saves calls.

An experiment of which all is as it should be is looked at when it was woken, and every ``CALM_SECONDS`` besides.
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
from rlsrl_operator.cluster import Cluster, Conflict, Refused
from rlsrl_operator.gang import attempt_of, parse_time, template_of
from rlsrl_operator.lifecycle import decide, is_settled, overlaid
from rlsrl_operator.manifests import (
    Manifest,
    Record,
    Subject,
    first_record,
    is_anothers,
    next_record,
    read_record,
    record_object,
    token_secret,
    volume_claim,
)
from rlsrl_operator.manifests.kueue import queue_labels
from rlsrl_operator.manifests.subject import MANAGER, SETTINGS_ANNOTATION, SETTINGS_KEY
from rlsrl_operator.manifests.templates import refusals
from rlsrl_operator.numbers import Numbers
from rlsrl_operator.objects import Foreign, NotYet, Objects, in_the_way
from rlsrl_operator.operator_key import token_of
from rlsrl_operator.plan import digest
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
CALM_SECONDS = 300.0
"""How long an experiment that nobody wakes may go without a look: lost news of it are made good then."""
MAKING_SECONDS = 3.0
"""How long controllers may take to make pods before they are asked what keeps them."""
WORKED_SECONDS = 60.0
"""A worker that lived for so long does not fail at once: it need not wait before it is started again."""
_log = structlog.stdlib.get_logger("reconcile")


@dataclass(frozen=True, order=True)
class Key:
    """One experiment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class LookedAfter(Exception):  # noqa: N818 - named for the experiment
    """Another operator looks after the experiment. Whatever we would do, it would undo, and the other way around."""


@dataclass
class _Calm:
    """An experiment of which all is as it should be: what it takes to tell its numbers."""

    document: Manifest
    """As it was written last."""
    status: ExperimentStatus
    subject: Subject
    until: datetime
    """When it is to be looked at anew."""


@dataclass(frozen=True)
class Reconciled:
    """What one look came to."""

    status: ExperimentStatus
    again_in: float | None
    calm: _Calm | None = None


@dataclass
class _Memory:
    """What is remembered of an experiment between two looks. All of it may be lost: then more is asked and written."""

    objects: Objects
    subject: Subject | None = None
    """Of the present generation."""
    token: str = ""
    asked_at: datetime | None = None
    """When its coordinator was asked for numbers last."""
    record: tuple[str, Record] | None = None
    """The present generation's record, by the uid of its object, which never changes."""
    pruned: int = 0
    """The generation for which what earlier ones needed was removed."""
    wakes: int = 0
    """How often it was woken."""
    calm: _Calm | None = None
    said: str = ""
    """The resourceVersion that the last write of its status made."""


class Reconciler:
    """Looks at experiments, each as often as it is asked to; never at one twice at a time."""

    def __init__(
        self,
        cluster: Cluster,
        settings: OperatorSettings,
        numbers: Numbers,
        *,
        key: bytes,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        seen: Callable[[Key, ExperimentStatus | None], None] = lambda _, __: None,
    ) -> None:
        """``seen`` is told how an experiment stands after each look; None when it is gone."""
        self._cluster = cluster
        self._settings = settings
        self._numbers = numbers
        self._now = now
        self._seen = seen
        self._memories: dict[Key, _Memory] = {}
        self._key = key
        """Tokens derive from it, so that one that was deleted comes back as it was."""

    def wake(self, key: Key, *, kind: str, name: str, version: str = "") -> bool:
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
            memory.wakes, memory.calm = memory.wakes + 1, None
        return is_news

    def _memory(self, key: Key) -> _Memory:
        if key not in self._memories:
            self._memories[key] = _Memory(Objects(self._cluster))
        return self._memories[key]

    async def reconcile(self, key: Key) -> float | None:
        """Bring the experiment closer to what it should be; returns the seconds after which to look again."""
        memory = self._memory(key)
        calm, memory.calm = memory.calm, None
        if calm is None or self._now() >= calm.until:
            return await self._look_at(key)
        try:
            return await self._ask(key, calm)
        except Conflict:
            return RETRY_SECONDS

    async def _ask(self, key: Key, calm: _Calm) -> float:
        """Tell the numbers of a run of which all else is as it was said to be."""
        wakes = self._memory(key).wakes
        now = self._now()
        page = await self._page(calm.subject, calm.status, self._memory(key), now)
        told = _with_numbers(calm.status, page, generation=calm.document["metadata"]["generation"], now=now)
        version = await self._say(calm.document, told)
        calm.document["metadata"]["resourceVersion"] = version
        self._seen(key, told)
        self._stay_calm(key, replace(calm, status=told), wakes)
        return self._settings.status_seconds

    def _stay_calm(self, key: Key, calm: _Calm, wakes: int) -> None:
        """Unless it was woken since."""
        memory = self._memory(key)
        memory.said = calm.document["metadata"]["resourceVersion"]
        if memory.wakes == wakes:
            memory.calm = calm

    async def _look_at(self, key: Key) -> float | None:
        wakes = self._memory(key).wakes
        document = await self._cluster.get(API_VERSION, KIND, key.namespace, key.name)
        if document is None or "deletionTimestamp" in document["metadata"]:
            # Its objects go with it: the cluster's garbage collector follows their owner references.
            self._memories.pop(key, None)
            self._seen(key, None)
            return None
        try:
            reconciled = await self._look(document, statuses.read(document))
            if reconciled is None:
                return None
            document["metadata"]["resourceVersion"] = await self._say(document, reconciled.status)
        except Conflict as conflict:
            _log.info("conflict", key=str(key), said=str(conflict))
            return RETRY_SECONDS
        except LookedAfter as error:
            _log.warning("left_to_another_operator", key=str(key), said=str(error))
            return TROUBLE_SECONDS
        self._seen(key, reconciled.status)
        if reconciled.calm is not None:
            self._stay_calm(key, reconciled.calm, wakes)
        return reconciled.again_in

    async def _look(self, document: Manifest, status: ExperimentStatus) -> Reconciled | None:
        now = self._now()
        generation = document["metadata"]["generation"]
        memory = self._memory(Key(document["metadata"]["namespace"], document["metadata"]["name"]))

        def not_accepted(reason: AcceptedReason, message: str) -> Reconciled:
            told = statuses.with_condition(
                status.model_copy(update={"phase": status.phase or "Pending", "observed_generation": generation}),
                ACCEPTED,
                "False",
                reason,
                message,
                generation=generation,
                now=now,
            )
            return Reconciled(told, TROUBLE_SECONDS)

        try:
            subject = memory.subject = self._subject(document, memory.subject)
        except SpecError as error:
            return not_accepted("InvalidSpec", str(error))
        if (left := self._time_left(status, subject, now)) is not None and left <= 0:
            await self._cluster.delete(document)
            return None
        await memory.objects.begin(subject, now, is_new=generation == 1 and status.phase is None)
        try:
            record, on_record = await self._record(subject, memory)
        except Foreign as error:
            return not_accepted("NameConflict", str(error))
        if record is None:
            return not_accepted("InvalidSpec", "\n".join(self._not_to_say(subject)))
        asked = subject
        if record.experiment != subject.experiment:
            subject = replace(subject, experiment=record.experiment)
        templates = {
            each["metadata"]["labels"][ROLE_LABEL]: template_of(each["spec"]["template"])
            for each in record.manifests
            if "template" in each.get("spec", {})
        }
        pods = await self._pods(subject)
        judged = decide(status, subject, templates, pods, now)
        if (judged.attempt, judged.phase) != (status.attempt, status.phase):
            # Written before it is acted upon: whoever takes over from here has to come to the same attempt.
            document["metadata"]["resourceVersion"] = await self._say(document, judged)
        try:
            if memory.record is None:
                # Whoever comes second has a conflict, and looks again at what the first has written.
                made = await memory.objects.create(record_object(subject, record, self._key))
                memory.record = (made["metadata"]["uid"], record)
            elif on_record is not None:
                await memory.objects.keep(on_record)
            refusal = await self._bring_about(subject, record, judged, pods, memory)
        except Foreign as error:
            return not_accepted("NameConflict", str(error))
        except Refused as error:
            return not_accepted("InvalidSpec", str(error))
        await self._remove_pods(judged, pods, now)
        await self._tell_settings(record, pods)
        queue_refuses = refusal is not None
        told = statuses.summarize(
            judged,
            subject,
            pods,
            now,
            refusal=refusal or await self._refusal(subject, judged, pods, now),
            refused_edits=refused(record.experiment, asked.experiment),
            not_to_say=() if record.experiment == asked.experiment else self._not_to_say(asked),
        )
        page = await self._page(subject, told, memory, now)
        told = _with_numbers(told, page, generation=generation, now=now)
        calm = None
        if is_settled(told, templates, pods):
            await self._prune(subject, record, memory)
            if told.phase not in TERMINAL:
                until = now + timedelta(seconds=CALM_SECONDS)
                calm = _Calm(document=document, status=told, subject=subject, until=until)
        memory.objects.end(now)
        soon = min(self._settings.status_seconds, QUEUE_SECONDS) if queue_refuses else self._settings.status_seconds
        return Reconciled(told, left if told.phase in TERMINAL else soon, calm)

    def _subject(self, document: Manifest, before: Subject | None) -> Subject:
        """Whom the document is about; ``before``, if it still says the same."""
        metadata = document["metadata"]
        labels = queue_labels(metadata.get("labels", {}))
        marks = metadata["uid"], metadata["generation"], labels
        if before is not None and marks == (before.uid, before.generation, before.queue_labels):
            return before
        written = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": metadata["name"], "labels": labels}}
        experiment: RLExperiment = load_text(json.dumps({**written, "spec": document["spec"]}))
        return Subject(
            experiment=experiment,
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            settings=self._settings,
        )

    def _not_to_say(self, subject: Subject) -> list[str]:
        """What the experiment says of its pods that the administrator does not let it say."""
        return [] if self._settings.pod_templates == "any" else refusals(subject.experiment)

    async def _record(self, subject: Subject, memory: _Memory) -> tuple[Record | None, Manifest | None]:
        """What this generation is made of: as it is on record, with the object that says so unless that is as we left
        it; or as it follows from the one before, and then none is remembered. An edit that cannot be leaves everything
        as it was; None for what cannot be from the beginning.

        Raises:
            Foreign: an object that is not ours is in the record's place.
            LookedAfter: another operator wrote it, or the one before it.
        """
        place = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": subject.metadata(subject.record_name)}
        if memory.record is not None and memory.objects.is_as_left(place):
            return memory.record[1], None
        found = await memory.objects.find(place)
        if found is not None:
            uid = found["metadata"]["uid"]
            if memory.record is None or memory.record[0] != uid:
                known = read_record(subject, found, self._key)
                memory.record = None if known is None else (uid, known)
            if memory.record is not None:
                return memory.record[1], {**found, "metadata": place["metadata"]}
            if subject.uid not in {owner["uid"] for owner in found["metadata"].get("ownerReferences", ())}:
                raise Foreign(in_the_way(place))
            _refuse_anothers(subject, found)
            await self._cluster.delete(found)
        memory.record = None
        return self._new_record(subject, await self._earlier_record(subject, memory)), None

    async def _earlier_record(self, subject: Subject, memory: _Memory) -> Record | None:
        """What the generation before this one was made of, as far as it is on record."""
        there = await memory.objects.of_earlier(subject) if subject.generation > 1 else {}
        for generation in range(subject.generation - 1, 0, -1):
            found = there.get(replace(subject, generation=generation).record_name)
            if found is not None:
                if (record := read_record(subject, found, self._key)) is None:
                    _refuse_anothers(subject, found)
                return record
        return None

    def _new_record(self, subject: Subject, before: Record | None) -> Record | None:
        if self._not_to_say(subject):
            return before
        if before is None:
            return first_record(subject)
        if refused(before.experiment, subject.experiment):
            return before
        # Nothing runs that would have to stay as it is.
        return first_record(subject) if before.experiment.spec.suspend else next_record(before, subject)

    @staticmethod
    def _time_left(status: ExperimentStatus, subject: Subject, now: datetime) -> float | None:
        """Seconds until a finished experiment is to be deleted; None for never."""
        ttl = subject.experiment.spec.ttl_seconds_after_finished
        if ttl is None or status.phase not in TERMINAL or status.finished_at is None:
            return None
        return (parse_time(status.finished_at) + timedelta(seconds=ttl) - now).total_seconds()

    async def _pods(self, subject: Subject) -> list[Manifest]:
        found = await self._cluster.list("v1", "Pod", subject.namespace, subject.own_labels)
        return [pod for pod in found if ROLE_LABEL in pod["metadata"]["labels"]]

    async def _bring_about(
        self, subject: Subject, record: Record, status: ExperimentStatus, pods: Sequence[Manifest], memory: _Memory
    ) -> str | None:
        """Make all objects what they should be; returns why the experiment's queue does not take the trainers yet if it
        does not.

        Raises:
            Foreign: an object that is not ours is in the way.
            Refused: the API server does not take one.
            Conflict: somebody else was faster.
        """
        secret = await memory.objects.keep(token_secret(subject, token_of(self._key, subject.uid)))
        if secret is not None:
            memory.token = base64.b64decode(secret["data"][TOKEN_KEY]).decode()
        if (claim := volume_claim(subject)) is not None:
            await memory.objects.claim(claim)
        refusal = None
        for manifest in record.manifests:
            if manifest.get("immutable"):
                await memory.objects.keep(manifest)
                continue
            try:
                await memory.objects.apply(overlaid(manifest, status, pods, self._now()))
            except NotYet as error:
                refusal = str(error)
        return refusal

    async def _refusal(
        self, subject: Subject, status: ExperimentStatus, pods: Sequence[Manifest], now: datetime
    ) -> str | None:
        """Why a role has no pod at all, if its controller may not make any: a quota, an admission policy."""
        ready = statuses.condition(status, READY)
        if ready is None or now < parse_time(ready.last_transition_time) + timedelta(seconds=MAKING_SECONDS):
            return None
        there = {pod["metadata"]["labels"][ROLE_LABEL] for pod in pods}
        for role in roles_of(subject.told) if status.phase not in TERMINAL else ():
            if role.name in there or (status.phase == "Queued" and not role.queued):
                continue
            workload = await self._cluster.get("apps/v1", role.workload, subject.namespace, subject.name_of(role.name))
            if workload is None:
                continue
            said = statuses.replica_failure(workload) or await self._cluster.last_event(workload, "FailedCreate")
            if said is not None:
                return f"{role.workload} {subject.name_of(role.name)}: {said}"
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

    async def _tell_settings(self, record: Record, pods: Sequence[Manifest]) -> None:
        """A node looks at a pod's volumes about once a minute, and at once when the pod has changed."""
        settings = next(each for each in record.manifests if SETTINGS_KEY in each.get("data", {}))
        wanted = {SETTINGS_ANNOTATION: digest(settings["data"])[:10]}
        for pod in pods:
            known = pod["metadata"].get("annotations", {})
            if pod["metadata"]["labels"][ROLE_LABEL] == COORDINATOR and wanted.items() - known.items():
                await self._cluster.annotate(pod, wanted)

    async def _page(
        self, subject: Subject, status: ExperimentStatus, memory: _Memory, now: datetime
    ) -> Mapping[str, Any] | None:
        """The coordinator's page, if it is time for one."""
        if status.phase != "Running":
            return None
        if memory.asked_at is not None and (now - memory.asked_at).total_seconds() < self._settings.status_seconds:
            return None
        memory.asked_at = now
        return await self._numbers.ask(f"{subject.name_of(COORDINATOR)}.{subject.namespace}.svc", memory.token)

    async def _prune(self, subject: Subject, record: Record, memory: _Memory) -> None:
        """Remove what earlier generations needed and this one does not, once."""
        if subject.generation not in (1, memory.pruned):
            wanted = {(each["kind"], each["metadata"]["name"]) for each in record.manifests}
            await memory.objects.prune(subject, wanted | {("ConfigMap", subject.record_name)})
        memory.pruned = subject.generation

    async def _say(self, document: Manifest, status: ExperimentStatus) -> str:
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

    async def _announce(self, document: Manifest, aspect: str, reason: str, message: str, since: str) -> None:
        """An event for whoever asks ``kubectl describe``. The same news has the same name, and so comes once."""
        metadata = document["metadata"]
        mark = digest([metadata["uid"], aspect, reason, since])[:16]
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
        except Conflict:
            pass
        except Refused as error:
            _log.warning("event_refused", reason=reason, error=str(error))


def _with_numbers(
    status: ExperimentStatus, page: Mapping[str, Any] | None, *, generation: int, now: datetime
) -> ExperimentStatus:
    """The status with what the coordinator told; as it was if it told nothing."""
    if page is None:
        return status
    told = status.model_copy(update={"training": statuses.training(page, now)})
    return statuses.durable(told, page, generation=generation, now=now)


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


def _refuse_anothers(subject: Subject, found: Manifest) -> None:
    if is_anothers(subject, found):
        raise LookedAfter(f"ConfigMap {found['metadata']['name']} is another operator's, with another key")
