"""The resolved config of each role: a frozen record, written as JSON and read by ``rlsrl.workers``.

A config has everything that its role needs and nothing else. All workers of a role share it: a worker gets its index
from the coordinator, and its rank and attempt from the command line. A config never contains secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from typing_extensions import override

from rlsrl.api.model import INTEGRAL, LIVE, Model
from rlsrl.api.role_names import ACTOR, BUFFER, EVALUATOR, POLICY, TRAINER
from rlsrl.api.spec import (
    AlgorithmSpec,
    CompileMode,
    Device,
    EvaluationVideos,
    FixedVersion,
    Network,
    NetworkOutputs,
    NoiseColor,
    ParameterVersions,
    PausedWorkers,
    Stop,
    Tracking,
    Wandb,
    WorkerEnvironment,
)
from rlsrl.api.spread import spread_environments

PositiveInteger = Annotated[int, Field(ge=1), INTEGRAL]
Seconds = Annotated[float, Field(gt=0)]
WORKER_SECONDS: float = Tracking().worker_seconds
"""The default of ``tracking.workerSeconds``."""


class Config(Model):
    """Base of resolved configs: snake_case in Python and in JSON."""

    model_config = ConfigDict(alias_generator=None)

    def to_json(self) -> str:
        """Return a JSON document that ``from_json`` reads."""
        return self.model_dump_json(indent=2, by_alias=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a document of ``to_json``.

        Raises:
            pydantic.ValidationError: the text is not such a config; the error names every wrong field.
        """
        return cls.model_validate_json(text, by_alias=False, by_name=True)


class ObjectStoreConfig(Config):
    """A prefix in an S3-compatible object store. Credentials come from the environment."""

    url: str
    """``s3://bucket/prefix`` of this run alone."""
    endpoint: str | None = None
    """The store's URL; None: that of the environment, else Amazon's."""
    region: str | None = None
    """None: that of the environment."""
    answer_seconds: Seconds
    """Seconds that a request waits for an answer, and for which failed requests are repeated."""


class ParameterStoreConfig(Config):
    """Where the run's parameter DB is."""

    exactly_one: ClassVar[tuple[str, ...]] = ("folder", "object_store", "service")

    folder: str | None = None
    """A folder of this machine, or of a volume."""
    object_store: ObjectStoreConfig | None = None
    """A prefix in an object store."""
    service: str | None = None
    """gRPC target of the coordinator, which serves the parameter DB to workers that cannot reach it."""


class RoleConfig(Config):
    """The fields of every role's config."""

    experiment: str
    """The experiment's name."""
    run_uid: str
    """Identity of the run; part of every local endpoint's name."""
    seed: Annotated[int, Field(ge=0), INTEGRAL]
    """The experiment's seed; each worker derives its own from it and its identity."""
    coordinator_address: str
    """gRPC target of the coordinator's Join stream."""
    heartbeat_seconds: Seconds
    """Seconds between a worker's heartbeats to the coordinator."""
    serves_at: str | None = None
    """``:port`` of the worker's own host where it serves its streams. None: it serves at an endpoint of its config."""
    metrics_address: str
    """``host:port`` where the worker serves its metrics over HTTP, or ``:port`` of its own host. 0: any free port."""
    log_folder: str | None = None
    """The folder where the worker writes ``<role>-<index>.jsonl``; None: it logs to standard output."""
    ledger_folder: str
    """The folder where the worker keeps ``<role>-<index>.page``."""

    @property
    def connects_to(self) -> tuple[str, ...]:
        """Endpoints of the workers that the role's workers connect to, without the coordinator's."""
        return ()

    def serving(self, endpoints: Sequence[str], index: int) -> str:
        """Return where the worker with that index serves: a port of its own host, or one of its role's endpoints."""
        return self.serves_at or endpoints[index]


