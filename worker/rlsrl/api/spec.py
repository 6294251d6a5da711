"""The RLExperiment: what a user writes, on one machine or on a cluster.

Attribute docstrings are the reference: they become the schema's descriptions and what ``rlsrl explain`` shows. Every
list, map, string and number has a bound, because the same models become a CustomResourceDefinition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlsrl.api.model import (
    GANG,
    INTEGRAL,
    LIVE,
    REFUSE,
    ROLL,
    Arguments,
    Ignored,
    Model,
    Name,
    PodTemplate,
    Violation,
    refuse,
)
from rlsrl.api.spread import EnvironmentSpread, EvaluationSpread, spread_environments, spread_evaluation

API_VERSION = "rlsrl.dev/v1alpha1"
KIND = "RLExperiment"

PositiveSeconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A duration above 0 and up to a year."""
Count = Annotated[int, Field(ge=1, le=1_000_000_000_000_000), INTEGRAL]
"""A number of steps, at least 1."""
Attribute = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$",
        max_length=256,
        examples=["my_package.my_module:make"],
    ),
]
"""A Python attribute as ``package.module:attribute``."""


ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length=253, examples=["my-object"])]
"""The name of an object on the cluster."""


class Metadata(Model):
    """Standard object metadata, as Kubernetes has it."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=40, examples=["cartpole"])]
    """The experiment's name: lower-case letters, digits and dashes, beginning with a letter. Names the run's folder and
    everything made for it on a cluster."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)] | None = None
    """The namespace on a cluster; without meaning on one machine."""
    labels: Annotated[
        dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=63)]], Field(max_length=64)
    ] = Field(default_factory=dict)
    """Labels to find the experiment by."""
    annotations: Annotated[
        dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=262_144)]], Field(max_length=64)
    ] = Field(default_factory=dict)
    """Notes that tools attach."""
    creation_timestamp: Ignored = None
    """Written by Kubernetes; ignored."""
    deletion_timestamp: Ignored = None
    """Written by Kubernetes; ignored."""
    deletion_grace_period_seconds: Ignored = None
    """Written by Kubernetes; ignored."""
    finalizers: Ignored = None
    """Written by Kubernetes; ignored."""
    generation: Ignored = None
    """Written by Kubernetes; ignored."""
    managed_fields: Ignored = None
    """Written by Kubernetes; ignored."""
    owner_references: Ignored = None
    """Written by Kubernetes; ignored."""
    resource_version: Ignored = None
    """Written by Kubernetes; ignored."""
    self_link: Ignored = None
    """Written by Kubernetes; ignored."""
    uid: Ignored = None
    """Written by Kubernetes; ignored."""


class Atari(Model):
    """The usual preprocessing of Atari games (Mnih et al. 2015, Machado et al. 2018): observations are single frames,
    grey and small. Needs the extra ``atari``."""

    frame_skip: Annotated[int, Field(ge=1, le=64), INTEGRAL] = 4
    """Frames that each action is repeated for; the observation is the brighter of the last two, pixel by pixel. The
    game must not skip frames by itself: ALE's v5 games need ``kwargs: {frameskip: 1}``."""
    screen_size: Annotated[int, Field(ge=8, le=256), INTEGRAL] = 84
    """Height and width of an observation."""
    noop_max: Annotated[int, Field(ge=0, le=1000), INTEGRAL] = 30
    """Nothing is done for a random number of frames, up to this one, at the start of each game."""
    terminal_on_life_loss: bool = False
    """Whether training sees an episode end with each life. The game goes on, and the returns that are reported are
    those of whole games."""


class Environment(Model):
    """What the actors step: a Gymnasium environment by its id, or one made by your own function."""

    exactly_one: ClassVar[tuple[str, ...]] = ("id", "factory")

    id: (
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]*$", max_length=256, examples=["CartPole-v1"])]
        | None
    ) = None
    """A registered Gymnasium id."""
    factory: Attribute | None = None
    """A callable that returns an environment with Gymnasium's interface; called once for each environment."""
    kwargs: Arguments = Field(default_factory=dict)
    """Arguments for the environment, any JSON."""
    atari: Atari | None = None
    """Preprocessing of Atari games; none unless given, ``{}`` for the defaults."""
    max_episode_steps: Count | None = None
    """Steps after which an episode is truncated, beside whatever else ends it. In an Atari game: actions, not frames.
    """
    frame_stack: Annotated[int, Field(ge=1, le=64), INTEGRAL] | None = None
    """How many of the last observations make one, along a new first axis: ``[84, 84]`` becomes ``[4, 84, 84]``. Stacks
    are stored and sent as they are, so a frame is there that many times."""
    action_mask: Name | None = None
    """The key under which the environment says which of its discrete actions are legal: an array with an entry for
    each, 0 where it is not. The key is looked for in a Dict observation, else in the ``info`` of each reset and step.
    Illegal actions then have probability 0 wherever the policy acts, is trained and is evaluated; networks do not get
    the mask for input."""

    @property
    def around_registered(self) -> tuple[str, ...]:
        """What is given beside an id that Gymnasium knows and its arguments, by YAML name."""
        given = {
            "factory": self.factory,
            "atari": self.atari,
            "maxEpisodeSteps": self.max_episode_steps,
            "frameStack": self.frame_stack,
            "actionMask": self.action_mask,
        }
        return tuple(name for name, value in given.items() if value is not None)


