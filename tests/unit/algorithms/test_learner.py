from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlsrl.algorithms.adam import Adam
from rlsrl.algorithms.base import ERRORS, INDEX, POLICY, WEIGHT, Tensors, one_rank
from rlsrl.algorithms.custom import Setup
from rlsrl.algorithms.gradients import gathered
from rlsrl.algorithms.learner import Learner
from rlsrl.algorithms.normalizer import Normalizer
from rlsrl.algorithms.ppo import Ppo
from rlsrl.algorithms.schedules import LinearSchedule
from rlsrl.api.spec import AlgorithmNeeds, CustomAlgorithmSpec
from rlsrl.data.random_slots import empty_slot, random_slot
from rlsrl.data.slots import DISCOUNTED_RETURN, Slot, rollout_layout
from rlsrl.data.version import Version
from rlsrl.envs.returns import DiscountedReturns
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.build import build_network, seeded
from rlsrl.policies.exported import LayoutMismatch
from rlsrl.policies.networks import MlpActorCritic, MlpPolicy
from rlsrl.policies.numpy_policy import NumpyActor
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.testing.actor_and_critic import ActorAndCritic
from rlsrl.testing.rollouts import continuous_env_spec, discrete_env_spec

ENV_SPEC = discrete_env_spec(num_features=4, num_actions=2)
NUM_STEPS, NUM_LANES = 16, 8
PPO: dict[str, Any] = {
    "discount": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "clip_value_loss": True,
    "entropy_coefficient": 0.01,
    "value_coefficient": 0.5,
    "epochs": 2,
    "minibatch_size": 32,
    "normalize_advantages": True,
}
LEARNER: dict[str, Any] = {"learning_rate": 1e-3, "optimizer": Adam(epsilon=1e-5, max_gradient_norm=0.5), "seed": 3}
NUM_MINIBATCHES = 2 * NUM_STEPS * NUM_LANES // 32


def make_policy(hidden: int = 16) -> TorchPolicy:
    return TorchPolicy(build_network(MlpActorCritic, ENV_SPEC, {"hidden_sizes": (hidden,)}, seed=0), ENV_SPEC)


def make_learner(*, initial: Parameters | None = None, seed: int = 3, normalized: bool = True) -> Learner:
    """A learner with every kind of state: both statistics, and schedules."""
    policy = make_policy()
    schedules = {"clip_range": LinearSchedule(start=0.2, end=0.1, env_steps=1000)}
    return Learner(
        Ppo(policy, **PPO | schedules),
        initial or policy.parameters(Version(1, 0)),
        normalizer=Normalizer(ENV_SPEC.observation, rewards=True) if normalized else None,
        **LEARNER | {"seed": seed, "learning_rate": LinearSchedule(start=1e-3, end=0.0, env_steps=1000)},
    )


