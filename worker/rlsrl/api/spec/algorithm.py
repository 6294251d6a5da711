"""``spec.algorithm``: how the policy is trained on the samples.

An algorithm is a block here, a module of ``rlsrl.algorithms`` with the block's name, tests and an example. All that is
not of one algorithm reads the fields and properties of ``AlgorithmSettings`` only.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, ClassVar, Literal, get_args, get_type_hints

from pydantic import Field
from pydantic.alias_generators import to_camel
from typing_extensions import override

from rlsrl.api.model import INTEGRAL, LIVE, REFUSE, REFUSE_OTHER, Arguments, Model
from rlsrl.api.spec.policy import HiddenSizes
from rlsrl.api.spec.scalars import Attribute, Count, NoiseColor, VectorActions

OptimizerName = Literal["adam", "radam"]
"""Adam (Kingma and Ba 2015), or RAdam (Liu et al. 2020)."""
NetworkOutputs = Literal["policy", "policyAndValue", "actionValues"]
"""What a network computes for an observation: parameters of the action distribution, these and the observation's value,
or a value for each action. A policy of the last kind takes the best action, or with a probability any."""


class LinearScheduleSpec(Model):
    """In a straight line from the field's own value."""

    to: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The value at the end of the schedule and after it."""
    env_steps: Count | None = None
    """Length of the schedule in env steps; by default stop.envSteps."""


class ScheduleSpec(Model):
    """How a number changes during training."""

    exactly_one: ClassVar[tuple[str, ...]] = ("linear",)

    linear: LinearScheduleSpec | None = None
    """In a straight line from the field's own value."""

    @property
    def chosen(self) -> LinearScheduleSpec:
        """The schedule that is set."""
        assert self.linear is not None, "validation leaves exactly one"
        return self.linear


class PrioritySpec(Model):
    """Draws by priority (Schaul et al. 2016): a transition is drawn in proportion to (its last error + offset) **
    exponent. New ones have the largest priority that there was. By default all are drawn with the same probability. A
    recurrent network draws whole rollouts so."""

    exponent: Annotated[float, Field(ge=0, le=1)] = 0.6
    """0 draws all alike, 1 in proportion to their errors (alpha)."""
    offset: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """Keeps transitions without an error in play."""
    largest_error_weight: Annotated[float, Field(ge=0, le=1)] = 0.9
    """For recurrent networks, which draw sequences: weight of a sequence's largest error in the one that counts. The
    mean of its errors has the rest (eta of Kapturowski et al. 2019)."""


class ReplaySpec(Model):
    """The store from which training draws. Each transition is drawn again and again. The store is a file, which
    outlives the trainer's process."""

    capacity: Annotated[int, Field(ge=1, le=1_000_000_000), INTEGRAL] = 100_000
    """Transitions that are kept, by all trainers together; the oldest ones go first. Steps that only reset an
    environment take a place, too."""
    start: Annotated[int, Field(ge=0, le=1_000_000_000), INTEGRAL] = 1000
    """Transitions that are stored before training begins, by all trainers together. The first ones of the run need no
    training."""
    n_step: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 1
    """Length of the n-step return: rewards that are added up before the value of the next observation. Fewer at the end
    of an episode, and where the next rollout has not arrived; with a recurrent network at the end of each rollout."""
    priorities: PrioritySpec | None = None


FORWARD_SHARE = 1 / 3
"""What a forward pass alone takes of a pass with its backward pass, which has two products for each of its own."""


@dataclass(frozen=True, kw_only=True)
class UpdateWork:
    """What an optimizer step computes, in means over steps. A pass takes a row through a network, and its gradient back
    to all parameters."""

    losses: float = 1.0
    """Losses, each with a gradient and an optimizer of its own."""
    network_passes: float = 1.0
    """Passes of each row through the policy's network."""
    critic_passes: float = 0.0
    """Passes of each row through the two critics of ``AlgorithmSettings.critic_network``."""