class Mlp(Model):
    """A multi-layer perceptron for policy and value, each with its own layers."""

    hidden_sizes: Annotated[
        tuple[Annotated[int, Field(ge=1, le=65_536), INTEGRAL], ...], Field(strict=False, min_length=1, max_length=16)
    ] = (64, 64)
    """Units of each hidden layer."""
    activation: Literal["tanh", "relu"] = "tanh"
    """What stands between the layers."""


class Cnn(Model):
    """The convolutional network of Mnih et al. (2015): policy and value share three convolutions and a dense layer. For
    one image, ``[channels, height, width]`` of uint8, of at least 36 x 36 pixels."""

    hidden_size: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 512
    """Units of the dense layer."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """In which the convolutions and the dense layer compute. ``bfloat16`` is faster where the processor is (on x86:
    ``amx_bf16``, or ``avx512_bf16`` of AMD's; of Intel's alone it is slower) and slower elsewhere. Weights, logits,
    values and losses stay float32."""


class CustomNetwork(Model):
    """A network of your own."""

    factory: Attribute
    """A callable that gets the environment's spaces and returns the network."""
    kwargs: Arguments = Field(default_factory=dict)
    """Further arguments for the factory, any JSON."""


class Network(Model):
    """The policy's network: one of the built-in kinds, or your own."""

    exactly_one: ClassVar[tuple[str, ...]] = ("mlp", "cnn", "custom")

    mlp: Mlp | None = None
    """A multi-layer perceptron."""
    cnn: Cnn | None = None
    """A convolutional network for images."""
    custom: CustomNetwork | None = None
    """A network of your own, by its factory."""


class Policy(Model):
    """What maps observations to actions."""

    network: Network = Network(mlp=Mlp())
    """The network that is trained."""
    normalize_observations: bool = False
    """Whether the network sees observations with mean 0 and deviation 1, kept within 10 of 0, by statistics of all
    transitions that were trained on. They are part of each version. Only for observations that are floats."""


class LinearSchedule(Model):
    """In a straight line from the field's own value."""

    to: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The value at the end, and from then on."""
    env_steps: Count | None = None
    """Transitions trained until then; by default stop.envSteps."""


class Schedule(Model):
    """How a number changes as training goes on."""

    exactly_one: ClassVar[tuple[str, ...]] = ("linear",)

    linear: LinearSchedule | None = None
    """In a straight line from the field's own value."""

    @property
    def chosen(self) -> LinearSchedule:
        """The schedule that is given."""
        assert self.linear is not None, "validation leaves exactly one"  # noqa: S101 - an invariant of our own
        return self.linear


