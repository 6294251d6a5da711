"""Every way to be refused, by API calls in a minute: the operator reports it once and looks twice a minute.

``tests/e2e/test_refusals.py`` has the same table on a real cluster, by the API server's audit log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
from operator_world import NAME, Counting, World
from structlog.testing import capture_logs

from rlsrl.api.reasons import ACCEPTED, READY, ConditionType
from rlsrl_operator.manifests import Manifest
from rlsrl_operator.plan import QUEUE_SECONDS
from rlsrl_operator.reconcile import Reconciler
from rlsrl_operator.settings import SecretName
from rlsrl_operator.status import read
from rlsrl_operator.testing import SETTINGS

MAX_CALLS = 10
"""In a minute, reads and writes of the operator."""
MAX_LOOKS = 2
"""In a minute, passes over the experiment."""
SETTLING_SECONDS = 60.0
KINDS = (
    *("ConfigMap", "Secret", "PersistentVolumeClaim", "Service"),
    *("NetworkPolicy", "StatefulSet", "Deployment"),
)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A way to be refused, and how it is reported."""

    begin: Callable[[World], object]
    end: Callable[[World], object]
    """The cure."""
    condition: ConditionType = ACCEPTED
    reason: str = "ObjectRefused"


def forbidding(*writes: str, status: int = 403, message: str = "exceeded quota: none") -> Refusal:
    """Writes that begin so are refused: verb, kind and name, or what follows the verb."""

    def begin(world: World) -> None:
        world.server.refusal = status, message
        world.server.forbids = lambda write: write.partition(" ")[2].startswith(writes)

    return Refusal(begin=begin, end=allow)


def allow(world: World) -> None:
    world.server.forbids = lambda _: False


def taken(kind: str, name: str) -> Refusal:
    """Somebody else's object has that name."""

    def begin(world: World) -> None:
        world.server.put({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}})

    return Refusal(begin=begin, end=lambda world: world.server.remove(kind, name), reason="NameConflict")


def pods_up_to(number: int) -> Refusal:
    """A quota, a limit range or an admission policy lets controllers create so many pods."""

    def begin(world: World) -> None:
        world.max_pods = number

    def end(world: World) -> None:
        world.max_pods = 1000

    return Refusal(begin=begin, end=end, condition=READY, reason="FailedCreate")


def objects_of_an_experiment() -> list[tuple[str, str]]:
    world = World()
    world.settle()
    kinds = {"RLExperiment", "Pod", "Event"}
    return sorted((kind, name) for kind, _, name in world.server.objects if kind not in kinds)


REFUSALS: Mapping[str, Refusal] = {
    **{f"a quota of {kind}": forbidding(f"{kind} ") for kind in KINDS},
    "a limit range for volumes": forbidding("PersistentVolumeClaim", message="maximum storage usage is 1Gi"),
    **{
        f"a webhook that denies {kind} with status {status}": forbidding(f"{kind} ", status=status, message="denied")
        for kind in ("Secret", "Service", "Deployment")
        for status in (400, 403, 409, 418, 422)
    },
    "a webhook that does not answer": forbidding(
        "Service ", status=500, message="Internal error occurred: failed calling webhook"
    ),
    **{f"a name that is taken: {kind} {name}": taken(kind, name) for kind, name in objects_of_an_experiment()},
    **{f"a quota of {number} pods": pods_up_to(number) for number in (0, 1, 2, 3)},
}


def calls(world: World) -> int:
    return len(world.server.reads) + len(world.server.writes)


def status_writes(world: World) -> int:
    return world.server.writes.count(f"replace RLExperiment/status {NAME}")


def message_of(world: World, condition_type: str) -> str:
    conditions: list[Manifest] = world.document["status"]["conditions"]
    return str(next(each["message"] for each in conditions if each["type"] == condition_type))


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_settles_is_logged_once_and_ends_with_its_cause(refusal: Refusal) -> None:
    world = World()
    refusal.begin(world)
    with capture_logs() as logs:
        world.run_for(SETTLING_SECONDS)
        assert world.condition(refusal.condition) == ("False", refusal.reason)
        for _ in range(3):
            calls_before, writes_before = calls(world), status_writes(world)
            assert world.run_for(60) <= MAX_LOOKS
            assert calls(world) - calls_before <= MAX_CALLS
            assert status_writes(world) == writes_before, "nothing has changed"
    (blocked,) = (each for each in logs if each["event"] == "blocked")
    assert blocked["reason"] == refusal.reason
    assert blocked["message"] in message_of(world, refusal.condition)
    refusal.end(world)
    world.run_for(60)
    assert world.condition(READY) == ("True", "Ready")
    assert world.condition(ACCEPTED) == ("True", "Accepted")


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_is_written_to_the_status_once(refusal: Refusal) -> None:
    world = World()
    refusal.begin(world)
    world.run_for(SETTLING_SECONDS)
    warnings = [each for each in world.server.of_kind("Event") if each.get("type") == "Warning"]
    assert [each["reason"] for each in warnings] == [refusal.reason]
    # The attempt, written ahead; pods are being created; the trainers are ready; what is refused.
    assert status_writes(world) <= 4