class CoordinatorConfig(RoleConfig):
    """The coordinator's config."""

    http_address: str
    """``host:port`` of ``/status`` and ``/metrics``, or ``:port`` of its own host; port 0: any free port."""
    lease_seconds: Seconds
    """Seconds without a heartbeat after which a worker's index is free for another."""
    roster_path: str | None = None
    """File with the leases of the roster, which outlive the coordinator; None where no file outlives it: the leases are
    then beside the weights in the object store."""
    record_folder: str
    """Where ``metrics.jsonl`` and ``tensorboard/`` are written."""
    parameter_store: ParameterStoreConfig
    """The parameter DB. The coordinator serves it to workers that do not reach it."""
    wandb: Wandb | None = None
    """The project at Weights & Biases that shows the learning curve."""
    worker_seconds: Annotated[float, Field(ge=0)] = WORKER_SECONDS
    """Seconds between the workers' own metrics at the trackers; 0: never. The JSON leaves the default out."""
    settings_path: str | None = None
    """File with the values of live settings by role, a JSON object that is read periodically; None: no file."""
    first_attempt: PositiveInteger = 1
    """The first attempt since the failed run was last tried again. The coordinator withdraws the failure that an
    earlier attempt recorded."""
    num_actors: Annotated[PositiveInteger, LIVE]
    """Wanted number of actors."""
    num_trainers: Annotated[PositiveInteger, LIVE]
    """Wanted number of trainer ranks."""
    num_policy_workers: Annotated[int, Field(ge=0), LIVE, INTEGRAL] = 0
    """Wanted number of policy workers."""
    num_buffer_workers: Annotated[int, Field(ge=0), LIVE, INTEGRAL] = 0
    """Wanted number of buffer workers."""
    num_evaluators: Annotated[int, Field(ge=0), LIVE, INTEGRAL] = 0
    """Wanted number of evaluators."""
    num_others: Annotated[Mapping[str, int], LIVE] = Field(default_factory=dict)
    """Wanted number of workers by role, of the roles without a field above. The JSON leaves an empty map out.

    The fields above stay because older coordinators read them from the live settings (docs/decisions/0039)."""
    paused: Annotated[tuple[PausedWorkers, ...], Field(strict=False), LIVE] = ()
    """Workers that are paused. The JSON leaves an empty tuple out."""

    count_fields: ClassVar[Mapping[str, str]] = {
        ACTOR: "num_actors",
        TRAINER: "num_trainers",
        POLICY: "num_policy_workers",
        BUFFER: "num_buffer_workers",
        EVALUATOR: "num_evaluators",
    }
    """By role: the field with the number of its workers."""

    @property
    def num_workers(self) -> Mapping[str, int]:
        """Wanted number of workers by role, without the coordinator and the roles that have none."""
        counts = {role: getattr(self, name) for role, name in self.count_fields.items()} | dict(self.num_others)
        return {role: count for role, count in counts.items() if count}

    @model_serializer(mode="wrap")
    def _without_newer_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that older coordinators refuse, where the default says the same."""
        fields: dict[str, Any] = handler(self)
        kept = {
            "num_others": bool(self.num_others),
            "paused": bool(self.paused),
            "worker_seconds": self.worker_seconds != WORKER_SECONDS,
        }
        return {name: value for name, value in fields.items() if kept.get(name, True)}

    def pauses(self, role: str, index: int) -> bool:
        """Return whether the worker of that role with that index is paused."""
        return any(each.covers(role, index) for each in self.paused)


class ReplayConfig(Model):
    """Where transitions are replayed: the store, and how training keeps pace with gathering."""

    folder: str
    """The folder where each rank keeps ``trainer-<rank>.store``."""
    outlives: bool
    """Whether the folder outlives the trainer's machine or pod, and not only its process."""
    num_shards: Annotated[int, Field(ge=0)] = 0
    """Buffer workers that keep the transitions of each rank: those whose index is the rank's modulo the number of
    ranks. 0: each rank has a store of its own."""
    updates_per_env_step: Annotated[float, Field(gt=0), LIVE]
    """Minibatches for each transition that a rank's actors gather."""
    most_updates_behind: Annotated[PositiveInteger, LIVE]
    """The most minibatches by which training may be behind."""
    updates_per_step: Annotated[PositiveInteger, LIVE]
    """Minibatches of a training step. A rank keeps the number with which it has started: compiled code relies on it."""
    most_lanes: Annotated[PositiveInteger, LIVE]
    """Lanes of the widest slot."""
    lanes_per_grant: Annotated[int, Field(ge=0)] = 0
    """Lanes that a rank grants to one of its shards at a time: those of the widest slot; 0 without shards. Not live:
    credits of another width would wait at a shard that cannot fill a slot by them. The JSON leaves 0 out."""
    lanes_in_turn: Annotated[PositiveInteger, LIVE] | None = None
    """Lanes that a rank's actors gather before training goes on, where the two take turns; None: both go on at once."""

    @model_serializer(mode="wrap")
    def _without_newer_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a field that older trainers refuse, where the default says the same."""
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if value or name != "lanes_per_grant"}


class TrainerConfig(RoleConfig):
    """The trainers' config."""

    environment: WorkerEnvironment
    """The environment. The trainer makes one instance to learn its spaces and closes it."""
    network: Network
    """The network that is trained."""
    normalize_observations: bool
    """Whether observations are standardised."""
    algorithm: AlgorithmSpec
    """The training algorithm."""
    rollout_length: PositiveInteger
    """T: steps of a slot."""
    batch_lanes: PositiveInteger
    """B: lanes of one batch, over all ranks. With replay, where no batch is made of lanes: one for each rank."""
    max_policy_lag: Annotated[int, Field(ge=0), INTEGRAL]
    """Training steps that acting weights may be behind."""
    replay: ReplayConfig | None = None
    """The store and the pace of an algorithm that replays; None for others."""
    compile: CompileMode
    """When the training step is compiled."""
    threads: PositiveInteger = 1
    """Threads in which each rank computes on the CPU, at most."""
    device: Device
    """The device of each rank's network."""
    takes_from_buffers: bool = False
    """Whether buffer workers, and not actors, send slots. Without effect if they keep transitions and send none."""
    num_producers: Annotated[PositiveInteger, LIVE]
    """Number of actors, or of buffer workers if there are any, that must connect to each rank before it takes the first
    samples."""
    slots_per_producer: PositiveInteger
    """Slots of each producer: the rollouts that it may fill, or that wait to be trained on, at a time."""
    samples_endpoints: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Where each rank takes samples, by rank."""
    parameters_endpoint: str | None = None
    """The shared memory where rank 0 publishes weights; None where no worker shares its memory."""
    publishes_live: bool
    """Whether rank 0 sends every version to the coordinator, for workers that share no memory with it."""
    peer_timeout_seconds: Seconds
    """Seconds of silence after which a producer with credits, an actor or a buffer worker, is disconnected. Its credits
    go to other producers."""
    policy_name: str
    """The policy's name in the parameter DB."""
    parameter_store: ParameterStoreConfig
    """The parameter DB."""
    versions: Annotated[ParameterVersions, LIVE]
    """Which versions are made durable, and which are kept."""
    stop: Annotated[Stop, LIVE]
    """When training ends."""

    @model_serializer(mode="wrap")
    def _without_newer_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out fields that older trainers refuse, where the default says the same."""
        fields: dict[str, Any] = handler(self)
        if self.threads == 1:
            fields.pop("threads")
        if not self.stop.now:
            fields["stop"].pop("now", None)
        for name in ("store_request", "from_"):
            if getattr(self.versions, name) is None:
                fields["versions"].pop(name, None)
        return fields

    @property
    def num_trainers(self) -> int:
        """Ranks of the gang."""
        return len(self.samples_endpoints)

    @property
    def lanes_per_rank(self) -> int:
        """Lanes of one rank's share of a batch."""
        return self.batch_lanes // self.num_trainers