class AlgorithmSettings(Model):
    """The settings that every algorithm has, and what others need to know of the rest."""

    learning_rate: Annotated[float, Field(gt=0, le=1), LIVE] = 3e-4
    """Step size of the optimizer."""
    learning_rate_schedule: Annotated[ScheduleSpec, LIVE] | None = None
    """How learningRate changes during training. Constant by default."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Weight of the reward one step later (gamma)."""
    reward_clip: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Rewards are clipped to [-rewardClip, rewardClip] for training, after normalisation if there is one. Atari games
    usually have 1. Reported returns are the environment's own."""
    normalize_rewards: Annotated[bool, REFUSE] = False
    """Whether rewards are divided by the standard deviation of the discounted return and clipped to [-10, 10]."""
    max_gradient_norm: Annotated[float, Field(gt=0, le=1_000_000)] = 0.5
    """Longer gradients are scaled down to this Euclidean norm."""
    optimizer: OptimizerName = "adam"
    """``adam``, or ``radam``: rectified Adam (Liu et al. 2020), whose first steps are shorter."""
    adam_epsilon: Annotated[float, Field(ge=1e-30, le=1)] = 1e-5
    """Added to the optimizer's denominator."""

    minibatch_size_path: ClassVar[tuple[str, ...]] = ("minibatchSize",)
    """Where the block has the rows of a gradient step, in YAML names."""
    replay_path: ClassVar[tuple[str, ...]] = ()
    """Where the block has its ``ReplaySpec``, in YAML names; empty if it has none."""
    outputs_path: ClassVar[tuple[str, ...]] = ()
    """Where the block has its ``outputs``, in YAML names; empty if they are always the same."""

    trains_recurrent: ClassVar[bool] = False
    """Whether the algorithm trains recurrent networks, on sequences."""

    @property
    def outputs(self) -> NetworkOutputs:
        """The outputs of the network that the algorithm trains."""
        return "policyAndValue"

    @property
    def vector_actions(self) -> VectorActions:
        """How actions are drawn that are vectors of floats."""
        return "gaussian"

    @property
    def draws_from(self) -> ReplaySpec | None:
        """The store from which the algorithm draws; None: each batch is trained on as it arrives."""
        return None

    @property
    def draws_burn_in(self) -> bool:
        """Whether sequences that are drawn for a recurrent network have the steps before them, too."""
        return False

    @property
    def lanes_differ_by(self) -> float:
        """How much the epsilons of environments differ; 0: not at all."""
        return 0.0

    @property
    def vector_noise(self) -> NoiseColor:
        """The noise by which actors choose actions that are vectors."""
        return "white"

    @property
    def critic_network(self) -> CriticSpec | None:
        """The network of each of the two critics beside the policy's; None: the algorithm has no critics."""
        return None

    @property
    def update_work(self) -> UpdateWork:
        """What an optimizer step computes. Of an algorithm of the user's own that is not known: one pass is assumed."""
        return UpdateWork()

    @property
    @abstractmethod
    def minibatch_rows(self) -> int:
        """Rows of one gradient step, of all ranks together."""

    @property
    @abstractmethod
    def passes(self) -> int:
        """How often each transition is trained on."""

    @classmethod
    def schedule_names(cls) -> tuple[str, ...]:
        """Return the YAML names of the fields that are schedules."""
        return tuple(map(to_camel, cls._schedule_fields()))

    @classmethod
    def _schedule_fields(cls) -> list[str]:
        return [name for name in cls.model_fields if name.endswith("_schedule")]

    @property
    def schedules(self) -> dict[str, LinearScheduleSpec]:
        """The schedules that are set, by the YAML name of their field."""
        given = {to_camel(name): getattr(self, name) for name in self._schedule_fields()}
        return {name: schedule.chosen for name, schedule in given.items() if schedule is not None}


class MinibatchSettings(AlgorithmSettings):
    """The settings of algorithms that cut each batch into minibatches."""

    minibatch_size: Annotated[int, Field(ge=2, le=16_777_216), INTEGRAL] = 256
    """Transitions of one optimizer step. Must divide the batch: rolloutLength x trainers.batchEnvironments."""

    @property
    @override
    def minibatch_rows(self) -> int:
        return self.minibatch_size