def test_a_run_whose_actors_are_refused_is_reported_rarely() -> None:
    """Its numbers are different at each look."""
    world = World(Counting())
    world.settle()
    world.max_pods = 3
    world.server.remove("Pod", "a-actor-0")
    world.run_for(SETTLING_SECONDS)
    assert world.condition(READY) == ("False", "FailedCreate")
    assert read(world.document).phase == "Running"
    before, written = calls(world), status_writes(world)
    assert world.run_for(60) <= MAX_LOOKS
    assert calls(world) - before <= MAX_CALLS
    assert status_writes(world) > written, "it trains"


@pytest.mark.parametrize("kind", ["Service", "Secret", "Deployment"])
def test_a_refusal_during_a_run_settles_too(kind: str) -> None:
    world = World()
    world.settle()
    forbidding(f"{kind} ").begin(world)
    lost = world.server.of_kind(kind)[0]
    world.server.remove(kind, lost["metadata"]["name"])
    world.run_for(SETTLING_SECONDS)
    assert world.condition(ACCEPTED) == ("False", "ObjectRefused")
    assert message_of(world, ACCEPTED) == f"{kind} {lost['metadata']['name']}: exceeded quota: none"
    before, written = calls(world), status_writes(world)
    assert world.run_for(60) <= MAX_LOOKS
    assert calls(world) - before <= MAX_CALLS
    assert status_writes(world) == written


def test_a_queue_that_refuses_trainers_for_good_settles() -> None:
    world = World(queue="gpus")
    world.settle()
    world.end(world.pods()[1], exit_code=1)
    world.run_pass()
    forbidding("StatefulSet a-trainer").begin(world)
    with capture_logs() as logs:
        assert world.run_for(SETTLING_SECONDS) > SETTLING_SECONDS / QUEUE_SECONDS / 2, "it may be a matter of moments"
        before, written = calls(world), status_writes(world)
        assert world.run_for(60) <= MAX_LOOKS
        assert calls(world) - before <= MAX_CALLS
        assert status_writes(world) == written
    assert len([each for each in logs if each["event"] == "blocked"]) == 1
    allow(world)
    world.run_for(60)
    assert world.condition(READY) == ("True", "Ready")


def test_a_webhook_that_denies_the_status_is_asked_twice_a_minute() -> None:
    world = World()
    forbidding("RLExperiment/status").begin(world)
    with capture_logs() as logs:
        world.run_for(SETTLING_SECONDS)
        before = calls(world)
        assert world.run_for(60) <= MAX_LOOKS
        assert calls(world) - before <= MAX_CALLS
    (blocked,) = (each for each in logs if each["event"] == "blocked")
    assert (blocked["reason"], blocked["message"]) == ("StatusRefused", "exceeded quota: none")
    allow(world)
    world.run_for(60)
    assert world.condition(READY) == ("True", "Ready")


def test_events_that_are_refused_change_nothing_else() -> None:
    world = World()
    forbidding("Event ").begin(world)
    world.run_for(SETTLING_SECONDS)
    assert world.condition(READY) == ("True", "Ready")
    assert not world.server.of_kind("Event")


def test_an_experiment_of_another_operator_is_looked_at_twice_a_minute() -> None:
    world = World()
    world.settle()
    place = SecretName(namespace="elsewhere", name="its-key")
    theirs = SETTINGS.model_copy(update={"key_secret": place})
    world.reconciler = Reconciler(world.cluster, theirs, world.coordinator, key=b"another", now=lambda: world.now)
    world.due = world.now
    with capture_logs() as logs:
        world.run_for(SETTLING_SECONDS)
        before, written = calls(world), len(world.server.writes)
        assert world.run_for(60) <= MAX_LOOKS
        assert calls(world) - before <= MAX_CALLS
        assert len(world.server.writes) == written
    assert [each["reason"] for each in logs if each["event"] == "blocked"] == ["OtherOperator"]


def test_conflicts_in_a_row_are_retried_less_and_less() -> None:
    world = World()
    world.settle()
    world.edit(suspend=True)
    world.deliver_events()
    world.server.refuses = lambda write: write.startswith("replace RLExperiment/status")
    delays = [asyncio.run(world.reconciler.reconcile(world.key)) for _ in range(12)]
    assert delays[0] == 0.2
    assert delays == sorted(delays, key=lambda each: each or 0)
    assert delays[-1] == 30
    world.server.refuses = lambda _: False
    world.due = world.now
    world.run_for(60)
    assert world.condition(READY) == ("False", "Suspended")
