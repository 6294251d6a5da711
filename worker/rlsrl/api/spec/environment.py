"""``spec.environment``: what actors and evaluators step."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlsrl.api.model import INTEGRAL, Arguments, Model, Name
from rlsrl.api.spec.scalars import Attribute, Count, PositiveSeconds

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
    grey frames. Needs the extra ``atari``."""

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


class Environment(Model):
    """What the actors step: a registered Gymnasium environment, or one that your own function makes."""

    exactly_one: ClassVar[tuple[str, ...]] = ("id", "factory")

    id: (
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.:/-]*$", max_length=256, examples=["CartPole-v1"])]
        | None
    ) = None
    """A registered Gymnasium id."""
    factory: Attribute | None = None
    """A callable that returns an environment with Gymnasium's interface. Called once for each environment."""
    kwargs: Arguments = Field(default_factory=dict)
    """Arguments for the environment: any JSON of at most 32768 characters, together with those of a custom network."""
    atari: Atari | None = None
    """Preprocessing of Atari games. Off by default; ``{}`` switches it on with its defaults."""
    max_episode_steps: Count | None = None
    """Steps after which an episode is truncated, beside the environment's own limits. In an Atari game: actions, not
    frames."""
    frame_stack: Annotated[int, Field(ge=1, le=64), INTEGRAL] | None = None
    """Number of last observations that make one, along a new first axis: ``[84, 84]`` becomes ``[4, 84, 84]``. Stacks
    are stored and sent whole, so each frame is stored and sent that many times."""
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
    started again: this counts as a failure. Steps are measured to half a second. By default there is no limit."""
    reset_seconds: PositiveSeconds = 600.0
    """Longest duration of one ``reset``, in seconds, with the same effect. It also limits how long it takes to make an
    environment, and to close it. With ``actors.vectorization: native`` one call makes or closes all environments of an
    actor."""

    @property
    def around_registered(self) -> tuple[str, ...]:
        """YAML names of the fields that are set beside ``id`` and ``kwargs``."""
        given = {
            "factory": self.factory,
            "atari": self.atari,
            "maxEpisodeSteps": self.max_episode_steps,
            "frameStack": self.frame_stack,
            "actionMask": self.action_mask,
        }
        return tuple(name for name, value in given.items() if value is not None)
