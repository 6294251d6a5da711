"""What each role is told: one frozen config a role, written to a file as JSON and read back by ``rlsrl.workers``.

A config holds everything its role needs and nothing else. It is the same for all workers of a role: a worker learns its
index, rank and attempt elsewhere (the roster, its command line). Secrets never stand in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from typing_extensions import override

from rlsrl.api.model import INTEGRAL, LIVE, Model
from rlsrl.api.role_names import ACTOR, BUFFER, EVALUATOR, POLICY, TRAINER
from rlsrl.api.spec import CompileMode, Device, Environment, Network, ParameterVersions, PpoSpec, Stop, Wandb
from rlsrl.api.spread import spread_environments

PositiveInteger = Annotated[int, Field(ge=1), INTEGRAL]
Seconds = Annotated[float, Field(gt=0)]


class Config(Model):
    """Base of resolved configs: snake_case in Python and in JSON."""

    model_config = ConfigDict(alias_generator=None)

    def to_json(self) -> str:
        """A JSON document that ``from_json`` reads back."""
        return self.model_dump_json(indent=2, by_alias=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            pydantic.ValidationError: the text is no such config; a ValueError that names every wrong field.
        """
        return cls.model_validate_json(text, by_alias=False, by_name=True)


class ObjectStoreConfig(Config):
    """A place in an S3-compatible object store. Credentials come from the environment."""

    url: str
    """``s3://bucket/prefix`` of this run alone."""
    endpoint: str | None = None
    """The store's URL; None for Amazon's, or the environment's."""
    region: str | None = None
    """None for the environment's."""
    answer_seconds: Seconds
    """Seconds that a request waits for an answer, and for which failing ones are repeated."""


class ParameterStoreConfig(Config):
    """Where the run's parameter DB is."""

    exactly_one: ClassVar[tuple[str, ...]] = ("folder", "object_store", "service")

    folder: str | None = None
    """A folder of this machine, or of a volume."""
    object_store: ObjectStoreConfig | None = None
    """A place in an object store."""
    service: str | None = None
    """gRPC target of the coordinator, which serves the one it reaches to workers that do not."""


class RoleConfig(Config):
    """What every role is told."""

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
    """``:port`` of the worker's own host where it serves its streams, for others to find by the roster; None where the
    endpoints below are local sockets."""
    metrics_address: str
    """``host:port`` where the worker serves its metrics over HTTP, or ``:port`` of its own host; port 0 takes any free
    one."""
    log_folder: str | None = None
    """Where the worker writes ``<role>-<index>.jsonl``; None: its standard output."""
    ledger_folder: str
    """Where the worker keeps ``<role>-<index>.page``."""

    @property
    def connects_to(self) -> tuple[str, ...]:
        """Endpoints of other workers that the role's workers connect to, the coordinator's apart."""
        return ()

    def serving(self, endpoints: Sequence[str], index: int) -> str:
        """Where the worker with that index serves: one of its role's endpoints, or a port of its own host."""
        return self.serves_at or endpoints[index]