class ActorCriticSettings(MinibatchSettings):
    """The settings of algorithms that train a policy, with an entropy bonus, and a value function."""

    trains_recurrent: ClassVar[bool] = True

    sequence_length: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 16
    """For recurrent networks: steps of the sequences that they are trained on, through which gradients flow. Must
    divide rolloutLength and each trainer's share of minibatchSize."""
    burn_in: Annotated[int, Field(ge=0, le=65_536), INTEGRAL] = 0
    """For recurrent networks: steps before each sequence but the first of a rollout, from which its first state is
    computed by the weights in training, without gradients (Kapturowski et al. 2019). At most sequenceLength."""
    entropy_coefficient: Annotated[float, Field(ge=0, le=10), LIVE] = 0.0
    """Weight of the entropy bonus in the loss."""
    entropy_coefficient_schedule: Annotated[ScheduleSpec, LIVE] | None = None
    """How entropyCoefficient changes during training. Constant by default."""
    value_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.5
    """Weight of the value loss in the loss."""


class PpoSpec(ActorCriticSettings):
    """Proximal policy optimisation (Schulman et al. 2017) with generalised advantage estimation.

    With the decoupled objective of Hilton et al. (2022), under which a lag of one step costs little learning.
    """

    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Between one-step advantages (0, biased) and whole returns (1, noisy)."""
    clip_range: Annotated[float, Field(gt=0, le=10), LIVE] = 0.2
    """How far the probability ratio may leave 1 before its gradient is cut. The ratio compares an action's probability
    with the one at the start of the step."""
    clip_range_schedule: Annotated[ScheduleSpec, LIVE] | None = None
    """How clipRange changes during training. Constant by default."""
    clip_value_loss: bool = True
    """Whether the value may move by at most clipRange from its prediction at the start of the step."""
    epochs: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 4
    """Passes over each batch."""
    normalize_advantages: bool = True
    """Whether advantages are normalised to mean 0 and standard deviation 1 in each minibatch."""

    @property
    @override
    def passes(self) -> int:
        return self.epochs


class VtraceSpec(ActorCriticSettings):
    """The actor-critic of IMPALA with V-trace (Espeholt et al. 2018), which corrects for a policy lag of many steps.

    Each batch is trained on once. Without lag it is an advantage actor-critic.
    """

    rho_clip: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Upper limit of the importance weight of a step's own error. It decides which policy the value belongs to: with a
    high limit that in training, with a low one a policy between it and the one that acted."""
    c_clip: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Upper limit of the importance weights by which later steps' errors flow back. It changes the variance, not the
    value that is learned."""
    trace_decay: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Between one-step targets (0, biased) and whole returns (1, noisy)."""

    @property
    @override
    def passes(self) -> int:
        return 1


