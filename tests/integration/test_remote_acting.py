"""An actor takes the same actions with the exported actor, torch, a policy worker over gRPC or threads."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import ResolvedExperiment, resolve
from rlsrl.api.resolved import ActorConfig, PolicyWorkerConfig
from rlsrl.data.slots import rollout_layout
from rlsrl.data.version import Version
from rlsrl.envs.factory import environment_spec
from rlsrl.parameters.broadcast import BroadcastPublisher
from rlsrl.parameters.protocols import Parameters
from rlsrl.runtime.ledger import TrainerLedger
from rlsrl.runtime.worker import Worker
from rlsrl.streams.consumer_core import ConsumerOptions
from rlsrl.streams.shared_memory.consumer import SharedMemoryConsumer
from rlsrl.testing.contexts import TOKEN, make_context
from rlsrl.workers.actor import ActorWorker
from rlsrl.workers.build.common import EXPORTED_ACTOR_KEY, environment_source, torch_policy
from rlsrl.workers.policy import PolicyWorker

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: alike}}
spec:
  seed: 5
  environment: {{id: {environment}}}
  algorithm: {{ppo: {{minibatchSize: 32}}}}
  actors: {{environments: 4, rolloutLength: 40, ringSize: {ring_size}}}
  policyWorkers: {{replicas: 1}}
  stop: {{trainSteps: 1}}
"""
VERSION = Version(1, 0)
NUM_SLOTS = 6
DEADLINE = 60.0
Rollouts = list[dict[str, np.ndarray]]