class CoordinatorConfig(RoleConfig):
    """What the coordinator is told."""

    http_address: str
    """``host:port`` of ``/status`` and ``/metrics``, or ``:port`` of its own host; port 0 takes any free one."""
    lease_seconds: Seconds
    """Seconds without a heartbeat after which a worker's index is free for another."""
    roster_path: str | None = None
    """File that keeps the roster over the coordinator's own restarts; None where no file outlives it: it is kept beside
    the weights in the object store."""
    record_folder: str
    """Where ``metrics.jsonl`` and ``tensorboard/`` are written."""
    parameter_store: ParameterStoreConfig
    """The parameter DB, which the coordinator serves to whoever does not reach it."""
    wandb: Wandb | None = None
    """Where the learning curve is shown at Weights & Biases."""
    settings_path: str | None = None
    """File with the values of live settings by role, a JSON object that is looked at again and again; None where nobody
    edits them."""
    num_actors: Annotated[PositiveInteger, LIVE]
    """Actors that should be there."""
    num_trainers: Annotated[PositiveInteger, LIVE]
    """Trainer ranks that should be there."""
    num_policy_workers: Annotated[int, Field(ge=0), LIVE, INTEGRAL] = 0
    """Policy workers that should be there."""
    num_buffer_workers: Annotated[int, Field(ge=0), LIVE, INTEGRAL] = 0
    """Buffer workers that should be there."""
    num_evaluators: Annotated[int, Field(ge=0), LIVE, INTEGRAL] = 0
    """Evaluators that should be there."""
    num_others: Annotated[Mapping[str, int], LIVE] = Field(default_factory=dict)
    """Workers that should be there of each role without a field above, by role. JSON leaves an empty one out."""

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
        """Workers that should be there, by role; without the coordinator and the roles that have none."""
        counts = {role: getattr(self, name) for role, name in self.count_fields.items()} | dict(self.num_others)
        return {role: count for role, count in counts.items() if count}

    @model_serializer(mode="wrap")
    def _without_empty_others(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return fields if self.num_others else {name: value for name, value in fields.items() if name != "num_others"}


class TrainerConfig(RoleConfig):
    """What each trainer rank is told."""

    environment: Environment
    """What is trained on; the trainer makes one instance to learn its spaces and closes it."""
    network: Network
    """The network that is trained."""
    normalize_observations: bool
    """Whether observations are standardised."""
    algorithm: PpoSpec
    """What is done with the samples."""
    rollout_length: PositiveInteger
    """T: steps of a slot."""
    batch_lanes: PositiveInteger
    """B: lanes of one batch, over all ranks."""
    max_policy_lag: Annotated[int, Field(ge=0), INTEGRAL]
    """Training steps that acting weights may be behind."""
    compile: CompileMode
    """When the training step is compiled."""
    device: Device
    """Where each rank's network is."""
    num_producers: Annotated[PositiveInteger, LIVE]
    """Actors that are waited for before the first samples are taken, or buffer workers where they stand between."""
    slots_per_producer: PositiveInteger
    """Slots of each of them: so many rollouts may be filled or waiting to be trained on at a time."""
    samples_endpoints: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Where each rank takes samples, by rank."""
    parameters_endpoint: str | None = None
    """Where rank 0 hands out weights in shared memory; None where nobody shares its memory."""
    publishes_live: bool
    """Whether rank 0 sends every version to the coordinator, for those who share no memory with it."""
    peer_timeout_seconds: Seconds
    """Seconds of silence after which an actor's credits go to others."""
    policy_name: str
    """The policy's name in the parameter DB."""
    parameter_store: ParameterStoreConfig
    """The parameter DB."""
    versions: Annotated[ParameterVersions, LIVE]
    """Which versions are made durable, and which are kept."""
    stop: Annotated[Stop, LIVE]
    """When training ends."""

    @property
    def num_trainers(self) -> int:
        """Ranks of the gang."""
        return len(self.samples_endpoints)

    @property
    def lanes_per_rank(self) -> int:
        """Lanes of one rank's part of a batch."""
        return self.batch_lanes // self.num_trainers


class ActorConfig(RoleConfig):
    """What each actor is told."""

    exactly_one: ClassVar[tuple[str, ...]] = ("environments", "environments_per_actor")

    environment: Environment
    """What is stepped."""
    network: Network
    """The network that chooses actions, for policies that cannot be exported without torch."""
    num_actors: PositiveInteger | None = None
    """Actors that a total is spread over; None when each has the same number: then it does not matter."""
    environments: PositiveInteger | None = None
    """Environments of all actors together; None when each has the same number."""
    environments_per_actor: PositiveInteger | None = None
    """Environments of each actor; None when a total is spread."""
    rollout_length: PositiveInteger
    """T: steps of a slot."""
    samples_endpoints: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Where trainers take samples, by rank."""
    buffer_endpoints: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Where buffer workers take samples, by index; filled slots go to one of them, if there are any."""
    parameters_endpoint: str | None = None
    """Where weights come from in shared memory; None: from the coordinator, over gRPC."""
    inference_endpoints: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """gRPC targets of the policy workers that choose actions, by index; empty when the actor does so itself."""
    max_decorrelation_steps: Annotated[int, Field(ge=0), INTEGRAL] = 0
    """Random steps that each environment takes at most before its first rollout."""
    vectorization: Literal["loop", "native", "threads"] = "loop"
    """How an actor steps its environments."""
    ring_size: PositiveInteger = 1
    """Groups of environments that are stepped in turn; each fills slots of its own."""
    policy_name: str
    """The policy that acts."""
    return_discount: Annotated[float, Field(ge=0, le=1)] | None = None
    """Discount of the returns that slots carry for rewards to be scaled by; None where they are not scaled."""

    @property
    @override
    def connects_to(self) -> tuple[str, ...]:
        return (*(self.buffer_endpoints or self.samples_endpoints), *self.inference_endpoints)

    def environment_ranks_of(self, index: int) -> range:
        """Ranks, over the whole fleet, of the environments of the actor with that index.

        Raises:
            IndexError: the total leaves nothing for that index.
        """
        if self.environments_per_actor is not None:
            if index < 0:
                raise IndexError(f"actor index {index} is below 0")
            return range(index * self.environments_per_actor, (index + 1) * self.environments_per_actor)
        assert self.environments is not None, "validation leaves exactly one"
        assert self.num_actors is not None, "told with the total"
        return spread_environments(self.environments, self.num_actors).ranks_of(index)

    def lanes_of(self, index: int) -> int:
        """N: lanes of the actor with that index.

        Raises:
            IndexError: the total leaves nothing for that index.
        """
        return len(self.environment_ranks_of(index))

    def consumers_of(self, index: int) -> dict[int, str]:
        """Where the actor with that index posts: each consumer's endpoint, by the consumer's own index.

        To its buffer worker, if there are any: actors are spread over them by their index. Otherwise to every trainer.
        """
        if not self.buffer_endpoints:
            return dict(enumerate(self.samples_endpoints))
        buffer = index % len(self.buffer_endpoints)
        return {buffer: self.buffer_endpoints[buffer]}


class BufferConfig(RoleConfig):
    """What each buffer worker is told."""

    environment: Environment
    """What the samples are of; one instance is made to learn its spaces and closed."""
    rollout_length: PositiveInteger
    """T: steps of a slot."""
    lanes_per_slot: PositiveInteger
    """N: lanes of every slot."""
    has_discounted_return: bool
    """Whether slots carry discounted returns, for rewards to be scaled by."""
    num_actors: Annotated[PositiveInteger, LIVE]
    """Actors that are waited for before the first samples are taken."""
    slots_per_actor: PositiveInteger
    """Slots of each of them."""
    buffer_endpoints: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Where each buffer worker takes samples, by index."""
    samples_endpoints: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Where trainers take samples, by rank."""
    peer_timeout_seconds: Seconds
    """Seconds of silence after which an actor's credits go to others."""

    @property
    @override
    def connects_to(self) -> tuple[str, ...]:
        return self.samples_endpoints

    @property
    def num_buffer_workers(self) -> int:
        """Buffer workers that should be there."""
        return len(self.buffer_endpoints)


class PolicyWorkerConfig(RoleConfig):
    """What each policy worker is told."""

    environment: Environment
    """What is acted in; one instance is made to learn its spaces and closed."""
    network: Network
    """The network that is evaluated."""
    inference_endpoints: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    """Where each policy worker serves actors, by index."""
    max_batch_size: PositiveInteger
    """Lanes that are evaluated together at most."""
    parameter_pull_seconds: Seconds
    """Seconds after which newer weights are looked for."""
    device: Device
    """Where the network is evaluated, unless that needs no torch."""
    parameters_endpoint: str | None = None
    """Shared-memory name that weights come from; None: they come from the coordinator."""
    policy_name: str
    """The policy that acts."""

    @property
    def num_policy_workers(self) -> int:
        """Policy workers that should be there."""
        return len(self.inference_endpoints)


class EvaluatorConfig(RoleConfig):
    """What each evaluator is told."""

    environment: Environment
    """What is played."""
    network: Network
    """The network that chooses actions, for policies that cannot be exported without torch."""
    num_evaluators: PositiveInteger
    """Evaluators that share the versions."""
    environments: PositiveInteger
    """Environments of each evaluator."""
    episodes_per_environment: PositiveInteger
    """Episodes that are played in each environment."""
    max_steps_per_environment: PositiveInteger
    """Steps after which an environment that has not ended its episodes is given up."""
    every_seconds: Seconds | None = None
    """Seconds between the versions that one evaluator plays."""
    every_versions: PositiveInteger | None = None
    """Versions of its share of which an evaluator plays one."""
    greedy: bool
    """Whether the most probable action is taken."""
    policy_name: str
    """The policy's name in the parameter DB."""
    parameter_store: ParameterStoreConfig
    """The parameter DB."""
