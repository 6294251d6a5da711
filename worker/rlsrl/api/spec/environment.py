"""``spec.environment``: what actors and evaluators step."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, JsonValue

from rlsrl.api.model import INTEGRAL, LIVE, Arguments, Model, Name, refusal
from rlsrl.api.spec.egress import MAX_RULES, EgressRule
from rlsrl.api.spec.scalars import Attribute, Count, PositiveSeconds, VectorActions

MAX_INFO_KEYS = 16
"""Keys of ``info`` that a run may report."""
MAX_INFO_KEY_LENGTH = 64
"""Characters of each of them."""
InfoKey = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$", max_length=MAX_INFO_KEY_LENGTH, examples=["is_success"])
]
"""A key of an environment's ``info``."""


class Atari(Model):
    """The usual preprocessing of Atari games (Mnih et al. 2015, Machado et al. 2018). Observations are single small
    grey frames. Needs the extra ``atari``. Off by default; ``{}`` switches it on with its defaults."""

    frame_skip: Annotated[int, Field(ge=1, le=64), INTEGRAL] = 4
    """Frames that each action is repeated for. The observation is the pixel-wise maximum of the last two frames. The
    game itself must not skip frames: ALE's v5 games need ``kwargs: {frameskip: 1}``."""
    screen_size: Annotated[int, Field(ge=8, le=256), INTEGRAL] = 84
    """Height and width of an observation, in pixels."""
    noop_max: Annotated[int, Field(ge=0, le=1000), INTEGRAL] = 30
    """Largest random number of no-op frames at the start of each game."""
    terminal_on_life_loss: bool = False
    """Whether training sees a lost life as the end of an episode. The game goes on, and reported returns are those of
    whole games."""


PLACE_ARGUMENT = "place"
"""The keyword argument with which an environment gets its place."""
MAX_VALUES = 16_384
"""Values of one argument: more do not fit into the characters that all arguments have together."""
MAX_BY_RANK = 64
"""Arguments in each member of ``KwargsByRank``."""
Values = Annotated[tuple[JsonValue, ...], Field(strict=False, min_length=1, max_length=MAX_VALUES)]


class KwargsByRank(Model):
    """Arguments that differ between environments."""

    each: Annotated[dict[str, Values], Field(max_length=MAX_BY_RANK)] = Field(default_factory=dict)
    """Arguments with one value for each environment, in the order of the ranks: ``{shard: [a.npz, b.npz]}`` if all
    actors together have two environments. Evaluation environments take the values in turn."""
    cycle: Annotated[dict[str, Values], Field(max_length=MAX_BY_RANK)] = Field(default_factory=dict)
    """Arguments whose values environments take in turn: with ``{level: [easy, hard]}`` every other environment is
    hard."""
    add_rank: Annotated[
        dict[str, Annotated[int, Field(ge=0, le=2_147_483_647), INTEGRAL]], Field(max_length=MAX_BY_RANK)
    ] = Field(default_factory=dict)
    """Arguments that are a number plus the rank: ``{port: 9000}`` gives rank 3 the port 9003."""

    def at(self, rank: int) -> dict[str, Any]:
        """Return the arguments of the environment with that rank."""
        lists = {name: values[rank % len(values)] for name, values in (*self.each.items(), *self.cycle.items())}
        return {**lists, **{name: number + rank for name, number in self.add_rank.items()}}


