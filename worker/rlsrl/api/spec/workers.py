"""The sections of the roles, and how gathering and training keep pace: ``spec.actors`` to ``spec.pacing``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlsrl.api.model import GANG, INTEGRAL, LIVE, REFUSE, ROLL, Model, PodTemplate
from rlsrl.api.rules import CrossFieldRule, Fault
from rlsrl.api.spec.scalars import Count, ObjectName, PositiveSeconds, Tag, VersionText, VolumeSize, WhenDeleted
from rlsrl.api.spec.versions import tag_rule
from rlsrl.api.spread import EnvironmentSpread, EvaluationSpread, spread_environments, spread_evaluation

Device = Literal["auto", "cpu", "cuda"]
"""The device of a network."""
CompileMode = Literal["off", "upfront", "background"]
"""When the training step is compiled."""


class Actors(Model):
    """The workers that step environments."""

    exactly_one: ClassVar[tuple[str, ...]] = ("environments", "environments_per_actor")

    replicas: Annotated[int, Field(ge=1, le=4096), ROLL, INTEGRAL] = 1
    """Number of actors. ``auto``, for `rlsrl run` only: the fewest that train about as fast as any number on the cores
    that the process may use, as `rlsrl size` estimates; with replay a multiple of ``trainers.replicas``. It needs
    ``environments``. The number is chosen once, when the run begins, and kept when it resumes."""
    environments: Annotated[int, Field(ge=1, le=1_000_000), INTEGRAL] | None = None
    """Environments of all actors together, spread over them as evenly as possible."""
    environments_per_actor: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] | None = None
    """Environments of each actor: the total grows with the replicas."""
    rollout_length: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 128
    """Steps of one rollout in each environment."""
    max_decorrelation_steps: Annotated[int, Field(ge=0, le=1_000_000), ROLL, INTEGRAL] = 0
    """Largest number of random steps in each environment before its first rollout. The number is drawn for each
    environment, so that episodes of equal length do not all end together. These steps are not trained on."""
    vectorization: Annotated[Literal["loop", "native", "threads"], ROLL] = "loop"
    """How an actor steps its environments. ``loop``: one after the other. ``native``: all in one call, by the
    vectorised version that Gymnasium has registered (``vector_entry_point``), as for CartPole. It takes an ``id``
    without ``atari``, ``maxEpisodeSteps``, ``frameStack`` and ``actionMask``, and no ``maxDecorrelationSteps``.
    ``threads``: each environment in a thread, for environments that wait, such as simulators and remote ones. The
    policy is evaluated for the environments that wait for an action at that moment. It takes a ``ringSize`` of 1."""
    ring_size: Annotated[int, Field(ge=1, le=16), INTEGRAL] = 1
    """Groups that each actor's environments are divided into. The actor steps one group while a policy worker evaluates
    the policy for another. Each group fills its own rollouts. 2 hides most of the wait. More than 1 needs
    ``policyWorkers``. Must divide every actor's environments."""
    pod_template: Annotated[PodTemplate, ROLL] = Field(default_factory=dict)
    """On a cluster: additions to the pods, in the form of a Deployment's ``template``. Allowed in ``spec``: affinity,
    imagePullSecrets, nodeSelector, priorityClassName, runtimeClassName, schedulerName, tolerations,
    topologySpreadConstraints, volumes, and image, resources, env, envFrom and volumeMounts of the container ``worker``;
    in ``metadata``: labels and annotations. Takes precedence over the administrator's values for the role."""

    @property
    def num_environments(self) -> int:
        """Environments of all actors together."""
        if self.environments is not None:
            return self.environments
        assert self.environments_per_actor is not None, "validation leaves exactly one"
        return self.environments_per_actor * self.replicas

    @property
    def spread(self) -> EnvironmentSpread:
        """The number of environments of each actor."""
        return spread_environments(self.num_environments, self.replicas)

    @property
    def rollout_environments(self) -> tuple[int, ...]:
        """Environments of one rollout of each actor: those of one group."""
        return tuple(count // self.ring_size for count in self.spread.counts)


class PolicyWorkers(Model):
    """The workers that evaluate the policy for the actors in large batches, for large networks. Actors then need no
    weights. Rollouts are acted with weights as new as without policy workers. Without them each actor evaluates the
    policy itself, much faster for small networks."""

    replicas: Annotated[int, Field(ge=1, le=256), INTEGRAL] = 1
    """Number of policy workers. Actors choose one by their index, and another one when theirs dies."""
    max_batch_size: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 1024
    """Largest number of environments evaluated together. A batch contains all requests that wait when it begins."""
    parameter_pull_seconds: PositiveSeconds = 0.5
    """Seconds between looks for newer weights. A request that needs newer weights fetches them earlier."""
    device: Device = "auto"
    """The device of networks that need PyTorch. ``mlp`` needs none and runs on the CPU. ``auto``: the first GPU that
    PyTorch sees, else the CPU. ``cuda``: the first GPU; without a GPU the worker does not start. ``cpu``: the CPU. On a
    cluster a pod sees the GPUs that its ``podTemplate`` requests."""
    pod_template: Annotated[PodTemplate, ROLL] = Field(default_factory=dict)
    """On a cluster: additions to the pods: see ``actors.podTemplate``."""


class ReplayVolume(Model):
    """On a cluster, with an algorithm that replays: the volume of each buffer worker, a PersistentVolumeClaim
    ``state-<name>-buffer-<index>``. It keeps the worker's transitions when the pod is replaced, also on another node
    if volumes of the StorageClass can move there. By default one with the default values."""

    size: VolumeSize = "10Gi"
    """Size of each volume. `rlsrl size` shows the bytes of all transitions, of which each buffer worker has an equal
    part. Where they do not fit, the experiment fails before training, with the transitions that fit."""
    storage_class_name: ObjectName | None = None
    """The volumes' StorageClass; by default the cluster's default class."""
    when_deleted: Annotated[WhenDeleted, LIVE] = "Delete"
    """Whether the volumes are kept or deleted with the experiment. A later experiment of the same name uses volumes
    that were kept, and its stores are empty when it begins."""


class BufferWorkers(Model):
    """The workers between actors and trainers. They pass samples on first in, first out, and hold only what trainers
    have granted, so that policy lag is the same with them as without. Each serves the same number of actors: a trainer
    is connected to a few buffer workers instead of many actors. Without them actors send samples to the trainers
    directly.

    With an algorithm that replays they keep the transitions: each has an equal part of ``replay.capacity``, and each
    trainer draws from its buffer workers as from one store."""

    replicas: Annotated[int, Field(ge=1, le=256), INTEGRAL] = 1
    """Number of buffer workers. Must divide the number of actors. Actors choose one by their index. With an algorithm
    that replays, a multiple of ``trainers.replicas``."""
    volume: Annotated[ReplayVolume, REFUSE] | None = None
    pod_template: Annotated[PodTemplate, ROLL] = Field(default_factory=dict)
    """On a cluster: additions to the pods: see ``actors.podTemplate``."""

    @property
    def replay_volume(self) -> ReplayVolume:
        """With an algorithm that replays: ``volume``, or its default."""
        return self.volume or ReplayVolume()


class Trainers(Model):
    """The workers that learn."""

    replicas: Annotated[int, Field(ge=1, le=1024), INTEGRAL] = 1
    """Number of ranks. They share each batch evenly and add up their gradients (data parallel), so that their step is
    that of one rank with the whole batch. More ranks pay where a training step takes far longer than a millisecond."""
    batch_environments: Annotated[int, Field(ge=1, le=1_000_000), INTEGRAL] | None = None
    """Environments whose rollouts make one batch, over all replicas; by default all environments."""
    compile: CompileMode = "background"
    """Whether training steps are compiled to machine code, which makes small networks train several times as fast.
    ``background``: training begins uncompiled; after 20 seconds the step is compiled at the lowest priority, and all
    ranks switch to it at the same step. With a ``pacing.maxPolicyLag`` of 0, where runs repeat bit for bit,
    ``background`` means ``off``: a compiled step is not bit-identical to an eager one. ``upfront``: training begins
    with the compiled step. ``off``: never; in YAML with quotes, ``"off"``. Compiling needs 1 GiB and as much memory
    as the trainer has by then. Without that, or without a C++ compiler, training stays uncompiled, and the trainer's
    log says so."""
    threads: Annotated[int, Field(ge=1, le=256), INTEGRAL] = 1
    """Threads in which each rank computes on the CPU, at most as many as the machine has cores. More than one pay where
    training takes most of the time and cores are idle, as with SAC, TD3 or DQN at a high
    ``pacing.trainStepsPerEnvStep``: two are up to 1.8 times as fast. Beside busy cores they are slower than one, since
    each product waits for its slowest thread. `rlsrl size` estimates the gain. On a cluster give the pod as many CPUs
    in ``podTemplate``. Runs with different numbers of threads differ in the last bits of their weights."""
    device: Device = "auto"
    """The device of the trainers. ``auto``: each rank on its own GPU where PyTorch sees one for every rank of the
    machine, else all ranks on the CPU; small networks (``mlp``) stay on the CPU. ``cuda``: each rank on its own GPU;
    with fewer GPUs the trainers do not start. ``cpu``: the CPU. On a cluster each pod sees the GPUs of
    ``gpusPerPod``."""
    gpus_per_pod: Annotated[int, Field(ge=0, le=16), INTEGRAL] = 0
    """On a cluster: GPUs of each trainer pod, with one rank a GPU. Must divide the replicas. With 0 each pod has one
    rank."""
    gpu_resource: Annotated[
        str,
        Field(
            pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$",
            max_length=253,
            examples=["amd.com/gpu"],
        ),
    ] = "nvidia.com/gpu"
    """On a cluster: the resource name of the GPUs."""
    pod_template: Annotated[PodTemplate, GANG] = Field(default_factory=dict)
    """On a cluster: additions to the pods: see ``actors.podTemplate``. GPUs are requested by ``gpusPerPod`` alone."""

    @property
    def ranks_per_pod(self) -> int:
        """Ranks in each pod."""
        return self.gpus_per_pod or 1

    @property
    def num_pods(self) -> int:
        """Pods of all ranks."""
        return self.replicas // self.ranks_per_pod


class FixedVersion(Model):
    """One stored version, for workers that do not follow training."""

    exactly_one: ClassVar[tuple[str, ...]] = ("version", "tag", "file")
    rules: ClassVar[tuple[CrossFieldRule, ...]] = (tag_rule("the newest versions, omit evaluators.parameters"),)

    version: VersionText | None = None
    """A version of this run, in quotes. Trainers remove old versions without a tag (`parameters.keepLast`)."""
    tag: Tag | None = None
    """A tag of this run, as `rlsrl params tag` sets it. If the tag moves, the worker takes its new version."""
    file: (
        Annotated[str, Field(pattern=r"^/(.*[^/])?$", max_length=1024, examples=["/models/best.safetensors"])] | None
    ) = None
    """The absolute path of a weights file, as `rlsrl params export` writes it. It may come from another run with the
    same network, observations and actions. On a cluster it is a path in the pod, for example on a volume of
    `podTemplate`. The file is read once."""


class EvaluationVideos(Model):
    """Videos of the versions that evaluators play. By default none is recorded. After an evaluation's result is
    recorded, the evaluator plays further episodes in an environment with ``render_mode="rgb_array"``, which start as
    those of its first environments. It needs the extra ``video``.

    Each video is the file ``videos/<evaluator>-<version>.mp4`` in the run's folder, or on the experiment's volume.
    TensorBoard shows it as a GIF of at most 100 frames, W&B as the file. With ``parameters.store.objectStore`` no
    folder outlives the coordinator on a cluster: the files are in W&B alone. 500 steps of CartPole take 60 kB and a
    second or two; all files are kept. A video above 4 MiB is left out. What fails costs only the video:
    ``rlsrl_videos_total{outcome}`` counts, and the evaluator's log says why."""

    every_evaluations: Count = 10
    """Evaluations of an evaluator from one that is recorded to the next. The first one after each start of the
    evaluator is recorded. With 1 each evaluation is."""
    episodes: Annotated[int, Field(ge=1, le=100), INTEGRAL] = 1
    """Episodes of one video."""
    max_steps: Annotated[int, Field(ge=1, le=100_000), INTEGRAL] = 1000
    """Steps after which an episode of a video is cut."""


def _steps_for_all(evaluators: Evaluators) -> Fault | None:
    # Shares are equal and at least one, so the total may exceed ``environments``.
    least = max(evaluators.environments, evaluators.replicas)
    if evaluators.max_steps >= least:
        return None
    return Fault(f"{evaluators.max_steps} steps leave some of {least} environments without any", f"integer >= {least}")


def _one_plays_a_fixed_version(evaluators: Evaluators) -> Fault | None:
    if evaluators.parameters is None or evaluators.replicas == 1:
        return None
    return Fault(f"{evaluators.replicas} evaluators would play the same episodes of one version", "1, with parameters")


def _a_fixed_version_is_played_once(evaluators: Evaluators) -> Fault | None:
    given = [
        name
        for name, value in (("everySeconds", evaluators.every_seconds), ("everyVersions", evaluators.every_versions))
        if value is not None
    ]
    if evaluators.parameters is None or not given:
        return None
    return Fault(
        f"names one version, which is played once, and {' and '.join(given)} says how often versions are played",
        f"parameters without {' and '.join(given)}",
    )


class Evaluators(Model):
    """The workers that play stored versions beside training, for a fixed number of episodes in each environment. One
    evaluator plays a version. Evaluators that fall behind skip to the newest version. Off by default."""

    rules: ClassVar[tuple[CrossFieldRule, ...]] = (
        CrossFieldRule(
            at="replicas",
            check=_one_plays_a_fixed_version,
            cel="!has(self.parameters) || self.replicas == 1",
            message="must be 1 with parameters: all evaluators would play the same episodes of one version",
        ),
        CrossFieldRule(
            at="parameters",
            check=_a_fixed_version_is_played_once,
            cel="!has(self.parameters) || !(has(self.everySeconds) || has(self.everyVersions))",
            message="excludes everySeconds and everyVersions: its version is played once",
        ),
        CrossFieldRule(
            at="maxSteps",
            check=_steps_for_all,
            cel="self.maxSteps >= (self.environments > self.replicas ? self.environments : self.replicas)",
            message="leaves some environments without a step: must be at least environments and replicas",
        ),
    )

    replicas: Annotated[int, Field(ge=1, le=64), INTEGRAL] = 1
    """Number of evaluators."""
    environments: Annotated[int, Field(ge=1, le=65_536), INTEGRAL] = 10
    """Environments of all evaluators together. Each gets an equal share, rounded down, and at least one."""
    episodes_per_environment: Annotated[int, Field(ge=1, le=10_000), INTEGRAL] = 2
    """Episodes played in each environment. The result is their mean return."""
    max_steps: Count = 10_000_000
    """Steps of all evaluators' environments together after which the evaluation of a version ends. It keeps the
    episodes that ended, and counts as unfinished."""
    every_seconds: PositiveSeconds | None = None
    """Seconds from the version that an evaluator plays to the next that it plays, by the times at which the two were
    stored. With everyVersions, the earlier of the two counts. With neither, an evaluator plays as many versions as it
    can."""
    every_versions: Count | None = None
    """Number of versions from the one that an evaluator plays to the next that it plays: with 3, it plays every third.
    Evaluators share the versions in turn, and each counts those of its share."""
    parameters: FixedVersion | None = None
    """The one version that the evaluator plays instead of the newest ones: to compare training with an earlier result.
    It is played once after each start of the evaluator. The result names the version and counts as no evaluation of
    this run: it changes neither the tag `best` nor the curve of evaluations."""
    greedy: bool = True
    """Whether the most probable action is taken. With false, actions are sampled as in training."""
    video: EvaluationVideos | None = None
    pod_template: Annotated[PodTemplate, ROLL] = Field(default_factory=dict)
    """On a cluster: additions to the pods: see ``actors.podTemplate``."""

    @property
    def spread(self) -> EvaluationSpread:
        """Environments and steps of each evaluator."""
        return spread_evaluation(self.environments, self.replicas, max_steps=self.max_steps)


class Pacing(Model):
    """How gathering and training keep pace. Actors and trainers wait for each other, so that no sample gets too old to
    be trained. Only samples from before a restart of a trainer or buffer worker may be too old: they are dropped and
    counted."""

    max_policy_lag: Annotated[int, Field(ge=0, le=64), INTEGRAL] = 1
    """Largest number of training steps between the weights that chose an action and the weights being trained. 0
    gathers and trains in turn: runs repeat bit for bit. 1 overlaps the two. With replay 0 has the same meaning: a
    rollout of every environment, then all training that is due; any other value lets both go on at once."""
    train_steps_per_env_step: Annotated[float, Field(ge=0.001, le=100), LIVE] | None = None
    """With replay: minibatches that are trained on for each transition that is gathered. Whichever side is ahead waits.
    Such an algorithm needs it. A new value counts for transitions that are gathered from then on."""
    max_train_steps_behind: Annotated[int, Field(ge=1, le=1_000_000_000), INTEGRAL, LIVE] | None = None
    """With replay: the most minibatches by which training may be behind gathering. By default those of a training step
    and of two rollouts of every environment. Without effect where gathering and training take turns."""