class Ppo(Model):
    """Proximal policy optimisation (Schulman et al. 2017) with generalised advantage estimation.

    With the decoupled objective of Hilton et al. (2022), under which a lag of one step costs little learning.
    """

    learning_rate: Annotated[float, Field(gt=0, le=1), LIVE] = 3e-4
    """Step size of Adam."""
    learning_rate_schedule: Annotated[Schedule, LIVE] | None = None
    """How learningRate changes as training goes on; constant unless given."""
    discount: Annotated[float, Field(ge=0, le=1)] = 0.99
    """Weight of the reward one step later (gamma)."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Between one-step advantages (0, biased) and whole returns (1, noisy)."""
    clip_range: Annotated[float, Field(gt=0, le=10), LIVE] = 0.2
    """How far the ratio of an action's probability to that when the step began may leave 1 before it stops to count."""
    clip_range_schedule: Annotated[Schedule, LIVE] | None = None
    """How clipRange changes as training goes on; constant unless given."""
    clip_value_loss: bool = True
    """Whether the value may move by at most the clip range from what it was at the start of the step."""
    entropy_coefficient: Annotated[float, Field(ge=0, le=10), LIVE] = 0.0
    """Weight of the entropy bonus in the loss."""
    entropy_coefficient_schedule: Annotated[Schedule, LIVE] | None = None
    """How entropyCoefficient changes as training goes on; constant unless given."""
    value_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.5
    """Weight of the value loss in the loss."""
    max_gradient_norm: Annotated[float, Field(gt=0, le=1_000_000)] = 0.5
    """Longer gradients are scaled down to this Euclidean norm."""
    epochs: Annotated[int, Field(ge=1, le=1000), INTEGRAL] = 4
    """How often each batch is gone through."""
    minibatch_size: Annotated[int, Field(ge=2, le=16_777_216), INTEGRAL] = 256
    """Transitions of one optimizer step. Divides the batch: rolloutLength x trainers.batchEnvironments."""
    normalize_advantages: bool = True
    """Whether advantages get mean 0 and deviation 1 in each minibatch."""
    reward_clip: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Rewards are kept within this range around 0 for training, after they are normalised if they are; Atari games
    usually have 1. Returns are reported as the environment gave them."""
    normalize_rewards: Annotated[bool, REFUSE] = False
    """Whether rewards are divided by the standard deviation of the discounted return, and kept within 10 of 0."""
    adam_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-5
    """Added to Adam's denominator."""

    @property
    def schedules(self) -> dict[str, LinearSchedule]:
        """Those that are given, by the YAML name of their field."""
        given = {
            "learningRateSchedule": self.learning_rate_schedule,
            "clipRangeSchedule": self.clip_range_schedule,
            "entropyCoefficientSchedule": self.entropy_coefficient_schedule,
        }
        return {name: schedule.chosen for name, schedule in given.items() if schedule is not None}


class Algorithm(Model):
    """What is done with the samples."""

    exactly_one: ClassVar[tuple[str, ...]] = ("ppo",)

    ppo: Ppo | None = None
    """Proximal policy optimisation."""

    @property
    def chosen(self) -> Ppo:
        """The algorithm that is given."""
        assert self.ppo is not None, "validation leaves exactly one"  # noqa: S101 - an invariant of our own
        return self.ppo


