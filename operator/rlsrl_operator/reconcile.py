"""One look at one experiment: observe, judge, write down what was decided, act, say how it stands.

Everything is asked anew each time and nothing is taken from events, so a look that was cut short anywhere is made good
by the next. What is remembered between looks (how objects were after their last apply) only saves writes.

An experiment of which all is as it should be is looked at when it was woken, and every ``CALM_SECONDS`` besides.
Between, only its coordinator is asked for the run's numbers.
"""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog

from rlsrl.api.edits import refused
from rlsrl.api.load import SpecError, load_text
from rlsrl.api.pods import ROLE_LABEL, TOKEN_KEY, is_driven_out, is_held_back, terminations, unready_since
from rlsrl.api.reasons import ACCEPTED, AcceptedReason, is_trouble
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
from rlsrl_operator.manifests.kueue import begins_in_queue, queue_labels, stepwise
from rlsrl_operator.manifests.subject import MANAGER, SETTINGS_ANNOTATION, SETTINGS_KEY
from rlsrl_operator.manifests.templates import refusals
from rlsrl_operator.numbers import Numbers
from rlsrl_operator.operator_key import token_of
from rlsrl_operator.plan import Applied, Step, applied, digest, is_ours, is_overruled, step, whole
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
WORKED_SECONDS = 60.0
"""A worker that lived for so long does not fail at once: it need not wait before it is started again."""
_KINDS = (
    ("apps/v1", "Deployment"),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    ("v1", "ConfigMap"),
    ("apps/v1", "StatefulSet"),
    ("v1", "PersistentVolumeClaim"),
    ("v1", "Secret"),
    ("v1", "Service"),
)
"""Of the objects that an experiment is made of."""
_PRUNED = ("Deployment", "NetworkPolicy", "ConfigMap")
"""What a generation may have that a later one has not."""
_There = Mapping[tuple[str, str], Manifest]
"""The objects with an experiment's labels, by kind and name."""
_log = structlog.stdlib.get_logger("reconcile")


@dataclass(frozen=True, order=True)
class Key:
    """One experiment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class NotYet(Exception):  # noqa: N818 - named for what a queue says
    """A queue does not take an object's pods while something is left of those before."""


class Foreign(Exception):  # noqa: N818 - named for the object
    """An object that is not ours has a name that we need."""


class LookedAfter(Exception):  # noqa: N818 - named for the experiment
    """Another operator looks after the experiment. Whatever we would do, it would undo, and the other way around."""