class ActorConfig(RoleConfig):
    """The actors' config."""

    exactly_one: ClassVar[tuple[str, ...]] = ("environments", "environments_per_actor")

    environment: WorkerEnvironment
    """The environment that the actors step."""
    network: Network
    """The network that chooses actions, for policies that cannot be exported without torch."""
    outputs: NetworkOutputs
    """What the network computes."""
    epsilon_spread: Annotated[float, Field(ge=0)] = 0.0
    """How much the epsilons of environments differ: see ``rlsrl.policies.epsilon_greedy.ape_x_exponents``."""
    noise_color: NoiseColor = "white"
    """The noise of actions that are vectors: see ``rlsrl.policies.pink_noise``."""
    num_actors: PositiveInteger | None = None
    """Number of actors that share ``environments``, or whose number an environment with its place, or its epsilon, gets
    to know. None with ``environments_per_actor`` otherwise: then actors need no restart when others come and go."""
    environments: PositiveInteger | None = None
    """Environments of all actors together; None when each has the same number."""
    environments_per_actor: PositiveInteger | None = None
    """Environments of each actor; None when a total is spread."""
    rollout_length: PositiveInteger
    """T: steps of a slot."""
    samples_endpoints: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Where trainers take samples, by rank."""
    buffer_endpoints: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Where buffer workers take samples, by index. If there are any, filled slots go to one of them."""
    has_home_trainer: bool = False
    """Whether all slots of an actor go to one trainer, chosen by the actor's index. Without effect if there are buffer
    workers."""
    parameters_endpoint: str | None = None
    """The shared memory that weights come from; None: they come from the coordinator, over gRPC."""
    inference_endpoints: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """gRPC targets of the policy workers, by index; empty: the actor evaluates the policy itself."""
    max_decorrelation_steps: Annotated[int, Field(ge=0), INTEGRAL] = 0
    """Largest number of random steps of each environment before its first rollout."""
    vectorization: Literal["loop", "native", "threads"] = "loop"
    """How an actor steps its environments."""
    ring_size: PositiveInteger = 1
    """Env groups of each actor. The actor steps one after the other, and each fills its own slots."""
    policy_name: str
    """The policy's name in the parameter DB."""
    return_discount: Annotated[float, Field(ge=0, le=1)] | None = None
    """Discount of the returns that slots carry for the scaling of rewards; None: rewards are not scaled."""

    @property
    @override
    def connects_to(self) -> tuple[str, ...]:
        return (*(self.buffer_endpoints or self.samples_endpoints), *self.inference_endpoints)

    @property
    def num_environments(self) -> int | None:
        """Environments of all actors; None if the number of actors is not part of the config."""
        if self.environments_per_actor is None:
            return self.environments
        return None if self.num_actors is None else self.environments_per_actor * self.num_actors

    def environment_ranks_of(self, index: int) -> range:
        """Return the ranks, over all actors, of the environments of the actor with that index.

        Raises:
            IndexError: there is no environment for that index.
        """
        if self.environments_per_actor is not None:
            if index < 0:
                raise IndexError(f"actor index {index} is below 0")
            if self.num_actors is not None and index >= self.num_actors:
                raise IndexError(f"actor {index} is not one of the {self.num_actors} that have environments")
            return range(index * self.environments_per_actor, (index + 1) * self.environments_per_actor)
        assert self.environments is not None, "validation leaves exactly one"
        assert self.num_actors is not None, "set together with the total"
        return spread_environments(self.environments, self.num_actors).ranks_of(index)

    @property
    def consumer_role(self) -> str:
        """The role that takes the actors' slots."""
        return BUFFER if self.buffer_endpoints else TRAINER

    def consumers_of(self, index: int) -> dict[int, str]:
        """Return the endpoint of each consumer of the actor with that index, by the consumer's index.

        With buffer workers that is one of them, chosen by the actor's index. Otherwise it is every trainer, or with
        ``has_home_trainer`` one of them.
        """
        endpoints = self.buffer_endpoints or self.samples_endpoints
        if not (self.buffer_endpoints or self.has_home_trainer):
            return dict(enumerate(endpoints))
        home = index % len(endpoints)
        return {home: endpoints[home]}