def make_slots(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    slots = random_slot(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng).arrays
    slots[DISCOUNTED_RETURN] = rng.standard_normal((NUM_STEPS, NUM_LANES)).astype(np.float32)
    return slots


def test_only_the_thread_that_makes_the_steps_uses_the_learners_threads() -> None:
    policy = make_policy()
    learner = Learner(Ppo(policy, **PPO), policy.parameters(Version(1, 0)), **LEARNER, threads=2)

    def number_of_threads() -> int:
        learner.use_threads()
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(number_of_threads).result() == 2
    assert torch.get_num_threads() == 1, "threads have numbers of their own"
    torch.set_num_threads(1)  # for threads to come


def vector_of(learner: Learner) -> np.ndarray:
    return learner.parameters(Version(1, 0)).vector


def everything(learner: Learner) -> dict[str, bytes]:
    arrays, values = learner.state_dict()
    state = {path: array.tobytes() for path, array in arrays.items()}
    state |= {path: array.tobytes() for path, array in learner.parameters(Version(1, 0)).statistics.items()}
    return state | {"params": vector_of(learner).tobytes(), "values": json.dumps(values).encode()}


def test_counts_steps_and_reports() -> None:
    learner, slots = make_learner(), make_slots(0)
    before = vector_of(learner)
    results = [learner.step(slots) for _ in range(2)]
    assert [result.step for result in results] == [1, 2]
    assert [result.optimizer_steps for result in results] == [NUM_MINIBATCHES, 2 * NUM_MINIBATCHES]
    assert [result.skipped for result in results] == [0, 0]
    assert results[0].num_transitions == int(slots["mask"].sum())
    assert not np.array_equal(before, vector_of(learner))
    assert {"loss", "policy_loss", "value_loss", "entropy", "approx_kl", "gradient_norm", "explained_variance"} <= set(
        results[0].metrics
    )
    assert all(isinstance(value, float) and np.isfinite(value) for value in results[0].metrics.values())


def test_parameters_are_read_only_copies_under_the_name_given() -> None:
    learner = make_learner()
    parameters = learner.parameters(Version(4, 2))
    assert parameters.version == (4, 2)
    assert parameters.layout == make_policy().layout.digest
    assert not parameters.vector.flags.writeable
    before = parameters.vector.copy()
    learner.step(make_slots(0))
    assert np.array_equal(parameters.vector, before)


def test_equal_seeds_and_batches_give_equal_bits() -> None:
    def trained(seed: int) -> dict[str, bytes]:
        learner = make_learner(seed=seed)
        for k in range(3):
            learner.step(make_slots(k))
        return everything(learner)

    assert trained(3) == trained(3)
    assert trained(3)["params"] != trained(4)["params"], "the seed orders the minibatches"


RESUME = """
    import json, sys
    from pathlib import Path
    import numpy as np
    sys.path.insert(0, sys.argv[2])
    import test_learner as t
    folder = Path(sys.argv[1])
    with np.load(folder / "state.npz", allow_pickle=False) as state:
        arrays = {path: state[path] for path in state.files}
    vector = arrays.pop("params")
    initial = t.Parameters(version=t.Version(1, 2), vector=vector, layout=t.make_policy().layout.digest)
    learner = t.make_learner(initial=initial, seed=999)
    learner.load_state_dict(arrays, json.loads((folder / "values.json").read_text()))
    for k in (2, 3):
        result = learner.step(t.make_slots(k))
    print(json.dumps({"step": result.step, "optimizer_steps": result.optimizer_steps, "everything":
        {path: content.hex() for path, content in t.everything(learner).items()}}))
"""


def test_resuming_in_a_new_process_gives_the_same_bits_as_never_stopping(tmp_path: Path) -> None:
    learner = make_learner()
    for k in (0, 1):
        learner.step(make_slots(k))
    arrays, values = learner.state_dict()
    np.savez(tmp_path / "state.npz", params=vector_of(learner), **arrays)
    (tmp_path / "values.json").write_text(json.dumps(values))
    for k in (2, 3):
        result = learner.step(make_slots(k))
    command = [sys.executable, "-c", textwrap.dedent(RESUME), str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    resumed = json.loads(done.stdout)
    assert resumed["step"] == result.step == 4
    assert resumed["optimizer_steps"] == result.optimizer_steps == 4 * NUM_MINIBATCHES
    assert resumed["everything"] == {path: content.hex() for path, content in everything(learner).items()}


def test_state_is_a_copy() -> None:
    learner = make_learner()
    learner.step(make_slots(0))
    arrays, values = learner.state_dict()
    before = {path: array.copy() for path, array in arrays.items()}, json.dumps(values)
    learner.step(make_slots(1))
    assert all(np.array_equal(array, arrays[path]) for path, array in before[0].items())
    assert json.dumps(values) == before[1]


def _without(state: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("change_arrays", "change_values", "error"),
    [
        (lambda a: _without(a, "optimizer/num_steps"), dict, ValueError),
        (lambda a: _without(a, "normalizer/return/count"), dict, ValueError),
        (lambda a: {**a, "state/target": np.zeros(3)}, dict, ValueError),
        (lambda a: {**a, "optimizer/first_moment": np.zeros(3, np.float32)}, dict, ValueError),
        (dict, lambda v: _without(v, "schedule_rng"), KeyError),
        (dict, lambda v: _without(v, "step"), KeyError),
        (dict, lambda v: _without(v, "env_steps"), KeyError),
        (dict, lambda v: {**v, "schedule_rng": {"bit_generator": "MT19937"}}, ValueError),
        (dict, lambda v: {**v, "layout": "other"}, LayoutMismatch),
    ],
)
def test_the_state_of_another_algorithm_is_refused_and_changes_nothing(
    change_arrays: Any, change_values: Any, error: type[Exception]
) -> None:
    donor, learner = make_learner(), make_learner()
    donor.step(make_slots(0))
    arrays, values = donor.state_dict()
    before = everything(learner)
    with pytest.raises(error):
        learner.load_state_dict(change_arrays(arrays), change_values(values))
    assert everything(learner) == before


def test_masked_values_change_nothing() -> None:
    clean = make_slots(0)
    clean["mask"][:, 3] = False
    dirty = {path: array.copy() for path, array in clean.items()}
    hidden = ~dirty["mask"]
    assert hidden[:, :3].any(), "there are resets beside the absent lane"
    dirty["action"][hidden] = 10**9
    for path in ("reward", "behavior_log_prob", "episode_return", DISCOUNTED_RETURN):
        dirty[path][hidden] = np.nan
    for path in ("terminated", "truncated"):
        dirty[path][hidden] = True
    dirty["observation"][:, 3] = np.nan
    results, learners = [], [make_learner(), make_learner()]
    for learner, slots in zip(learners, (clean, dirty), strict=True):
        results.append(learner.step(slots))
    assert results[0] == results[1]
    assert results[0].skipped == 0
    assert everything(learners[0]) == everything(learners[1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("reward", [np.inf, np.nan, 3e38])
def test_a_step_that_is_not_finite_is_skipped_and_counted(reward: float) -> None:
    learner, slots = make_learner(normalized=False), make_slots(0)
    learner.step(slots)
    before = everything(learner)
    broken = {path: array.copy() for path, array in slots.items()}
    broken["reward"][...] = reward
    result = learner.step(broken)
    after = everything(learner)
    assert result.skipped == NUM_MINIBATCHES
    assert result.num_untrained == result.num_transitions == np.count_nonzero(broken["mask"])
    assert (result.step, result.optimizer_steps) == (2, NUM_MINIBATCHES)
    assert {path for path in before if before[path] != after[path]} == {"values"}, (
        "only the step count and the order change"
    )
    assert "loss" not in result.metrics
    assert np.isfinite(list(result.metrics.values())).all()
    again = learner.step(slots)
    assert (again.skipped, again.num_untrained) == (0, 0)


class RecordingPpo(Ppo):
    """Keeps its last schedule."""

    def schedule(self, *arguments: Any) -> Tensors:
        self.last = super().schedule(*arguments)
        return self.last


@pytest.mark.parametrize("epochs", [1, 2])
def test_transitions_of_which_every_minibatch_was_skipped_are_untrained(epochs: int) -> None:
    """The placeholders of masked rows repeat the first transition, and train nothing."""
    policy, slots = make_policy(), make_slots(0)
    assert not slots["mask"].all()
    algorithm = RecordingPpo(policy, **PPO | {"epochs": epochs})
    learner = Learner(algorithm, policy.parameters(Version(1, 0)), **LEARNER)
    t, lane = np.argwhere(slots["mask"])[0]
    slots["behavior_log_prob"][t, lane] = np.nan
    result = learner.step(slots)
    index, weight = (algorithm.last[name].numpy() for name in (INDEX, WEIGHT))
    rows = [
        {int(row) for row, share in zip(*pair, strict=True) if share > 0} for pair in zip(index, weight, strict=True)
    ]
    trained = set().union(*(mine for mine, taken in zip(rows, result.taken, strict=True) if taken))
    assert result.skipped == epochs
    assert result.num_untrained == np.count_nonzero(slots["mask"]) - len(trained) > 0
    assert t * NUM_LANES + lane not in trained


class PpoWithErrors(RecordingPpo):
    """Each row's error says what is in it."""

    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        loss, metrics = super().loss(params, state, minibatch)
        return loss, {**metrics, ERRORS: minibatch["observation"][:, 0]}


def test_each_row_has_the_error_of_its_minibatches_that_were_not_skipped() -> None:
    policy, slots = make_policy(), make_slots(0)
    algorithm = PpoWithErrors(policy, **PPO | {"epochs": 1})
    learner = Learner(algorithm, policy.parameters(Version(1, 0)), **LEARNER)
    t, lane = np.argwhere(slots["mask"])[5]
    slots["behavior_log_prob"][t, lane] = np.nan
    result = learner.step(slots)
    assert result.skipped == 1
    index = algorithm.last[INDEX].numpy()
    expected = np.full(slots["mask"].size, np.nan, np.float32)
    taken = np.unique(index[np.array(result.taken)])
    expected[taken] = slots["observation"][:-1, :, 0].reshape(-1)[taken]
    np.testing.assert_array_equal(result.errors, expected)
    assert np.isnan(expected[t * NUM_LANES + lane])
    assert ERRORS not in result.metrics


def test_a_version_is_always_finite() -> None:
    learner, slots = make_learner(), make_slots(0)
    t, lane = np.argwhere(slots["mask"])[5]
    slots["observation"][t, lane] = np.nan
    slots[DISCOUNTED_RETURN][t, lane] = np.inf
    result = learner.step(slots)
    assert result.metrics["non_finite_transitions"] == 1
    assert result.skipped == PPO["epochs"]
    assert np.isfinite(list(result.metrics.values())).all()
    parameters = learner.parameters(Version(1, 1))
    assert all(np.isfinite(array).all() for array in (parameters.vector, *parameters.statistics.values()))


@pytest.mark.parametrize("log_prob", [np.nan, -800.0], ids=["no number", "impossible"])
@pytest.mark.parametrize("which", [0, 5], ids=["the first", "another"])
def test_one_bad_row_spoils_only_the_minibatches_it_is_in(which: int, log_prob: float) -> None:
    learner, slots = make_learner(), make_slots(0)
    assert not slots["mask"].all()
    t, lane = np.argwhere(slots["mask"])[which]
    slots["behavior_log_prob"][t, lane] = log_prob
    result = learner.step(slots)
    assert result.skipped == PPO["epochs"]
    assert result.optimizer_steps == NUM_MINIBATCHES - PPO["epochs"]
    assert np.isfinite(vector_of(learner)).all()
    assert np.isfinite(list(result.metrics.values())).all(), "means are over the minibatches taken"


def test_schedules_follow_the_trained_transitions_and_reach_their_end() -> None:
    learner, trained = make_learner(), 0
    for k in range(12):
        slots = make_slots(k)
        before = vector_of(learner)
        metrics = learner.step(slots).metrics
        progress = min(trained / 1000, 1.0)
        assert metrics["learning_rate"] == pytest.approx(1e-3 * (1 - progress))
        assert metrics["clip_range"] == pytest.approx(0.2 - 0.1 * progress)
        assert metrics["entropy_coefficient"] == PPO["entropy_coefficient"]
        assert np.array_equal(before, vector_of(learner)) == (progress == 1.0), "a learning rate of 0 changes nothing"
        trained += int(slots["mask"].sum())
    assert trained > 1000


def test_schedules_follow_the_env_steps_that_the_caller_counts() -> None:
    learner = make_learner()
    for number in (0, 250, 0):
        metrics = learner.step(make_slots(0), env_steps=number).metrics
    assert metrics["learning_rate"] == pytest.approx(1e-3 * 0.75)
    assert learner.state_dict()[1]["env_steps"] == 250


def test_within_one_version_acting_and_training_see_the_same() -> None:
    """The actor writes the log-probabilities that training starts with."""
    env_spec = continuous_env_spec(num_features=4, num_dimensions=2)
    policy = TorchPolicy(build_network(MlpActorCritic, env_spec, {}, seed=0), env_spec)
    settings = PPO | {"epochs": 1, "minibatch_size": NUM_STEPS * NUM_LANES}
    learner = Learner(
        Ppo(policy, **settings),
        policy.parameters(Version(1, 0)),
        normalizer=Normalizer(env_spec.observation),
        **LEARNER | {"learning_rate": 0.05},
    )
    program = policy.export()
    assert program is not None
    actor = NumpyActor(program, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(0))
    for step in range(6):
        slot = random_slot(env_spec, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(step))
        slot.arrays["observation"][...] = slot.arrays["observation"] * [0.1, 5.0, 30.0, 1.0] + [
            3.0,
            2.0 * step,
            0.0,
            -9.0,
        ]
        actor.load(learner.parameters(Version(1, step)))
        actor.begin(slot)
        for t in range(NUM_STEPS):
            actor.act(t)
        actor.finish()
        metrics = learner.step(slot.arrays).metrics
        assert 0.0 <= metrics["behavior_kl"] < 1e-7, f"version {step}"


def test_one_intra_op_thread() -> None:
    torch.set_num_threads(2)
    make_learner()
    assert torch.get_num_threads() == 1


class Multiplying(Ppo):
    """PPO that notes, during a step, what a product below float32's normal numbers is in a thread."""

    products: ClassVar[list[float]] = []

    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        thread = threading.Thread(target=lambda: self.products.append(subnormal_product()))
        thread.start()
        thread.join()
        self.products.append(subnormal_product())
        return super().loss(params, state, minibatch)


def subnormal_product() -> float:
    return float(torch.tensor(1e-30) * torch.tensor(1e-10))


def test_a_step_and_the_threads_that_it_starts_compute_with_zero_instead_of_subnormal_numbers() -> None:
    policy = make_policy()
    learner = Learner(Multiplying(policy, **PPO), policy.parameters(Version(1, 0)), **LEARNER)
    Multiplying.products.clear()
    learner.step(make_slots(0))
    assert set(Multiplying.products) == {0.0}
    assert subnormal_product() > 0.0, "other code of this thread is unaffected"


class Averaging(Ppo):
    """PPO that also keeps a running mean of the parameters, as an algorithm with a target network does."""

    def initial_state(self, params: Tensors) -> Tensors:
        return {"mean": params[POLICY].clone(), "count": torch.zeros((), dtype=torch.int64)}

    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        loss, metrics = super().loss(params, state, minibatch)
        return loss + 0.1 * (params[POLICY] - state["mean"]).square().sum(), metrics

    def update_state(self, params: Tensors, state: Tensors) -> Tensors:
        return {"mean": torch.lerp(state["mean"], params[POLICY], 0.1), "count": state["count"] + 1}


def test_an_algorithms_state_is_updated_and_saved() -> None:
    policy = make_policy()

    def averaging(initial: Parameters) -> Learner:
        return Learner(Averaging(policy, **PPO), initial, **LEARNER)

    straight = averaging(policy.parameters(Version(1, 0)))
    straight.step(make_slots(0))
    resumed = averaging(straight.parameters(Version(1, 1)))
    arrays, values = straight.state_dict()
    assert int(arrays["state/count"]) == NUM_MINIBATCHES
    resumed.load_state_dict(arrays, json.loads(json.dumps(values)))
    for learner in (straight, resumed):
        learner.step(make_slots(1))
    assert everything(straight) == everything(resumed)


def two_groups(initial: Parameters | None = None, **kwargs: Any) -> Learner:
    """A learner whose critic is a group of its own."""
    network = build_network(MlpPolicy, ENV_SPEC, {"hidden_sizes": (16,)}, seed=0, outputs="policy")
    policy = TorchPolicy(network, ENV_SPEC, outputs="policy")
    needs = AlgorithmNeeds(minibatch_size=NUM_STEPS * NUM_LANES, outputs="policy")
    settings = CustomAlgorithmSpec(factory="rlsrl.testing.actor_and_critic:ActorAndCritic", needs=needs)
    with seeded(0):
        algorithm = ActorAndCritic(Setup(policy=policy, settings=settings, num_ranks=1), **kwargs)
    return Learner(algorithm, initial or policy.parameters(Version(1, 0)), **LEARNER)


def test_each_group_follows_its_own_loss_by_its_own_optimizer() -> None:
    """Train the same by torch's modules and optimizers. The policy's step comes after the critic's."""
    learner = two_groups(critic_learning_rate=0.02)
    algorithm = cast("ActorAndCritic", learner._algorithm)
    vectors = {name: nn.Parameter(vector.clone()) for name, vector in learner._params.items()}
    optimizers = {
        "critic": torch.optim.Adam([vectors["critic"]], lr=0.02, eps=1e-8),
        "policy": torch.optim.Adam([vectors["policy"]], lr=1e-3, eps=1e-5),
    }
    losses, longest = (
        {"critic": algorithm.critic_loss, "policy": algorithm.policy_loss},
        {"critic": 10.0, "policy": 0.5},
    )
    state = algorithm.initial_state({name: vector.detach() for name, vector in vectors.items()})
    for step in range(4):
        slots = make_slots(step)
        metrics = learner.step(slots).metrics
        params = {name: vector.detach() for name, vector in vectors.items()}
        batch = algorithm.prepare(params, slots, one_rank, algorithm.evaluate)
        schedule = algorithm.schedule(batch, np.random.default_rng(0), one_rank)
        minibatch = gathered(batch.rows, {name: tensor[0] for name, tensor in schedule.items()})
        for name, loss in losses.items():
            optimizers[name].zero_grad()
            loss(vectors, state, minibatch)[0].backward()
            norm = nn.utils.clip_grad_norm_([vectors[name]], longest[name])
            assert metrics["gradient_norm" if name == "policy" else "critic_gradient_norm"] == pytest.approx(
                float(norm), rel=1e-4
            )
            optimizers[name].step()
        state = algorithm.update_state({name: vector.detach() for name, vector in vectors.items()}, state)
        for name, vector in vectors.items():
            torch.testing.assert_close(learner._params[name], vector.detach(), rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(learner._state, state, rtol=1e-4, atol=2e-6)
    assert metrics["critic_learning_rate"] == 0.02


def test_versions_have_the_policy_alone_and_a_saved_state_the_rest() -> None:
    straight = two_groups()
    first = straight._params["critic"].clone()
    straight.step(make_slots(0))
    assert not torch.equal(straight._params["critic"], first)
    version = straight.parameters(Version(1, 1))
    assert version.vector.size == straight._params["policy"].numel()
    arrays, values = straight.state_dict()
    assert {path.rpartition("/")[0] for path in arrays} == {
        "optimizer",
        "groups/critic",
        "groups/critic/optimizer",
        "state",
    }
    resumed = two_groups(version)
    resumed.load_state_dict(arrays, json.loads(json.dumps(values)))
    for learner in (straight, resumed):
        learner.step(make_slots(1))
    assert everything(straight) == everything(resumed)


def test_learners_that_differ_in_a_critic_or_a_state_have_other_digests() -> None:
    learner, same = two_groups(), two_groups()
    assert learner.digest() == same.digest()
    for tensors in (learner._params, learner._state):
        tensor = next(iter(tensors.values()))
        tensor[0] += 1.0
        assert learner.digest() != same.digest()
        tensor[0] -= 1.0
        assert learner.digest() == same.digest()


@pytest.mark.parametrize(
    ("bad", "unchanged"), [("critic_loss", {"critic", "policy", "target"}), ("policy_loss", {"policy", "target"})]
)
def test_no_group_is_updated_after_one_that_was_not(
    bad: str, unchanged: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = getattr(ActorAndCritic, bad)

    def infinite(*arguments: Any) -> tuple[Tensor, Tensors]:
        value, metrics = loss(*arguments)
        return value / 0.0, metrics

    monkeypatch.setattr(ActorAndCritic, bad, infinite)
    learner = two_groups()
    before = {name: tensor.clone() for name, tensor in (learner._params | learner._state).items()}
    result = learner.step(make_slots(0))
    assert (result.skipped, result.num_untrained) == (1, result.num_transitions)
    after = learner._params | learner._state
    assert {name for name in before if torch.equal(before[name], after[name])} == unchanged


def test_learns_to_choose_by_the_sign_of_a_feature() -> None:
    """Act with the exported actor and train: the right one of two actions has reward 1, so chance gives 0.5."""
    policy = make_policy()
    settings = PPO | {"discount": 0.0, "gae_lambda": 0.0, "entropy_coefficient": 0.0}
    learner = Learner(Ppo(policy, **settings), policy.parameters(Version(1, 0)), **LEARNER | {"learning_rate": 1e-2})
    program = policy.export()
    assert program is not None
    actor = NumpyActor(program, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(0))
    rng, slot, rewards = np.random.default_rng(1), empty_slot(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES), []
    slot.arrays["mask"][...] = True
    for step in range(30):
        observation = slot.arrays["observation"]
        observation[...] = rng.standard_normal(observation.shape)
        actor.load(learner.parameters(Version(1, step)))
        actor.begin(slot)
        for t in range(NUM_STEPS):
            slot.arrays["reward"][t] = actor.act(t) == (observation[t, :, 0] > 0)
        actor.finish()
        rewards.append(float(slot.arrays["reward"].mean()))
        learner.step(slot.arrays)
    assert np.mean(rewards[:2]) < 0.7
    assert np.mean(rewards[-5:]) > 0.9


def test_learns_to_aim_where_observations_and_rewards_have_any_scale() -> None:
    """The best action is twice one feature; normalisation finds the scales of features and rewards."""
    env_spec = continuous_env_spec(num_features=2, num_dimensions=1)
    policy = TorchPolicy(build_network(MlpActorCritic, env_spec, {"hidden_sizes": (16,)}, seed=0), env_spec)
    settings = PPO | {"discount": 0.0, "gae_lambda": 0.0, "entropy_coefficient": 0.0, "epochs": 4}
    learner = Learner(
        Ppo(policy, **settings),
        policy.parameters(Version(1, 0)),
        normalizer=Normalizer(env_spec.observation, rewards=True),
        **LEARNER | {"learning_rate": LinearSchedule(start=2e-2, end=2e-3, env_steps=60 * 16 * 8)},
    )
    program = policy.export()
    assert program is not None
    actor = NumpyActor(program, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=np.random.default_rng(0))
    layout = rollout_layout(env_spec, num_steps=NUM_STEPS, num_lanes=NUM_LANES, discounted_return=True)
    slot = Slot(arrays=layout.view(bytearray(layout.nbytes)))
    arrays, returns = slot.arrays, DiscountedReturns(discount=0.0, num_lanes=NUM_LANES)
    arrays["mask"][...] = True
    rng, errors = np.random.default_rng(1), []
    for step in range(60):
        feature = rng.standard_normal(arrays["observation"].shape)
        arrays["observation"][...] = feature * [1000.0, 0.01] + [5000.0, -3.0]
        actor.load(learner.parameters(Version(1, step)))
        actor.begin(slot)
        for t in range(NUM_STEPS):
            error = actor.act(t)[:, 0] - 2.0 * feature[t, :, 0]
            arrays["reward"][t] = -1e4 * error**2
            errors.append(float(np.mean(error**2)))
        actor.finish()
        returns.write(arrays)
        learner.step(arrays)
    assert np.mean(errors[: 2 * NUM_STEPS]) > 3.0
    assert np.mean(errors[-5 * NUM_STEPS :]) < 1.0