class Actors(Model):
    """The workers that step environments."""

    exactly_one: ClassVar[tuple[str, ...]] = ("environments", "environments_per_actor")

    replicas: Annotated[int, Field(ge=1, le=4096), ROLL, INTEGRAL] = 1
    """Number of actors."""
    environments: Annotated[int, Field(ge=1, le=1_000_000), INTEGRAL] | None = None
    """Environments of all actors together, spread over them as evenly as possible."""
    environments_per_actor: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] | None = None
    """Environments of each actor: the total grows with the replicas."""
    rollout_length: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 128
    """Steps that an actor takes in each environment before it hands them over."""
    max_decorrelation_steps: Annotated[int, Field(ge=0, le=1_000_000), ROLL, INTEGRAL] = 0
    """Each environment takes a random number of random steps, up to this one, before its first rollout, so that
    episodes of equal length do not all end together. They are not trained on."""
    vectorization: Annotated[Literal["loop", "native", "threads"], ROLL] = "loop"
    """How an actor steps its environments. ``loop``: one after the other. ``native``: all in one call, by the
    vectorisation of their own that they are registered with at Gymnasium (``vector_entry_point``), as CartPole is; for
    an environment that is given by its ``id`` and nothing is put around (``atari``, ``maxEpisodeSteps``,
    ``frameStack``, ``actionMask``), without ``maxDecorrelationSteps``. ``threads``: each in a thread of its own, in
    which the policy is evaluated too: for environments that wait, as simulators and remote ones do. For networks that
    can be evaluated without PyTorch (``mlp``), without ``policyWorkers``."""
    ring_size: Annotated[int, Field(ge=1, le=16), INTEGRAL] = 1
    """Groups that each actor's environments are divided into. While a policy worker evaluates the policy for one group,
    the actor steps the others; each group fills rollouts of its own. 2 hides most of the wait. More than 1 only with
    ``policyWorkers``; divides every actor's environments."""
    pod_template: Annotated[PodTemplate, ROLL] = Field(default_factory=dict)
    """On a cluster: what the pods get beside what they need, as in a Deployment's ``template``. Of ``spec``: affinity,
    imagePullSecrets, nodeSelector, priorityClassName, runtimeClassName, schedulerName, tolerations,
    topologySpreadConstraints, volumes, and of the container ``worker`` image, resources, env, envFrom and volumeMounts;
    labels and annotations. It comes before what the administrator gives to all pods of the role."""

    @property
    def num_environments(self) -> int:
        """Environments of all actors together."""
        if self.environments is not None:
            return self.environments
        assert self.environments_per_actor is not None, "validation leaves exactly one"  # noqa: S101 - an invariant
        return self.environments_per_actor * self.replicas

    @property
    def spread(self) -> EnvironmentSpread:
        """Which actor steps how many environments."""
        return spread_environments(self.num_environments, self.replicas)

    @property
    def rollout_environments(self) -> tuple[int, ...]:
        """Environments of one rollout of each actor: those of one group of its ring."""
        return tuple(count // self.ring_size for count in self.spread.counts)


Device = Literal["auto", "cpu", "cuda"]
"""Where a network is."""


class PolicyWorkers(Model):
    """The workers that evaluate the policy for the actors, many requests at a time: for large networks. Actors then
    need no weights; rollouts are acted with weights as new as without policy workers."""

    replicas: Annotated[int, Field(ge=1, le=256), INTEGRAL] = 1
    """Number of policy workers. Actors spread over them by their index, and go on at another when theirs dies."""
    max_batch_size: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 1024
    """Environments that are evaluated together at most. A batch is made of all requests that wait when it begins."""
    parameter_pull_seconds: PositiveSeconds = 0.5
    """Seconds after which newer weights are looked for, unless a request asks for newer ones before."""
    device: Device = "auto"
    """Where networks are evaluated that need PyTorch; ``mlp`` does not, and is evaluated on the CPU. ``auto``: on the
    first GPU where PyTorch sees one, else on the CPU. ``cuda``: on the first GPU; without one the worker does not
    start. ``cpu``: on the CPU. On a cluster a pod sees the GPUs that its ``podTemplate`` asks for."""
    pod_template: Annotated[PodTemplate, ROLL] = Field(default_factory=dict)
    """On a cluster: what the pods get beside what they need: see ``actors.podTemplate``."""


class BufferWorkers(Model):
    """The workers that take samples from actors and pass them on to trainers, first in, first out. They hold what was
    granted and nothing more, so that policy lag is the same with them as without. Each serves as many actors as any
    other: a trainer hears from a few buffer workers instead of many actors."""

    replicas: Annotated[int, Field(ge=1, le=256), INTEGRAL] = 1
    """Number of buffer workers. Divides the number of actors, which spread over them by their index."""
    pod_template: Annotated[PodTemplate, ROLL] = Field(default_factory=dict)
    """On a cluster: what the pods get beside what they need: see ``actors.podTemplate``."""


CompileMode = Literal["off", "upfront", "background"]
"""When the training step is compiled."""


class Trainers(Model):
    """The workers that learn."""

    replicas: Annotated[int, Field(ge=1, le=1024), INTEGRAL] = 1
    """Number of ranks that share each batch evenly and average what they learn (data parallel). Pays where a training
    step takes far longer than a millisecond."""
    batch_environments: Annotated[int, Field(ge=1, le=1_000_000), INTEGRAL] | None = None
    """Environments whose rollouts make one batch, over all replicas; by default all environments."""
    compile: CompileMode = "background"
    """Whether training steps are compiled to machine code, which makes small networks train several times as fast.
    ``background``: training begins without; after its first 20 seconds the step is compiled beside it, at the lowest
    priority, and all trainers change over at one step. Where runs repeat bit for bit (a ``pacing.maxPolicyLag`` of 0)
    that is the same as ``off``, since a compiled step differs in its last bits and nobody knows at which step it comes.
    ``upfront``: training begins with it. ``off``: never; in YAML with quotes, ``"off"``. Without a C++ compiler, as in
    the images, training goes on without; the trainer's log says so."""
    device: Device = "auto"
    """Where the trainers learn. ``auto``: each rank on a GPU of its own where PyTorch sees as many as the machine has
    ranks, else all of them on the CPU, where small networks (``mlp``) stay in any case. ``cuda``: each rank on a GPU of
    its own; with fewer GPUs they do not start. ``cpu``: on the CPU. On a cluster each pod sees the GPUs of
    ``gpusPerPod``."""
    gpus_per_pod: Annotated[int, Field(ge=0, le=16), INTEGRAL] = 0
    """On a cluster: GPUs of each trainer pod, and with them its ranks: one for each GPU. Divides the replicas. Without
    GPUs each pod has one rank."""
    gpu_resource: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
            max_length=253,
            examples=["amd.com/gpu"],
        ),
    ] = "nvidia.com/gpu"
    """On a cluster: what GPUs are called there."""
    pod_template: Annotated[PodTemplate, GANG] = Field(default_factory=dict)
    """On a cluster: what the pods get beside what they need: see ``actors.podTemplate``. GPUs are not among it: they
    follow from ``gpusPerPod``."""

    @property
    def ranks_per_pod(self) -> int:
        """Ranks in each pod."""
        return self.gpus_per_pod or 1

    @property
    def num_pods(self) -> int:
        """Pods of all ranks."""
        return self.replicas // self.ranks_per_pod

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        refuse(self._violations())
        return self

    def _violations(self) -> Iterable[Violation]:
        if self.replicas % self.ranks_per_pod:
            yield Violation(
                at=("gpusPerPod",),
                message=f"{self.replicas} replicas cannot be spread over pods of {self.gpus_per_pod} ranks each",
                allowed=_near_divisors(self.replicas, self.gpus_per_pod),
            )


