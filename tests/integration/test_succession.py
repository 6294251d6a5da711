"""Two coordinators of one run, as after a network cut: the newer one owns the run, and the older one exits."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from rlsrl.runtime.coordination import CoordinatorClient
from rlsrl.testing.pods import TOKEN, Pods
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: succeeded}
spec:
  environment: {id: CartPole-v1}
  algorithm: {ppo: {minibatchSize: 64}}
  actors: {replicas: 2, environments: 4, rolloutLength: 16}
  stop: {trainSteps: 1000000}
"""


def test_a_replaced_coordinator_writes_nothing_more_and_stays_down(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pods = Pods(EXPERIMENT, tmp_path, stack)
        # The later one hears nothing of the actor, and is not to write that down while the test compares.
        told = pods.resolved.coordinator.model_copy(update={"lease_seconds": 1000.0})
        earlier, first_host = pods.start("coordinator", told)
        pods.start("actor", pods.resolved.actor)
        until(lambda: pods.status()["roles"].get("actor"), "an actor has joined")

        later, second_host = pods.start("coordinator", told)
        address = told.coordinator_address.replace(first_host, second_host)
        client = stack.enter_context(closing(CoordinatorClient(address, TOKEN)))
        until(lambda: client.status(DEADLINE_SECONDS)["roles"] is not None, "the later one serves")
        assert told.roster_path is not None
        roster = Path(told.roster_path)
        before = roster.read_bytes()

        pods.start("actor", pods.resolved.actor)  # something to write down, for the earlier one
        assert earlier.wait(DEADLINE_SECONDS) == 1
        again, _ = pods.start("coordinator", told, host=first_host)
        assert again.wait(DEADLINE_SECONDS) == 1
        assert roster.read_bytes() == before
        assert pods.log("coordinator", first_host).count("has taken over from") >= 2

        later.kill()
        later.wait(DEADLINE_SECONDS)
        later, _ = pods.start("coordinator", told, host=second_host)
        until(lambda: client.status(DEADLINE_SECONDS)["roles"] is not None, "it is started again in its pod")
        assert later.poll() is None