class ActorSetup:
    """The surroundings of one actor: constant weights, and a consumer of its slots."""

    def __init__(self, folder: Path, resources: ExitStack, environment: str, ring_size: int = 1) -> None:
        experiment = load_text(EXPERIMENT.format(environment=environment, ring_size=ring_size).encode())
        placement = local_placement(run_uid=uuid.uuid4().hex[:12], run_folder=folder)
        self.resolved: ResolvedExperiment = resolve(experiment, placement)
        self._folder = folder
        self._resources = resources
        actor = self.resolved.actor
        env_spec = environment_spec(environment_source(actor.environment))
        self._layout = rollout_layout(env_spec, num_steps=actor.rollout_length, num_lanes=1)
        self._policy = torch_policy(actor.network, env_spec, outputs=actor.outputs, seed=actor.seed)
        vector = np.random.default_rng(3).standard_normal(self._policy.layout.num_parameters).astype(np.float32) / 4
        self._parameters = Parameters(version=VERSION, vector=vector, layout=self._policy.layout.digest)

    def publish(self, *, exports: bool) -> None:
        exported = self._policy.export()
        assert exported is not None
        assert self.resolved.actor.parameters_endpoint is not None
        publisher = BroadcastPublisher(
            self.resolved.actor.parameters_endpoint,
            TOKEN,
            {EXPORTED_ACTOR_KEY: exported.to_json() if exports else None},
        )
        self._resources.callback(publisher.close)
        publisher.publish(self._parameters)

    def gather(self, worker: Worker[ActorConfig], config: ActorConfig) -> Rollouts:
        """Return the first slots that the actor fills, in the order of their credits."""
        ledger = TrainerLedger(self._resources.enter_context(make_context("trainer", self._folder).open_ledger_page()))
        ledger.resume(None)
        consumer = SharedMemoryConsumer(
            self.resolved.trainer.samples_endpoints[0],
            ConsumerOptions(
                token=TOKEN,
                layout_digest=self._layout.step_digest,
                ledger=ledger,
                slots_per_producer=NUM_SLOTS * config.ring_size,
            ),
        )
        self._resources.callback(consumer.close)
        num_slots = NUM_SLOTS * config.ring_size
        consumer.grant(num_slots * 4 // config.ring_size, VERSION)
        slots: dict[int, dict[str, np.ndarray]] = {}
        with running(worker, config):
            while len(slots) < num_slots:
                for slot in consumer.receive(num_slots, timeout=DEADLINE):
                    slots[slot.credit] = {name: array.copy() for name, array in slot.arrays.items()}
                    consumer.release(slot)
        return [slots[order] for order in sorted(slots)]


@contextmanager
def running(worker: Worker[Any], config: Any) -> Iterator[None]:
    """Run the worker in a thread for the duration of the context."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            worker.configure(config)
            worker.run()
        except BaseException as failure:  # noqa: BLE001 - raised below
            failures.append(failure)

    worker.start()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        worker.exit()
        thread.join(DEADLINE)
    assert failures == []


def gather(folder: Path, kind: str, environment: str, ring_size: int = 1, incarnation: int = 0) -> Rollouts:
    """Return rollouts of an actor of that kind.

    ``kind`` selects who evaluates the policy: the actor or a policy worker ("remote"), with the exported actor or with
    torch. A ``kind`` may also be the actor's vectorization.
    """
    folder.mkdir()
    with ExitStack() as resources:
        setup = ActorSetup(folder, resources, environment, ring_size)
        setup.publish(exports="torch" not in kind)
        context = make_context("actor", folder, incarnation=incarnation)
        if "remote" not in kind:
            vectorization = kind if kind in ("native", "threads") else "loop"
            changes = {"inference_endpoints": (), "vectorization": vectorization}
            config = setup.resolved.actor.model_copy(update=changes)
            return setup.gather(ActorWorker(context), config)
        policy = setup.resolved.configs["policy"]
        assert isinstance(policy, PolicyWorkerConfig)
        with running(PolicyWorker(make_context("policy", folder)), policy):
            return setup.gather(ActorWorker(context), setup.resolved.actor)


@pytest.mark.parametrize("environment", ["CartPole-v1", "Pendulum-v1"])
def test_actions_do_not_depend_on_where_the_policy_is_evaluated(tmp_path: Path, environment: str) -> None:
    kinds = ("exported", "torch", "remote", "remote torch", "threads")
    by_kind = {kind: gather(tmp_path / kind, kind, environment) for kind in kinds}
    exact = environment == "CartPole-v1"
    for kind in kinds[1:]:
        for expected, actual in zip(by_kind["exported"], by_kind[kind], strict=True):
            for name in ("observation", "reward", "terminated", "mask", "action"):
                np.testing.assert_allclose(actual[name], expected[name], rtol=0, atol=0 if exact else 1e-3)
            np.testing.assert_allclose(actual["behavior_log_prob"], expected["behavior_log_prob"], atol=1e-5)
            assert (actual["version_step"] == VERSION.step).all()
    for kind, remote_kind in (("exported", "remote"), ("torch", "remote torch")):
        for local, remote in zip(by_kind[kind], by_kind[remote_kind], strict=True):
            for name, array in local.items():
                np.testing.assert_array_equal(remote[name], array, err_msg=f"{name} by {kind}")


def test_groups_share_the_environments(tmp_path: Path) -> None:
    alone = gather(tmp_path / "alone", "remote", "CartPole-v1")
    ring = gather(tmp_path / "ring", "remote", "CartPole-v1", ring_size=2)
    first, second = ring[0], ring[1]
    assert first["mask"].shape == second["mask"].shape == (40, 2)
    starts = np.concatenate([first["observation"][0], second["observation"][0]])
    np.testing.assert_array_equal(starts, alone[0]["observation"][0])
    assert not np.array_equal(first["action"], second["action"])


@pytest.mark.parametrize("kind", ["exported", "remote", "native", "threads"])
def test_a_restarted_actor_plays_other_episodes(tmp_path: Path, kind: str) -> None:
    first, second = (
        gather(tmp_path / str(incarnation), kind, "CartPole-v1", incarnation=incarnation) for incarnation in range(2)
    )
    assert not np.isin(first[0]["observation"][0], second[0]["observation"][0]).any()
    assert not np.array_equal(first[0]["action"], second[0]["action"])
