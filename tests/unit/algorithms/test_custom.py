"""An algorithm of the user's own: what is loaded, what is refused, and what ``check_algorithm`` finds."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from rlsrl.algorithms.base import POLICY, WEIGHT, Batch, Evaluate, ParameterGroup, Reduce, Tensors
from rlsrl.algorithms.catalog import implementation_of
from rlsrl.algorithms.check import check_algorithm
from rlsrl.algorithms.custom import INTERFACE, CustomAlgorithm, Setup
from rlsrl.api.spec import AlgorithmNeeds, AlgorithmSpec
from rlsrl.cli.init import templates
from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.policies.build import build_network
from rlsrl.policies.networks import MlpActionValues, MlpActorCritic
from rlsrl.policies.torch_policy import TorchPolicy
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import MIXED, categories_env_spec, continuous_env_spec, discrete_env_spec

MODULE = "algorithm_of_a_test"
ENV_SPEC = discrete_env_spec()
NETWORK = {"hidden_sizes": (8,)}


def template() -> type[CustomAlgorithm]:
    """Return the class that ``rlsrl init --algorithm`` writes."""
    module = ModuleType("my_algorithm")
    exec(templates(has_algorithm=True)["my_algorithm.py"], vars(module))
    found: type[CustomAlgorithm] = module.MyAlgorithm
    return found


Template: Any = template()


class Mean(Template):
    """A loss that is no sum over rows."""

    @override
    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        loss, metrics = super().loss(params, state, minibatch)
        return loss / len(minibatch[WEIGHT]), metrics


class Careless(Template):
    """Gives every row a weight."""

    @override
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        schedule = super().schedule(replace(batch, schedule_inputs={"mask": np.ones_like(self.mask)}), rng, reduce)
        return dict(schedule)

    @override
    def prepare(self, params: Tensors, slots: Arrays, reduce: Reduce, evaluate: Evaluate) -> Batch:
        batch: Batch = super().prepare(params, slots, reduce, evaluate)
        self.mask = batch.schedule_inputs["mask"]
        reward = torch.from_numpy(slots["reward"].reshape(-1))
        return replace(batch, rows={**batch.rows, "advantage": reward})


class Infinite(Template):
    """Its loss has no finite gradient."""

    @override
    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        loss, metrics = super().loss(params, state, minibatch)
        return loss / 0.0, metrics


class Twice(Template):
    """Makes twice as many minibatches as it says."""

    @override
    def schedule(self, batch: Batch, rng: np.random.Generator, reduce: Reduce) -> Tensors:
        schedule = super().schedule(batch, rng, reduce)
        return {name: torch.cat([tensor, tensor]) for name, tensor in schedule.items()}


class Constant(Template):
    """Its loss does not depend on the parameters."""

    @override
    def loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        return 0.0 * params[POLICY].sum(), {}


class Older(Template):
    interface: ClassVar[int] = INTERFACE - 1


class TwoPasses(Template):
    @property
    @override
    def needs(self) -> AlgorithmNeeds:
        return AlgorithmNeeds(minibatch_size=64, epochs=2)


class Lonely(Template):
    """Has no group of the policy."""

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        return {"critic": ParameterGroup(loss=self.loss, initial=torch.zeros(3))}


class Unfinished(Template):
    """Has a group whose first values, learning rate or period are unusable."""

    def __init__(
        self, setup: Setup, initial: list[Any] | None = None, learning_rate: str = "learning_rate", every: int = 1
    ) -> None:
        super().__init__(setup)
        self.initial, self.learning_rate, self.every = initial, learning_rate, every

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        initial = None if self.initial is None else torch.tensor(self.initial)
        return super().groups | {
            "critic": ParameterGroup(
                loss=self.loss, initial=initial, learning_rate=self.learning_rate, every=self.every
            )
        }


class Late(Template):
    """Updates its only group with every second minibatch."""

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        return {POLICY: ParameterGroup(loss=self.loss, every=2)}


class Restarting(Template):
    """Gives the policy's group first values."""

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        return {POLICY: ParameterGroup(loss=self.loss, initial=torch.zeros(3))}


class Renaming(Template):
    """Gives the spec's learning rate another value."""

    @override
    def coefficients(self, env_steps: int) -> dict[str, float]:
        return {"learning_rate": 0.0}


class SameNames(Template):
    """Its two groups' losses have the same metrics."""

    @property
    @override
    def groups(self) -> dict[str, ParameterGroup]:
        return super().groups | {"other": ParameterGroup(loss=self.other_loss, initial=torch.ones(3))}

    def other_loss(self, params: Tensors, state: Tensors, minibatch: Tensors) -> tuple[Tensor, Tensors]:
        loss = params["other"].square().sum() * minibatch[WEIGHT].sum()
        return loss, {"policy_loss": loss.detach()}


def fails(setup: Setup) -> CustomAlgorithm:
    raise ZeroDivisionError(f"at a rate of {setup.settings.learning_rate}")


def nothing(setup: Setup) -> None:
    del setup


@pytest.fixture(autouse=True)
def _module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(MODULE)
    checked = (Template, Mean, Careless, Infinite, Twice, Constant, SameNames)
    for each in (*checked, Older, TwoPasses, Lonely, Renaming, Unfinished, Late, Restarting, fails, nothing):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, MODULE, module)