class Evaluators(Model):
    """The workers that play stored versions, beside training, for a fixed number of episodes in each environment. Each
    version is played by one of them; when they fall behind, they take the newest and pass over those before it."""

    replicas: Annotated[int, Field(ge=1, le=64), INTEGRAL] = 1
    """Number of evaluators."""
    environments: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 10
    """Environments of all evaluators together; each gets an equal share, rounded down, and at least one."""
    episodes_per_environment: Annotated[int, Field(ge=1, le=10_000), INTEGRAL] = 2
    """Episodes that are played in each environment; their returns are averaged."""
    max_steps: Count = 10_000_000
    """Steps of all evaluators' environments together after which the evaluation of a version is given up."""
    every_seconds: PositiveSeconds | None = None
    """Seconds between the versions that an evaluator plays; with neither this nor everyVersions it plays all it can."""
    every_versions: Count | None = None
    """Of how many versions one is played, beside the seconds: whichever comes first."""
    greedy: bool = True
    """Whether the most probable action is taken; otherwise actions are drawn, as in training."""
    pod_template: Annotated[PodTemplate, ROLL] = Field(default_factory=dict)
    """On a cluster: what the pods get beside what they need: see ``actors.podTemplate``."""

    @property
    def spread(self) -> EvaluationSpread:
        """Environments and steps of each evaluator."""
        return spread_evaluation(self.environments, self.replicas, max_steps=self.max_steps)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        refuse(self._violations())
        return self

    def _violations(self) -> Iterable[Violation]:
        # Shares are equal and at least one, so that there may be more environments than were asked for.
        least = max(self.environments, self.replicas)
        if self.max_steps < least:
            yield Violation(
                at=("maxSteps",),
                message=f"{self.max_steps} steps leave some of {least} environments without any",
                allowed=f"integer >= {least}",
            )


class Pacing(Model):
    """How gathering and training keep step. Bounds are kept by waiting, never by dropping samples."""

    max_policy_lag: Annotated[int, Field(ge=0, le=64), INTEGRAL] = 1
    """How many training steps the weights that chose an action may be behind those being trained. 0 gathers and trains
    in turn; 1 overlaps them."""


class FilesystemStore(Model):
    """The run's own folder; on a cluster, the experiment's volume, a PersistentVolumeClaim ``<name>-data``."""

    size: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}(Mi|Gi|Ti)$", max_length=8, examples=["50Gi"])] = "10Gi"
    """How large the volume is."""
    storage_class_name: ObjectName | None = None
    """The volume's StorageClass; the cluster's default one unless given."""
    when_deleted: Annotated[Literal["Retain", "Delete"], LIVE] = "Retain"
    """What becomes of the volume when the experiment is deleted."""


class ObjectStore(Model):
    """An S3 bucket, Amazon's or any that has conditional writes (If-Match, If-None-Match). Credentials are never
    written here: they come from the environment of the workers, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY."""

    url: Annotated[
        str,
        Field(
            pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._-]+)*/?$",
            max_length=512,
            examples=["s3://my-bucket/experiments"],
        ),
    ]
    """The bucket, and what all keys begin with. Each run has a folder of its own below, ``<name>-<run>``."""
    endpoint: (
        Annotated[
            str,
            Field(
                pattern=r"^https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[1-9][0-9]{0,4})?(/[A-Za-z0-9._/-]*)?$",
                max_length=512,
                examples=["https://s3.example.com"],
            ),
        ]
        | None
    ) = None
    """The store's URL; Amazon's unless given here or as AWS_ENDPOINT_URL."""
    region: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$", max_length=63, examples=["eu-central-1"])] | None = None
    """The bucket's region; us-east-1 unless given here or as AWS_REGION."""
    answer_seconds: PositiveSeconds = 30.0
    """Seconds that a request waits for an answer, and for which failing ones are repeated."""
    credentials_secret: ObjectName | None = None
    """On a cluster: the Secret whose keys become environment variables of the workers that reach the bucket."""