class ActionValueSettings(AlgorithmSettings):
    """The settings of algorithms that learn the values of discrete actions."""

    learning_rate: Annotated[float, Field(gt=0, le=1), LIVE] = 2.5e-4
    """Step size of the optimizer."""
    max_gradient_norm: Annotated[float, Field(gt=0, le=1_000_000)] = 10.0
    """Longer gradients are scaled down to this Euclidean norm."""
    epsilon: Annotated[float, Field(ge=0, le=1), LIVE] = 0.1
    """Probability of a random action."""
    epsilon_schedule: Annotated[ScheduleSpec, LIVE] | None = None
    """How epsilon changes during training. Constant by default."""
    epsilon_spread: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Environment i of all N acts with ``epsilon ** (1 + epsilonSpread * i / (N - 1))`` (Horgan et al. 2018, with 7).
    0: all with the same. Otherwise a change of ``actors.replicas`` restarts all actors: they know N."""

    @property
    @override
    def outputs(self) -> NetworkOutputs:
        return "actionValues"

    @property
    @override
    def lanes_differ_by(self) -> float:
        return self.epsilon_spread


class PqnSpec(ActionValueSettings, MinibatchSettings):
    """Parallelised Q-learning (Gallici et al. 2024): Q-learning with neither a replay buffer nor a target network.

    For discrete actions. The network should normalise its layers: ``layerNorm`` of ``mlp``, ``cnn`` or ``impalaCnn``.
    Actors choose a random action with the probability ``epsilon``, else the best one.
    """

    optimizer: OptimizerName = "radam"
    """``adam``, or ``radam``: rectified Adam (Liu et al. 2020), whose first steps are shorter."""
    q_lambda: Annotated[float, Field(ge=0, le=1)] = 0.65
    """Between one-step targets (0, biased) and whole returns (1, noisy)."""
    epochs: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 4
    """Passes over each batch."""

    @property
    @override
    def passes(self) -> int:
        return self.epochs


class ReplaySettings(AlgorithmSettings):
    """The settings of algorithms that draw their minibatches from a store."""

    minibatch_size: Annotated[int, Field(ge=2, le=16_777_216), INTEGRAL] = 256
    """Transitions of one optimizer step, drawn from the store."""
    replay: Annotated[ReplaySpec, REFUSE] = ReplaySpec()
    importance_exponent: Annotated[float, Field(ge=0, le=1), LIVE] = 0.4
    """How far losses of values correct the bias of draws by priority, and from trainers' stores of unequal size: 0 not
    at all, 1 wholly (beta)."""
    importance_exponent_schedule: Annotated[ScheduleSpec, LIVE] | None = None
    """How importanceExponent changes during training. Constant by default."""

    replay_path: ClassVar[tuple[str, ...]] = ("replay",)

    @property
    @override
    def draws_from(self) -> ReplaySpec | None:
        return self.replay

    @property
    @override
    def minibatch_rows(self) -> int:
        return self.minibatch_size

    @property
    @override
    def passes(self) -> int:
        return 1


class DqnSpec(ActionValueSettings, ReplaySettings):
    """Deep Q-learning (Mnih et al. 2015) from a replay store, with double Q-learning (van Hasselt et al. 2016).

    Recurrent networks are trained on sequences, each a rollout of an environment (R2D2; Kapturowski et al. 2019).

    For discrete actions. Actors choose a random action with the probability ``epsilon``, and always until training
    begins, else the best one. ``pacing.trainStepsPerEnvStep`` says how often it trains.
    """

    trains_recurrent: ClassVar[bool] = True

    minibatch_size: Annotated[int, Field(ge=2, le=16_777_216), INTEGRAL] = 64
    """Transitions of one optimizer step, drawn from the store. With a recurrent network each trainer's share must be a
    multiple of rolloutLength."""
    burn_in: bool = True
    """For recurrent networks: whether the first state of a sequence is computed from the rollout before it, by the
    weights in training. Else it is the one with which the actor began."""
    value_rescaling: Annotated[bool, REFUSE] = False
    """Whether the network learns rescaled values, about the square root of returns, so that large rewards need not be
    clipped (Pohlen et al. 2018)."""
    double: bool = True
    """Whether the network chooses the next action whose value the target network gives. Else the target network does
    both, and overestimates."""
    target_period: Annotated[int, Field(ge=1, le=1_000_000_000), INTEGRAL] = 500
    """Minibatches between two copies of the network into the target network."""
    huber_delta: Annotated[float, Field(gt=0, le=1_000_000)] = 1.0
    """Errors count by half their square up to here, and in a straight line beyond (Huber's loss)."""

    @property
    @override
    def draws_burn_in(self) -> bool:
        return self.burn_in

    @property
    @override
    def update_work(self) -> UpdateWork:
        """What follows goes through the target network, and with ``double`` through the network, too."""
        return UpdateWork(network_passes=1 + FORWARD_SHARE * (2 if self.double else 1))


class CriticSpec(Model):
    """A network that values an observation and an action: dense layers over both, flattened."""

    hidden_sizes: HiddenSizes = (256, 256)
    """Units of each hidden layer."""
    activation: Literal["tanh", "relu"] = "relu"
    """The activation function of the hidden layers."""
    layer_norm: bool = False
    """Whether the hidden layers are normalised before their activation function (Ba et al. 2016)."""


class TwinCriticSettings(ReplaySettings):
    """The settings of algorithms that train a policy on the smaller value of two critics."""

    learning_rate: Annotated[float, Field(gt=0, le=1), LIVE] = 3e-4
    """Step size of the policy's optimizer, and of the temperature's if there is one."""
    max_gradient_norm: Annotated[float, Field(gt=0, le=1_000_000)] = 1_000_000
    """Longer gradients are scaled down to this Euclidean norm: those of the policy, of the critics and of a temperature
    each by itself."""
    adam_epsilon: Annotated[float, Field(ge=1e-30, le=1)] = 1e-8
    """Added to the optimizer's denominator."""
    critic: Annotated[CriticSpec, REFUSE] = CriticSpec()
    """The network of each of the two critics. They stay with the trainers. For vectors, not for images."""
    critic_learning_rate: Annotated[float, Field(gt=0, le=1), LIVE] = 3e-4
    """Step size of the critics' optimizer."""
    critic_learning_rate_schedule: Annotated[ScheduleSpec, LIVE] | None = None
    """How criticLearningRate changes during training. Constant by default."""
    tau: Annotated[float, Field(gt=0, le=1)] = 0.005
    """How far target networks move towards the trained ones, each time that they do: 1 copies them."""
    noise_color: NoiseColor = "white"
    """The noise by which actors choose actions that are vectors, uniform ones among them: independent from step to step
    (``white``), or with slow changes as strong as fast ones (``pink``; Eberhard et al. 2023), for environments that
    independent noise hardly explores."""

    @property
    @override
    def vector_noise(self) -> NoiseColor:
        return self.noise_color

    @property
    @override
    def outputs(self) -> NetworkOutputs:
        return "policy"

    @property
    @override
    def critic_network(self) -> CriticSpec:
        return self.critic

    def _work(self, *, policy_updates: float, losses: float) -> UpdateWork:
        """Return the work with so many updates of the policy for each one of the critics.

        What follows goes through a policy and the target critics. The policy's gradient comes back through the critics
        to the action, without those of their parameters.
        """
        return UpdateWork(
            losses=losses,
            network_passes=FORWARD_SHARE + policy_updates,
            critic_passes=1 + FORWARD_SHARE + 2 * FORWARD_SHARE * policy_updates,
        )


class SacSpec(TwinCriticSettings):
    """Soft actor-critic (Haarnoja et al. 2018), which rewards the entropy of the policy, too, with a weight that it
    learns: the temperature.

    For vectors of floats within finite bounds, drawn as the tanh of a Gaussian whose deviation depends on the
    observation; and for discrete actions (Christodoulou 2019). Actions of the first ``replay.start`` env steps are
    uniform. ``pacing.trainStepsPerEnvStep`` says how often it trains.
    """

    temperature: Annotated[float, Field(gt=0, le=1_000_000), REFUSE] = 1.0
    """Weight of the entropy (alpha): the first one, or with ``learnTemperature: false`` that of the whole run."""
    learn_temperature: Annotated[bool, REFUSE] = True
    """Whether the temperature is learned, so that the policy's entropy approaches ``targetEntropy``."""
    target_entropy: Annotated[float, Field(ge=-1_000_000, le=1_000_000)] | None = None
    """Entropy that the learned temperature aims at. By default minus the number of floats of an action; for discrete
    actions 98 % of the largest entropy, which is that of the legal ones."""

    @property
    @override
    def vector_actions(self) -> VectorActions:
        return "squashed"

    @property
    @override
    def update_work(self) -> UpdateWork:
        return self._work(policy_updates=1.0, losses=3.0 if self.learn_temperature else 2.0)


class Td3Spec(TwinCriticSettings):
    """Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018).

    For vectors of floats within finite bounds: the policy gives one action, to which actors add noise. Actions of the
    first ``replay.start`` env steps are uniform. ``pacing.trainStepsPerEnvStep`` says how often it trains.
    """

    policy_period: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 2
    """Minibatches from one update of the policy and the target networks to the next."""
    exploration_deviation: Annotated[float, Field(ge=0, le=1), LIVE] = 0.1
    """Standard deviation of the actors' noise; actions are within [-1, 1] before they are scaled to the bounds."""
    exploration_deviation_schedule: Annotated[ScheduleSpec, LIVE] | None = None
    """How explorationDeviation changes during training. Constant by default."""
    target_deviation: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Standard deviation of the noise on the target policy's actions, which smooths the values that are learned."""
    target_noise_clip: Annotated[float, Field(ge=0, le=2)] = 0.5
    """Largest noise on the target policy's actions."""

    @property
    @override
    def vector_actions(self) -> VectorActions:
        return "clipped"

    @property
    @override
    def update_work(self) -> UpdateWork:
        return self._work(policy_updates=1 / self.policy_period, losses=1 + 1 / self.policy_period)


class AlgorithmNeeds(Model):
    """What others must know of an algorithm of your own. It is declared here, too, because neither an API server nor
    ``rlsrl validate`` runs your code. The trainers compare it with what the algorithm says, and end if they differ."""

    minibatch_size: Annotated[int, Field(ge=2, le=16_777_216), INTEGRAL]
    """Transitions of one optimizer step. Without replay it must divide the batch: rolloutLength x
    trainers.batchEnvironments."""
    epochs: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 1
    """Passes over each batch. No effect with replay."""
    replay: Annotated[ReplaySpec, REFUSE] | None = None
    """The store from which training draws; by default each batch is trained on as it arrives."""
    outputs: Annotated[NetworkOutputs, REFUSE] = "policyAndValue"
    """What the network computes: ``policy``, ``policyAndValue``, or ``actionValues``, with which actors choose by
    epsilon."""
    vector_actions: Annotated[VectorActions, REFUSE] = "gaussian"
    """How actions are drawn that are vectors of floats: from a Gaussian (``gaussian``), as the tanh of such samples
    (``squashed``), or around means in [-1, 1] and then cut to that (``clipped``). The latter two are scaled to the
    bounds of the environment, which have to be finite."""


class CustomAlgorithmSpec(AlgorithmSettings):
    """An algorithm of your own."""

    factory: Attribute
    """A callable that gets a ``rlsrl.algorithms.custom.Setup`` and returns a ``CustomAlgorithm``."""
    kwargs: Arguments = Field(default_factory=dict)
    """Further arguments for the factory: any JSON of at most 32768 characters, together with those of the environment
    and the network."""
    needs: AlgorithmNeeds

    minibatch_size_path: ClassVar[tuple[str, ...]] = ("needs", "minibatchSize")
    replay_path: ClassVar[tuple[str, ...]] = ("needs", "replay")
    outputs_path: ClassVar[tuple[str, ...]] = ("needs", "outputs")

    @property
    @override
    def outputs(self) -> NetworkOutputs:
        return self.needs.outputs

    @property
    @override
    def vector_actions(self) -> VectorActions:
        return self.needs.vector_actions

    @property
    @override
    def minibatch_rows(self) -> int:
        return self.needs.minibatch_size

    @property
    @override
    def draws_from(self) -> ReplaySpec | None:
        return self.needs.replay

    @property
    @override
    def passes(self) -> int:
        return self.needs.epochs


class AlgorithmSpec(Model):
    """The training algorithm: a built-in one, or your own. An edit may change its settings, not the algorithm."""

    exactly_one: ClassVar[tuple[str, ...]] = ("ppo", "vtrace", "pqn", "dqn", "sac", "td3", "custom")

    ppo: Annotated[PpoSpec, REFUSE_OTHER] | None = None
    vtrace: Annotated[VtraceSpec, REFUSE_OTHER] | None = None
    pqn: Annotated[PqnSpec, REFUSE_OTHER] | None = None
    dqn: Annotated[DqnSpec, REFUSE_OTHER] | None = None
    sac: Annotated[SacSpec, REFUSE_OTHER] | None = None
    td3: Annotated[Td3Spec, REFUSE_OTHER] | None = None
    custom: Annotated[CustomAlgorithmSpec, REFUSE_OTHER] | None = None
    """An algorithm of your own, given by its factory."""

    @classmethod
    def blocks(cls) -> dict[str, type[AlgorithmSettings]]:
        """Return the model of each algorithm's block by its name."""
        hints = get_type_hints(cls)
        return {name: next(each for each in get_args(hints[name]) if each is not NoneType) for name in cls.model_fields}

    @property
    def name(self) -> str:
        """The name of the block that is set."""
        return self.member

    @property
    def chosen(self) -> AlgorithmSettings:
        """The algorithm that is set."""
        settings: AlgorithmSettings = getattr(self, self.name)
        return settings