def custom(name: str = "MyAlgorithm", **fields: Any) -> AlgorithmSpec:
    block = {"factory": f"{MODULE}:{name}", "needs": {"minibatchSize": 64}, **fields}
    return AlgorithmSpec.model_validate({"custom": block})


def build(spec: AlgorithmSpec, num_ranks: int = 1) -> Any:
    policy = TorchPolicy(build_network(MlpActorCritic, ENV_SPEC, NETWORK, seed=0), ENV_SPEC)
    return implementation_of(spec).build(spec.chosen, policy, num_ranks, None)


def test_the_factory_gets_its_setup_and_arguments() -> None:
    algorithm = build(custom(kwargs={"value_coefficient": 0.25}), num_ranks=2)
    assert algorithm._value_coefficient == 0.25
    assert algorithm._setup.minibatch_size == 32
    assert not implementation_of(custom()).coefficients(custom().chosen, 100)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (custom("MyAlgorithms"), r"has no 'MyAlgorithms'.*'MyAlgorithm'"),
        (custom(kwargs={"value_coeficient": 1}), "raised TypeError .*'value_coeficient'"),
        (custom("fails", learningRate=0.5), "raised ZeroDivisionError .* at a rate of 0.5"),
        (custom("nothing"), "returned a NoneType, not a CustomAlgorithm"),
        (custom("Older"), f"'interface' is {INTERFACE - 1}; this rlsrl has version {INTERFACE}"),
        (custom("TwoPasses"), r"algorithm.custom.needs.epochs is 1, .*TwoPasses' needs 2"),
        (custom("Lonely"), r"'groups' has \['critic'\], and not 'policy'"),
        (custom("Unfinished"), "group 'critic' has None in 'initial'; it needs a vector of torch.float32"),
        (custom("Unfinished", kwargs={"initial": [1, 2]}), r"'critic' has torch.int64 \[2\] in 'initial'"),
        (custom("Unfinished", kwargs={"initial": [[1.0]]}), r"'critic' has torch.float32 \[1, 1\] in 'initial'"),
        (
            custom("Unfinished", kwargs={"initial": [1.0], "learning_rate": "rate"}),
            r"'critic' has the learning rate 'rate'; 'coefficients' adds to \['learning_rate'\]",
        ),
        (custom("Renaming"), "'coefficients' has the name 'learning_rate', which is the spec's"),
        (
            custom("Unfinished", kwargs={"initial": [1.0], "every": 0}),
            "'critic' has 0 in 'every'; the first group has 1",
        ),
        (
            custom("Late"),
            "'policy' has 2 in 'every'; the first group has 1, others a number .* from 1 to 1000",
        ),
        (custom("Restarting"), "'policy' has values in 'initial'; its first values are those of a version"),
        (custom(needs={"minibatchSize": 64, "epochs": 3}), r"algorithm.custom.needs.epochs is 3, .* needs 1"),
    ],
)
def test_what_cannot_be_used_is_refused(spec: AlgorithmSpec, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(spec)


@pytest.mark.parametrize(
    "env_spec",
    [ENV_SPEC, continuous_env_spec(), categories_env_spec(), replace(ENV_SPEC, action=MIXED)],
    ids=["discrete", "continuous", "categories", "mixed"],
)
@pytest.mark.parametrize(
    "spec",
    [custom(), *(AlgorithmSpec.model_validate({name: {"minibatchSize": 64}}) for name in ("ppo", "vtrace"))],
    ids=["custom", "ppo", "vtrace"],
)
def test_correct_algorithms_pass_the_check(spec: AlgorithmSpec, env_spec: EnvSpec) -> None:
    check_algorithm(spec, env_spec, MlpActorCritic, NETWORK)


@pytest.mark.parametrize("n_step", [1, 3])
def test_an_algorithm_that_replays_passes_the_check(n_step: int) -> None:
    needs = {"minibatchSize": 64, "outputs": "actionValues", "replay": {"nStep": n_step}}
    spec = custom(factory="rlsrl.testing.q_learning:QLearning", needs=needs)
    check_algorithm(spec, ENV_SPEC, MlpActionValues, NETWORK)


def test_another_store_than_the_spec_says_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"algorithm.custom.needs.replay is \{'capacity'.* needs None"):
        build(custom(needs={"minibatchSize": 64, "replay": {}}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mean", "gradients of a minibatch's halves do not add up"),
        ("Careless", "steps that are no transitions have an influence"),
        ("Infinite", "its gradient is not finite"),
        ("Twice", r"has the shape \(2, 64\); passes and rows of a minibatch are \(1, 64\)"),
        ("Constant", "a step changes no parameter"),
        ("SameNames", r"several groups have the metrics \['policy_loss'\]"),
    ],
)
def test_the_check_finds(name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_algorithm(custom(name), ENV_SPEC, MlpActorCritic, NETWORK)


def test_the_check_refuses_lanes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="num_lanes is 7: a divisor of the minibatch size 64"):
        check_algorithm(custom(), ENV_SPEC, MlpActorCritic, NETWORK, num_lanes=7)