@dataclass
class _Calm:
    """An experiment of which all is as it should be: what it takes to tell its numbers."""

    document: Manifest
    """As it was written last."""
    status: ExperimentStatus
    subject: Subject
    token: str
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

    applied: dict[tuple[str, str], Applied] = field(default_factory=dict)
    """How objects were after their last apply, by kind and name."""
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
        self._memories: defaultdict[Key, _Memory] = defaultdict(_Memory)
        self._key = key
        """Tokens derive from it, so that one that was deleted comes back as it was."""

    def wake(self, key: Key, *, version: str = "") -> bool:
        """Something of the experiment has changed: it itself, which has that resourceVersion then, or what it made.

        Returns whether it is to be looked at: what it wrote into the status itself is no news.
        """
        memory = self._memories[key]
        if version and version == memory.said:
            return False
        memory.wakes, memory.calm = memory.wakes + 1, None
        return True

    async def reconcile(self, key: Key) -> float | None:
        """Bring the experiment closer to what it should be; returns the seconds after which to look again."""
        memory = self._memories[key]
        calm, memory.calm = memory.calm, None
        if calm is None or self._now() >= calm.until:
            return await self._look_at(key)
        try:
            return await self._ask(key, calm)
        except Conflict:
            return RETRY_SECONDS

    async def _ask(self, key: Key, calm: _Calm) -> float:
        """Tell the numbers of a run of which all else is as it was said to be."""
        wakes = self._memories[key].wakes
        now = self._now()
        page = await self._page(calm.subject, calm.status, calm.token, now)
        told = _with_numbers(calm.status, page, generation=calm.document["metadata"]["generation"], now=now)
        version = await self._say(calm.document, calm.status, told)
        calm.document["metadata"]["resourceVersion"] = version
        self._seen(key, told)
        self._stay_calm(key, replace(calm, status=told), wakes)
        return self._settings.status_seconds

    def _stay_calm(self, key: Key, calm: _Calm, wakes: int) -> None:
        """Unless it was woken since."""
        memory = self._memories[key]
        memory.said = calm.document["metadata"]["resourceVersion"]
        if memory.wakes == wakes:
            memory.calm = calm

    async def _look_at(self, key: Key) -> float | None:
        wakes = self._memories[key].wakes
        document = await self._cluster.get(API_VERSION, KIND, key.namespace, key.name)
        if document is None or "deletionTimestamp" in document["metadata"]:
            # Its objects go with it: the cluster's garbage collector follows their owner references.
            self._memories.pop(key, None)
            self._seen(key, None)
            return None
        before = statuses.read(document)
        try:
            reconciled = await self._look(document, before)
            if reconciled is None:
                return None
            document["metadata"]["resourceVersion"] = await self._say(document, before, reconciled.status)
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

    def _memory(self, subject: Subject) -> _Memory:
        return self._memories[Key(subject.namespace, subject.name)]

    async def _look(self, document: Manifest, status: ExperimentStatus) -> Reconciled | None:
        now = self._now()
        generation = document["metadata"]["generation"]

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
            subject = self._subject(document)
        except SpecError as error:
            return not_accepted("InvalidSpec", str(error))
        if (left := self._time_left(status, subject, now)) is not None and left <= 0:
            await self._cluster.delete(document)
            return None
        there = await self._there(subject)
        try:
            record, on_record = await self._record(subject, there)
        except Foreign as error:
            return not_accepted("NameConflict", str(error))
        if record is None:
            return not_accepted("InvalidSpec", "\n".join(self._not_to_say(subject)))
        asked, subject = subject, replace(subject, experiment=record.experiment)
        templates = {
            each["metadata"]["labels"][ROLE_LABEL]: template_of(each["spec"]["template"])
            for each in record.manifests
            if "template" in each.get("spec", {})
        }
        pods = await self._pods(subject)
        judged = decide(status, subject, templates, pods, now)
        if (judged.attempt, judged.phase) != (status.attempt, status.phase):
            # Written before it is acted upon: whoever takes over from here has to come to the same attempt.
            document["metadata"]["resourceVersion"] = await self._say(document, status, judged)
        try:
            if on_record is None:
                # Whoever comes second has a conflict, and looks again at what the first has written.
                await self._cluster.create(record_object(subject, record, self._key))
            else:
                await self._keep(subject, on_record, there)
            token, refusal = await self._bring_about(subject, record, judged, pods, there)
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
            refusal=refusal or await self._refusal(subject, judged, pods),
            refused_edits=refused(record.experiment, asked.experiment),
            not_to_say=() if record.experiment == asked.experiment else self._not_to_say(asked),
        )
        page = await self._page(subject, told, token, now)
        told = _with_numbers(told, page, generation=generation, now=now)
        calm = None
        if is_settled(told, templates, pods):
            await self._prune(subject, record, there)
            if told.phase not in TERMINAL:
                until = now + timedelta(seconds=CALM_SECONDS)
                calm = _Calm(document=document, status=told, subject=subject, token=token, until=until)
        soon = min(self._settings.status_seconds, QUEUE_SECONDS) if queue_refuses else self._settings.status_seconds
        return Reconciled(told, left if told.phase in TERMINAL else soon, calm)

    def _subject(self, document: Manifest) -> Subject:
        metadata = document["metadata"]
        labels = queue_labels(metadata.get("labels", {}))
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

    async def _record(self, subject: Subject, there: _There) -> tuple[Record | None, Manifest | None]:
        """What this generation is made of: as it is on record, with the object that says so, or as it follows from the
        one before. An edit that cannot be leaves everything as it was; None for what cannot be from the beginning.

        Raises:
            Foreign: an object that is not ours is in the record's place.
            LookedAfter: another operator wrote it, or the one before it.
        """
        place = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": subject.metadata(subject.record_name)}
        found = await self._observed(place, there)
        if found is not None:
            memory, uid = self._memory(subject), found["metadata"]["uid"]
            if memory.record is None or memory.record[0] != uid:
                known = read_record(subject, found, self._key)
                memory.record = None if known is None else (uid, known)
            if memory.record is not None:
                return memory.record[1], {**found, "metadata": place["metadata"]}
            if subject.uid not in {owner["uid"] for owner in found["metadata"].get("ownerReferences", ())}:
                raise Foreign(_in_the_way({"kind": "ConfigMap", **found}))
            _refuse_anothers(subject, found)
            await self._cluster.delete(found)
        return self._new_record(subject, self._earlier_record(subject, there)), None

    def _earlier_record(self, subject: Subject, there: _There) -> Record | None:
        """What the generation before this one was made of, as far as it is on record."""
        for generation in range(subject.generation - 1, 0, -1):
            found = there.get(("ConfigMap", replace(subject, generation=generation).record_name))
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

    async def _there(self, subject: Subject) -> _There:
        """A few lists cost both sides less than a question for each object."""
        return {
            (kind, each["metadata"]["name"]): each
            for api_version, kind in _KINDS
            for each in await self._cluster.list(api_version, kind, subject.namespace, subject.own_labels)
        }

    async def _bring_about(
        self, subject: Subject, record: Record, status: ExperimentStatus, pods: Sequence[Manifest], there: _There
    ) -> tuple[str, str | None]:
        """Make all objects what they should be; returns the experiment's token, and why its queue does not take the
        trainers yet if it does not.

        Raises:
            Foreign: an object that is not ours is in the way.
            Refused: the API server does not take one.
            Conflict: somebody else was faster.
        """
        secret = await self._keep(subject, token_secret(subject, token_of(self._key, subject.uid)), there)
        if (claim := volume_claim(subject)) is not None:
            await self._claim(claim, there)
        refusal = None
        for manifest in record.manifests:
            if manifest.get("immutable"):
                await self._keep(subject, manifest, there)
                continue
            wanted = overlaid(manifest, status, pods, self._now())
            try:
                await self._apply(subject, wanted, there)
            except NotYet as error:
                refusal = str(error)
        return base64.b64decode(secret["data"][TOKEN_KEY]).decode(), refusal

    async def _keep(self, subject: Subject, wanted: Manifest, there: _There) -> Manifest:
        """An object whose data are decided once, by whoever makes it; returns it with them."""
        found = await self._observed(wanted, there)
        if found is None:
            return await self._cluster.create(wanted)
        await self._apply(subject, {**wanted, "data": found.get("data", {})}, there)
        return found

    async def _claim(self, wanted: Manifest, there: _There) -> None:
        """A volume's claim stays as it was made, and one that an experiment of the same name left is taken over.
        Whether it goes with the experiment may change: its owner says so."""
        found = await self._observed(wanted, there)
        if found is None:
            await self._cluster.create(wanted)
        elif not is_ours(wanted, found, by_owner=False):
            raise Foreign(_in_the_way(wanted))
        elif "deletionTimestamp" in found["metadata"]:
            return  # It goes once no pod uses it, and then comes anew.
        elif (owners := wanted["metadata"].get("ownerReferences", [])) != found["metadata"].get("ownerReferences", []):
            metadata = {**found["metadata"], "labels": wanted["metadata"]["labels"], "ownerReferences": owners}
            await self._cluster.replace({**found, "metadata": metadata})

    async def _observed(self, wanted: Manifest, there: _There) -> Manifest | None:
        """The object of that name. One that is not ours has not our labels, and one of ours may have lost them."""
        kind, metadata = wanted["kind"], wanted["metadata"]
        found = there.get((kind, metadata["name"]))
        if found is not None:
            return found
        return await self._cluster.get(wanted["apiVersion"], kind, metadata["namespace"], metadata["name"])

    async def _apply(self, subject: Subject, wanted: Manifest, there: _There) -> None:
        kind, name = wanted["kind"], wanted["metadata"]["name"]
        known = self._memory(subject).applied
        observed = await self._observed(wanted, there)
        wanted = stepwise(wanted, observed)
        what = step(wanted, observed, known.get((kind, name)))
        if what is Step.CONFLICT:
            raise Foreign(_in_the_way(wanted))
        if what is Step.NOTHING:
            return
        try:
            written = await self._cluster.apply(wanted)
        except Refused as error:
            if observed is None:
                raise
            if begins_in_queue(wanted, observed):
                raise NotYet(str(error)) from error
            written = await self._cluster.replace(whole(wanted, observed))
        if is_overruled(written):
            written = await self._cluster.replace(whole(wanted, written))
        known[kind, name] = applied(wanted, written)
        _log.info("applied", experiment=str(Key(subject.namespace, subject.name)), kind=kind, name=name)

    async def _refusal(self, subject: Subject, status: ExperimentStatus, pods: Sequence[Manifest]) -> str | None:
        """Why a role has no pod at all, if its controller may not make any: a quota, an admission policy."""
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
        self, subject: Subject, status: ExperimentStatus, token: str, now: datetime
    ) -> Mapping[str, Any] | None:
        """The coordinator's page, if it is time for one."""
        if status.phase != "Running":
            return None
        memory = self._memory(subject)
        if memory.asked_at is not None and (now - memory.asked_at).total_seconds() < self._settings.status_seconds:
            return None
        memory.asked_at = now
        return await self._numbers.ask(f"{subject.name_of(COORDINATOR)}.{subject.namespace}.svc", token)

    async def _prune(self, subject: Subject, record: Record, there: _There) -> None:
        """Remove what earlier generations needed and this one does not, once."""
        memory = self._memory(subject)
        if memory.pruned == subject.generation:
            return
        wanted = {(each["kind"], each["metadata"]["name"]) for each in record.manifests}
        wanted.add(("ConfigMap", subject.record_name))
        for (kind, name), found in there.items():
            owners = {owner["uid"] for owner in found["metadata"].get("ownerReferences", ())}
            if kind in _PRUNED and subject.uid in owners and (kind, name) not in wanted:
                await self._cluster.delete(found)
        memory.pruned = subject.generation

    async def _say(self, document: Manifest, before: ExperimentStatus, status: ExperimentStatus) -> str:
        """Write the status if it is another than the document has; returns the document's resourceVersion then."""
        written = statuses.write(status)
        if written == (document.get("status") or {}):
            return str(document["metadata"]["resourceVersion"])
        told = {**document, "status": written}
        answer = await self._cluster.replace_status(told)
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


def _in_the_way(wanted: Manifest) -> str:
    return f"{wanted['kind']} {wanted['metadata']['name']} is there already, and not this experiment's"