def _with_host_and_port(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_usable = bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an IPv6 address, or a port out of range
        is_usable = False
    if not is_usable:
        raise refusal(
            f"{url} has no usable host and port",
            allowed="a host name or an address, IPv6 in brackets, and a port from 1 to 65535",
        )
    return url


class HttpEnvironment(Model):
    """Environments in a server of yours (``rlsrl serve-environment``), one session for each environment. The spaces of
    observations and actions come from the server. Steps take at least a network round trip:
    ``actors.vectorization: threads`` lets environments wait at the same time. Wrappers such as ``frameStack`` and
    ``maxEpisodeSteps`` stay in the workers; ``kwargs`` and the place go to the server. It needs the extra ``http``."""

    url: Annotated[
        str,
        Field(
            pattern=r"^https?://[A-Za-z0-9_.:\[\]-]+(/[A-Za-z0-9_.~/-]*)?$",
            max_length=2048,
            examples=["http://simulators:8765"],
        ),
        AfterValidator(_with_host_and_port),
    ]
    """The server's URL. It has no password: see ``tokenFile``. On a cluster the operator opens the way to an address or
    to the pods of a Service, such as ``http://simulators.games:8765``, within what the administrator allows in the
    chart's value ``environments.egress``. Another host name needs a rule with a ``cidr`` in ``egress``."""
    timeout_seconds: PositiveSeconds = 60.0
    """Longest wait for the answer to one try of a request, in seconds: longer than the longest step, reset or start of
    an environment."""
    retries: Annotated[int, Field(ge=0, le=1000), INTEGRAL] = 3
    """Further tries of a request after no connection, no answer in time, or a status that may pass (5xx, 408, 425,
    429). The server recognises a repeated step and does not step again. After the last try the episode is truncated
    and counted as ``unreachable``. The environment is made again once the server answers: this spends no budget."""
    backoff_seconds: PositiveSeconds = 0.5
    """Pause before the first further try, in seconds. Each pause is twice as long as the one before, less a random part
    of up to half."""
    max_backoff_seconds: PositiveSeconds = 30.0
    """Longest pause between two tries, and between two probes of a server that is away, in seconds."""
    breaker_failures: Annotated[int, Field(ge=1, le=100_000), INTEGRAL] = 5
    """Failed tries in a row, of all environments of an actor, after which the server counts as away: requests fail at
    once, and the environments wait until a probe is answered."""
    token_file: (
        Annotated[str, Field(pattern=r"^/(.*[^/])?$", max_length=1024, examples=["/etc/simulators/token"])] | None
    ) = None
    """The absolute path of a file with the server's token, for example of a mounted Secret. All roles make environments
    and read it: actors, policy workers, buffer workers, trainers and evaluators."""

    @property
    def host(self) -> str:
        """The host of ``url`` in lower case, an IPv6 address without brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The port of ``url``."""
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)