class ParameterStore(Model):
    """Where versions of the weights, and what resuming needs, are kept."""

    exactly_one: ClassVar[tuple[str, ...]] = ("filesystem", "object_store")

    filesystem: FilesystemStore | None = None
    """The run's own folder; on a cluster, the experiment's volume."""
    object_store: ObjectStore | None = None
    """An S3 bucket."""


class ParameterVersions(Model):
    """Which versions of the weights are kept, and where."""

    store: Annotated[ParameterStore, REFUSE] = ParameterStore(filesystem=FilesystemStore())
    """Where they are kept."""
    keep_last: Annotated[int, Field(ge=1, le=10_000), INTEGRAL] = 5
    """Untagged versions that are kept; older ones are removed."""
    every_seconds: PositiveSeconds = 10.0
    """Seconds between durable versions: what a crash can cost."""
    every_steps: Count | None = None
    """Training steps between durable versions, beside the seconds: whichever comes first."""
    tag_every_seconds: PositiveSeconds | None = None
    """Seconds between permanent versions, which are never removed."""
    tag_every_steps: Count | None = None
    """Training steps between permanent versions, which are never removed."""


class Stop(Model):
    """When training ends: at the first of these that is reached."""

    at_least_one: ClassVar[tuple[str, ...]] = ("return_mean", "env_steps", "train_steps", "wall_seconds")

    return_mean: Annotated[float, Field(ge=-1e15, le=1e15)] | None = None
    """Mean undiscounted return of the last episodes."""
    episodes: Annotated[int, Field(ge=1, le=1_000_000), GANG, INTEGRAL] = 100
    """How many episodes the mean return is over; before so many have ended it is not judged."""
    env_steps: Count | None = None
    """Transitions trained on."""
    train_steps: Count | None = None
    """Batches trained on."""
    wall_seconds: PositiveSeconds | None = None
    """Seconds of training, earlier attempts of the same run included."""


class Restarts(Model):
    """How often workers that failed are started again."""

    budget: Annotated[int, Field(ge=0, le=10_000), INTEGRAL] = 10
    """Failures that are forgiven; one more ends the run."""
    decay_seconds: PositiveSeconds = 600.0
    """Seconds without a failure after which one of them is forgotten."""


WandbName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=128, examples=["my-project"])]
"""What Weights & Biases calls a project, a user or a team."""


class Wandb(Model):
    """Weights & Biases. Needs the extra ``wandb``. Its failures are logged and counted, and never end a run."""

    project: WandbName
    """The project that the run is shown in."""
    entity: WandbName | None = None
    """The user or team whose project it is; by default that of the API key."""
    mode: Literal["offline", "online"] = "offline"
    """Whether rows are sent as they come, with the API key in the coordinator's environment (``WANDB_API_KEY``), or
    kept in the run's folder, under ``wandb/``, for ``wandb sync``."""


class Tracking(Model):
    """Where the learning curve is shown, beside ``metrics.jsonl`` and TensorBoard, which are always written."""

    wandb: Wandb | None = None
    """Weights & Biases; not used unless given."""


class Security(Model):
    """What protects workers of a cluster from others, beside the token that each of them shows."""

    tls_secret: ObjectName | None = None
    """On a cluster: a Secret of the type kubernetes.io/tls with the keys tls.crt, tls.key and ca.crt, with which
    workers talk to each other by mutual TLS. Its certificate is for servers and clients, and carries the DNS name
    ``<name>-coordinator.<namespace>.svc`` or ``*.<namespace>.svc``. New certificates are used without a restart. On one
    machine it means nothing: what workers say to each other does not leave it."""