class ShardConfig(Model):
    """What buffer workers keep for an algorithm that replays."""

    folder: str
    """The folder where each buffer worker keeps ``buffer-<index>.store``, on the disk of its ledger page."""
    algorithm: AlgorithmSpec
    """The training algorithm, whose rows are drawn."""
    volume: str | None = None
    """The folder of the buffer worker's own volume, which has a folder for each run that used it: this run's has
    ``folder``, and those of others are removed. None: the run folder has ``folder``, on a disk that outlives the run's
    processes."""


class BufferConfig(RoleConfig):
    """The buffer workers' config."""

    environment: WorkerEnvironment
    """The environment. The worker makes one instance to learn its spaces and closes it."""
    network: Network
    """The network, whose recurrent state slots carry."""
    rollout_length: PositiveInteger
    """T: steps of a slot."""
    lanes_per_slot: PositiveInteger
    """N: lanes of every slot."""
    has_discounted_return: bool
    """Whether slots carry discounted returns, for the scaling of rewards. True exactly if
    ``ActorConfig.return_discount`` is set."""
    num_actors: Annotated[PositiveInteger, LIVE]
    """Number of actors that must connect before the first samples are taken."""
    slots_per_actor: PositiveInteger
    """Slots of each actor: the rollouts that it may fill, or that wait to be forwarded, at a time. The buffer worker's
    counterpart of ``TrainerConfig.slots_per_producer``."""
    buffer_endpoints: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Where each buffer worker takes samples, by index."""
    samples_endpoints: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Where trainers take samples, by rank."""
    peer_timeout_seconds: Seconds
    """Seconds of silence after which an actor with credits is disconnected. Its credits go to other actors."""
    replay: ShardConfig | None = None
    """What they keep; None: they pass all samples on."""

    @property
    @override
    def connects_to(self) -> tuple[str, ...]:
        return self.samples_endpoints

    def trainer_of(self, index: int) -> str:
        """Return the endpoint of the rank for which the buffer worker with that index keeps transitions."""
        return self.samples_endpoints[index % len(self.samples_endpoints)]