class Environment(Model):
    """What the actors step: a registered Gymnasium environment, one that your own function makes, or one in a server of
    yours."""

    exactly_one: ClassVar[tuple[str, ...]] = ("id", "factory", "http")

    id: (
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]*$", max_length=256, examples=["CartPole-v1"])]
        | None
    ) = None
    """A registered Gymnasium id."""
    factory: Attribute | None = None
    """A callable that returns an environment with Gymnasium's interface. Called once for each environment."""
    http: HttpEnvironment | None = None
    kwargs: Arguments = Field(default_factory=dict)
    """Arguments for the environment: any JSON of at most 32768 characters, together with ``kwargsByRank`` and the
    arguments of a custom network."""
    kwargs_by_rank: KwargsByRank | None = None
    """Further arguments, which differ between environments, by their ranks among those of all actors: from 0, in the
    order of the actors' indices. Evaluation environments count within their evaluator, so that all versions are played
    with the same arguments. An environment that is made only to learn its spaces has the arguments of rank 0."""
    pass_place: bool = False
    """Whether each environment gets the keyword argument ``place``, an ``rlsrl.envs.place.EnvironmentPlace``: its rank,
    the number of environments of all actors, its actor, its seed, and whether it is for evaluation. A change of
    ``actors.replicas`` then restarts all actors."""
    atari: Atari | None = None
    max_episode_steps: Count | None = None
    """Steps after which an episode is truncated, beside the environment's own limits. In an Atari game: actions, not
    frames."""
    frame_stack: Annotated[int, Field(ge=1, le=64), INTEGRAL] | None = None
    """Number of last observations that make one, along a new first axis: ``[84, 84]`` becomes ``[4, 84, 84]``. Stacks
    are sent whole, so each frame is sent that many times. Replay stores keep each frame once."""
    action_mask: Name | None = None
    """The key under which the environment reports its legal Discrete or MultiDiscrete actions: an array with one entry
    a choice, 0 for an illegal one. A MultiDiscrete has the choices of its entries one after the other. The key is
    looked up in a Dict observation, else in the ``info`` of each reset and step. Illegal choices have probability 0 in
    acting, training and evaluation. The mask is no input of the network."""
    episode_info: Annotated[tuple[InfoKey, ...], Field(strict=False, max_length=MAX_INFO_KEYS)] = ()
    """Keys of ``info`` whose values at an episode's end are reported, such as ``[is_success]``: their means over the
    last ``stop.episodes`` episodes with a value, and how many episodes had one. Values are numbers or booleans, which
    count as 0 and 1; others end the run. NaN and infinity are no values."""
    max_non_finite: Count = 1000
    """Steps and resets with a reward or an observation that is NaN or infinite, in a row over the environments of all
    actors, that end the run. Any finite transition restarts the count. Until then such a step is dropped and counted,
    its episode is truncated, and its environment is reset. 1 allows none."""
    step_seconds: PositiveSeconds | None = None
    """Longest duration of one ``step``, in seconds. A step that lasts longer ends its actor or evaluator, which is
    started again: this counts as a failure. Steps are measured to half a second. By default there is no limit. During a
    call within its limit an actor keeps its credits. A step without a limit that lasts longer than half a minute counts
    as silence: other actors get the credits after another minute. It also limits a ``render`` of
    ``evaluators.video``."""
    reset_seconds: PositiveSeconds = 600.0
    """Longest duration of one ``reset``, in seconds, with the same effect. It also limits how long it takes to make an
    environment, and to close it. With ``actors.vectorization: native`` one call makes or closes all environments of an
    actor."""

    def kwargs_at(self, rank: int) -> dict[str, Any]:
        """Return the arguments of ``kwargs_by_rank`` for the environment with that rank."""
        return {} if self.kwargs_by_rank is None else self.kwargs_by_rank.at(rank)

    def steps_side_by_side(self, vectorization: str) -> bool:
        """Return whether evaluations step environments in threads: where environments wait, they wait together.

        ``vectorization``: of the actors.
        """
        return vectorization == "threads" or self.http is not None

    @property
    def depends_on_rank(self) -> bool:
        """Whether environments of different ranks are made differently."""
        return self.pass_place or self.kwargs_by_rank is not None

    @property
    def around_registered(self) -> tuple[str, ...]:
        """YAML names of the fields that are set beside ``id`` and ``kwargs``."""
        given = {
            "factory": self.factory,
            "http": self.http,
            "kwargsByRank": self.kwargs_by_rank,
            "atari": self.atari,
            "maxEpisodeSteps": self.max_episode_steps,
            "frameStack": self.frame_stack,
            "actionMask": self.action_mask,
        }
        return tuple(name for name, value in given.items() if value is not None)


class WorkerEnvironment(Environment):
    """The environment as workers get it: without the rules of its network, so that an edit of these restarts none."""

    vector_actions: VectorActions = "gaussian"
    """How vectors of floats are drawn. Except for ``gaussian`` they are within [-1, 1], and are scaled to the bounds of
    the environment where it is stepped."""


class EnvironmentSpec(Environment):
    """What the actors step: a registered Gymnasium environment, or one that your own function makes."""

    egress: Annotated[tuple[EgressRule, ...], Field(strict=False, max_length=MAX_RULES), LIVE] = ()
    """Destinations outside of the experiment that environments connect to, such as a simulator's server. On a cluster
    NetworkPolicies close all others. The administrator allows destinations in the chart's value
    ``environments.egress``: by default none. Also for workers that make an environment only to learn its spaces, so for
    all but the coordinator. ``rlsrl run`` ignores the field: on one machine environments reach what you reach."""

    def for_workers(self, vector_actions: VectorActions) -> WorkerEnvironment:
        """Return the environment as workers get it, for an algorithm that draws vectors in this way."""
        # The values are valid already.
        given = {name: getattr(self, name) for name in Environment.model_fields}
        return WorkerEnvironment.model_construct(**given, vector_actions=vector_actions)