class ExperimentSpec(Model):
    """What to train, on what, with what, until when."""

    seed: Annotated[int, Field(ge=0, le=2_147_483_647), REFUSE, INTEGRAL] = 0
    """Everything random derives from it."""
    environment: Annotated[Environment, REFUSE]
    """What the actors step."""
    policy: Annotated[Policy, REFUSE] = Policy()
    """What maps observations to actions."""
    algorithm: Annotated[Algorithm, GANG] = Algorithm(ppo=Ppo())
    """What is done with the samples."""
    actors: Annotated[Actors, GANG]
    """The workers that step environments."""
    policy_workers: Annotated[PolicyWorkers, ROLL] | None = None
    """The workers that evaluate the policy for the actors; without them each actor does so itself, which is much faster
    for small networks."""
    buffer_workers: Annotated[BufferWorkers, GANG] | None = None
    """The workers between actors and trainers; none unless given: actors then post to the trainers directly."""
    trainers: Annotated[Trainers, GANG] = Trainers()
    """The workers that learn."""
    evaluators: Annotated[Evaluators, ROLL] | None = None
    """The workers that play stored versions; none unless given."""
    pacing: Annotated[Pacing, GANG] = Pacing()
    """How gathering and training keep step."""
    parameters: Annotated[ParameterVersions, LIVE] = ParameterVersions()
    """Which versions of the weights are kept, and where."""
    transport: Annotated[Literal["auto", "grpc"], GANG] = "auto"
    """How samples and weights travel between workers. ``auto``: through shared memory between workers of one machine or
    one pod, over gRPC between others. ``grpc``: over gRPC everywhere. Requests to policy workers always do."""
    stop: Annotated[Stop, LIVE]
    """When training ends."""
    restarts: Annotated[Restarts, LIVE] = Restarts()
    """How often workers that failed are started again."""
    suspend: Annotated[bool, LIVE] = False
    """On a cluster: whether the experiment pauses. Its trainers end at one step and store it, then all its pods go.
    With ``false`` again it goes on from there, with the images and resources that the administrator gives by then."""
    tracking: Annotated[Tracking, ROLL] = Tracking()
    """Where the learning curve is shown."""
    security: Annotated[Security, GANG] = Security()
    """What protects workers of a cluster from others."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000), LIVE, INTEGRAL] | None = None
    """On a cluster: seconds after its end in which the experiment can be looked at; then it is deleted, its volume by
    ``whenDeleted``. Without it, it stays."""

    @property
    def batch_environments(self) -> int:
        """Environments (lanes) of one batch."""
        return self.trainers.batch_environments or self.actors.num_environments

    @property
    def batch_transitions(self) -> int:
        """Steps in one batch, masked ones included: rollout length x environments of a batch."""
        return self.actors.rollout_length * self.batch_environments

    @property
    def least_policy_lag(self) -> int:
        """The smallest ``maxPolicyLag`` with which each trainer can form its part of batches.

        A rollout of one actor is granted whole, by one trainer, once all parts that it reaches into are granted, and a
        part is granted ``maxPolicyLag`` steps ahead of the one being trained. So a rollout that reaches ``m`` parts
        beyond the one it begins in needs a lag of at least ``m``: with less, each side would wait for the other.
        Rollouts begin at multiples of the greatest common divisor of their sizes and the part.
        """
        counts = self.actors.rollout_environments
        batch = self.batch_environments // self.trainers.replicas
        last_start = batch - math.gcd(batch, *counts)
        return (last_start + max(counts) - 1) // batch

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        refuse(self._violations())
        return self

    def _violations(self) -> Iterable[Violation]:
        minibatch_size = self.algorithm.chosen.minibatch_size
        batch = f"rolloutLength {self.actors.rollout_length} x {self.batch_environments} environments of a batch"
        if self.batch_transitions % minibatch_size:
            yield Violation(
                at=("algorithm", "ppo", "minibatchSize"),
                message=f"{minibatch_size} does not divide a batch of {self.batch_transitions} transitions ({batch})",
                allowed=_near_divisors(self.batch_transitions, minibatch_size),
            )
        for name, schedule in self.algorithm.chosen.schedules.items():
            if schedule.env_steps is None and self.stop.env_steps is None:
                yield Violation(
                    at=("algorithm", "ppo", name, "linear", "envSteps"),
                    message="missing, and there is no stop.envSteps to stand in for it",
                    allowed="integer from 1 to 1000000000000000, here or as stop.envSteps",
                )
        yield from self._ring_violations()
        yield from self._vectorization_violations()
        yield from self._replica_violations()
        yield from self._buffer_violations()
        if not self.batch_environments % self.trainers.replicas and self.pacing.max_policy_lag < self.least_policy_lag:
            share = f"{self.batch_environments // self.trainers.replicas} environments"
            share += " for each trainer" if self.trainers.replicas > 1 else ""
            times = f"{self.trainers.replicas} times " if self.trainers.replicas > 1 else ""
            widths = " and ".join(map(str, sorted(set(self.actors.rollout_environments))))
            yield Violation(
                at=("pacing", "maxPolicyLag"),
                message=f"batches of {share} cannot be made of whole rollouts of {widths} environments without waiting "
                "for later batches",
                allowed=f"integer >= {self.least_policy_lag}, or a trainers.batchEnvironments that is a multiple of "
                f"{times}every actor's environments",
            )

    def _ring_violations(self) -> Iterable[Violation]:
        ring_size, counts = self.actors.ring_size, set(self.actors.spread.counts)
        at = ("actors", "ringSize")
        if ring_size > 1 and self.policy_workers is None:
            yield Violation(
                at=at,
                message=f"{ring_size} groups hide the wait for policy workers, and there are none",
                allowed="1, or an experiment with policyWorkers",
            )
        if any(count % ring_size for count in counts):
            yield Violation(
                at=at,
                message=f"{ring_size} does not divide the {' and '.join(map(str, sorted(counts)))} environments of an "
                "actor",
                allowed=_near_divisors(math.gcd(*counts), ring_size),
            )

    def _vectorization_violations(self) -> Iterable[Violation]:
        at = ("actors", "vectorization")
        if self.actors.vectorization == "native":
            if added := self.environment.around_registered:
                yield Violation(
                    at=at,
                    message="native steps environments as Gymnasium has them registered, and this one has "
                    + ", ".join(f"environment.{name}" for name in added),
                    allowed="loop or threads, or an environment.id with nothing but kwargs beside it",
                )
            if steps := self.actors.max_decorrelation_steps:
                yield Violation(
                    at=("actors", "maxDecorrelationSteps"),
                    message=f"up to {steps} steps of each environment by itself, and native ones step together",
                    allowed="0, or actors.vectorization loop or threads",
                )
        if self.actors.vectorization == "threads":
            if self.policy_workers is not None:
                yield Violation(
                    at=at,
                    message="threads evaluate the policy by themselves, and policyWorkers are there to do so",
                    allowed="loop or native, or an experiment without policyWorkers",
                )
            if self.policy.network.cnn is not None:
                yield Violation(
                    at=at,
                    message="threads evaluate the policy without PyTorch, and policy.network.cnn cannot be",
                    allowed="loop or native, or policy.network.mlp",
                )

    def _buffer_violations(self) -> Iterable[Violation]:
        if self.buffer_workers is None:
            return
        num_actors, replicas = self.actors.spread.num_workers, self.buffer_workers.replicas
        if num_actors % replicas:
            yield Violation(
                at=("bufferWorkers", "replicas"),
                message=f"{replicas} buffer workers cannot serve equal parts of {num_actors} actors",
                allowed=_near_divisors(num_actors, replicas),
            )
        if len(set(self.actors.rollout_environments)) > 1:
            yield Violation(
                at=("actors", "environments"),
                message=f"{self.actors.num_environments} environments do not divide evenly over {num_actors} actors, "
                "and buffer workers pass on rollouts of one width alone",
                allowed=f"a multiple of {num_actors}",
            )

    def _replica_violations(self) -> Iterable[Violation]:
        replicas = self.trainers.replicas
        minibatch_size = self.algorithm.chosen.minibatch_size
        if self.batch_environments % replicas:
            yield Violation(
                at=("trainers", "replicas"),
                message=f"{replicas} trainers cannot share a batch of {self.batch_environments} environments evenly",
                allowed=_near_divisors(self.batch_environments, replicas),
            )
        if minibatch_size % replicas:
            yield Violation(
                at=("algorithm", "ppo", "minibatchSize"),
                message=f"{minibatch_size} transitions cannot be shared evenly by {replicas} trainers",
                allowed=f"a multiple of {replicas}",
            )


def _near_divisors(number: int, wanted: int) -> str:
    below = next((each for each in range(min(wanted, number), 1, -1) if number % each == 0), None)
    above = next((each for each in range(wanted, number + 1) if number % each == 0), None)
    near = [str(each) for each in (below, above) if each is not None]
    return f"a divisor of {number}{', for example ' if near else ''}{' or '.join(near)}"


class RLExperiment(Model):
    """One experiment in reinforcement learning, from environment to trained policy."""

    api_version: Literal["rlsrl.dev/v1alpha1"]
    """The version of this schema."""
    kind: Literal["RLExperiment"]
    """The kind of this document."""
    metadata: Metadata
    """Standard object metadata."""
    spec: ExperimentSpec
    """What to train, on what, with what, until when."""
    status: Ignored = None
    """Written by the operator; ignored."""