class PolicyWorkerConfig(RoleConfig):
    """The policy workers' config."""

    environment: WorkerEnvironment
    """The environment. The worker makes one instance to learn its spaces and closes it."""
    network: Network
    """The network that is evaluated."""
    outputs: NetworkOutputs
    """What the network computes."""
    inference_endpoints: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Where each policy worker serves actors, by index."""
    max_batch_size: PositiveInteger
    """Largest number of lanes that are evaluated together."""
    parameter_pull_seconds: Seconds
    """Seconds between looks for newer weights."""
    device: Device
    """The device of a network that needs PyTorch."""
    parameters_endpoint: str | None = None
    """Shared-memory name that weights come from; None: they come from the coordinator."""
    policy_name: str
    """The policy's name in the parameter DB."""


class EvaluatorConfig(RoleConfig):
    """The evaluators' config."""

    environment: WorkerEnvironment
    """The environment that the evaluators play."""
    network: Network
    """The network that chooses actions, for policies that cannot be exported without torch."""
    outputs: NetworkOutputs
    """What the network computes."""
    num_evaluators: PositiveInteger
    """Evaluators that share the versions."""
    environments: PositiveInteger
    """Environments of each evaluator."""
    episodes_per_environment: PositiveInteger
    """Episodes that are played in each environment."""
    max_steps_per_environment: PositiveInteger
    """Steps after which an environment that has not ended its episodes is given up."""
    every_seconds: Seconds | None = None
    """Seconds from the version that one evaluator plays to the next that it plays; None: no such interval."""
    every_versions: PositiveInteger | None = None
    """Number of versions of its share from the one that an evaluator plays to the next; None: no such interval."""
    parameters: FixedVersion | None = None
    """The one version that is played; None: the versions of the run as training stores them."""
    greedy: bool
    """Whether the most probable action is taken instead of a sampled one."""
    video: EvaluationVideos | None = None
    """Which evaluations are recorded; None: none is. The JSON leaves None out."""
    side_by_side: bool = False
    """Whether each environment steps in a thread of its own."""
    policy_name: str
    """The policy's name in the parameter DB."""
    parameter_store: ParameterStoreConfig
    """The parameter DB."""

    @model_serializer(mode="wrap")
    def _without_absent_videos(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out a field that older evaluators refuse, where the default says the same."""
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if (name, value) != ("video", None)}
