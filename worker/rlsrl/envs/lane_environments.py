"""The environments of a vector, each in its lane: they are made, made again after a failure, and closed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from rlsrl.data.specs import EnvSpec
from rlsrl.envs.faults import EnvironmentFaults, named, not_made
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.unreachable import EnvironmentUnreachable, WaitAbandoned
from rlsrl.runtime.call_board import CallEntry, close_entry, on_board
from rlsrl.runtime.errors import USERS_ERRORS, ConfigurationError

if TYPE_CHECKING:
    import gymnasium

EnvCall = Callable[..., Any]
"""An environment's ``step``, ``reset`` or ``close``, or the function that makes it again or waits for its server."""

WAIT_SECONDS = 0.2
"""How long one wait for an environment's server may take: between waits it is asked whether it is still wanted."""


class LaneEnvironments:
    """Holds one environment for each lane. All calls that it makes are on the board of the call watch."""

    def __init__(
        self,
        make: Callable[[int], gymnasium.Env[Any, Any]],
        num_envs: int,
        *,
        first_rank: int,
        calls: CallEntry,
        wrap_call: Callable[[EnvCall], EnvCall],
        faults: EnvironmentFaults,
        still_wanted: Callable[[], bool],
    ) -> None:
        """Make the environments. The arguments are those of ``LoopVectorEnv``; ``calls`` is its place on the board.

        Raises:
            ConfigurationError: a space is not supported, or the environments have different spaces.
            EnvironmentFailed: ``make`` raised another error.
            WaitAbandoned: an environment's server is away, and the environments are no longer wanted.
        """
        self._make = make
        self._num_envs = num_envs
        self._first_rank = first_rank
        self._calls = calls
        self._wrap_call = wrap_call
        self._faults = faults
        self._still_wanted = still_wanted
        self._envs: dict[int, gymnasium.Env[Any, Any]] = {}
        """By lane. A lane has none while its environment is made again."""
        try:
            for lane in range(num_envs):
                self._envs[lane] = self._made(lane)
            self.spec = common_spec([EnvironmentInterface.of(env).spec for env in self._envs.values()], first_rank)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, lane: int) -> gymnasium.Env[Any, Any]:
        """Return the lane's environment."""
        return self._envs[lane]

    def ranks(self, lane: int) -> range:
        """Return the environment rank of the lane, as a range of one."""
        return range(self._first_rank + lane, self._first_rank + lane + 1)

    def replace(self, lane: int) -> gymnasium.Env[Any, Any]:
        """Close the lane's environment, make another in its place and return it.

        Raises:
            ConfigurationError: the new environment has other spaces.
        """
        if (failed := self._envs.pop(lane, None)) is not None:
            with suppress(Exception, SystemExit):  # it has failed already
                on_board(self._calls, lane, "close", self._wrap_call(failed.close))

        def make() -> None:
            # Kept, and so closed, even if the wrapper raises after it.
            self._envs[lane] = self._make(self._first_rank + lane)

        on_board(self._calls, lane, "make", self._wrap_call(make))
        if (spec := EnvironmentInterface.of(self._envs[lane]).spec) != self.spec:
            raise ConfigurationError(
                f"environment rank {self._first_rank + lane} had {self.spec}; made again, it has {spec}"
            )
        return self._envs[lane]

    def await_server(self, lane: int, error: EnvironmentUnreachable) -> None:
        """Wait until the server of the lane's environment may be tried again.

        Raises:
            WaitAbandoned: the environments are no longer wanted.
        """
        self._await(lane, error, self._wrap_call(error.wait))

    def close(self) -> None:
        """Close every environment, even if one fails, then raise the failure. Idempotent."""
        envs, self._envs = self._envs, {}
        with ExitStack() as stack:
            stack.callback(close_entry, self._calls)
            for lane, env in envs.items():
                stack.callback(on_board, self._calls, lane, "close", env.close)

    def _made(self, lane: int) -> gymnasium.Env[Any, Any]:
        """Return a new environment of the lane, the first one."""
        while True:
            try:
                return on_board(self._calls, lane, "make", self._make, self._first_rank + lane)
            except ConfigurationError:
                raise
            except EnvironmentUnreachable as error:
                self._await(lane, error, error.wait)
            except USERS_ERRORS as error:
                raise not_made(named(self.ranks(lane)), error) from error

    def _await(self, lane: int, error: EnvironmentUnreachable, wait: EnvCall) -> None:
        def wait_while_wanted() -> None:
            if wait(WAIT_SECONDS):
                return  # the server has lost the episode, and answers
            with self._faults.waiting(self._num_envs, error):  # all of them: one thread steps them
                while self._still_wanted():
                    if wait(WAIT_SECONDS):
                        return
            raise WaitAbandoned(f"{named(self.ranks(lane))}: {error}") from error

        if not self._still_wanted():
            raise WaitAbandoned(f"{named(self.ranks(lane))}: {error}") from error
        on_board(self._calls, lane, "wait", wait_while_wanted)


def common_spec(specs: Sequence[EnvSpec], first_rank: int) -> EnvSpec:
    """Return the one spec of all environments, whose environment ranks begin at ``first_rank``.

    Raises:
        ConfigurationError: two specs differ.
    """
    first, *others = specs
    for rank, other in enumerate(others, start=first_rank + 1):
        if other != first:
            raise ConfigurationError(
                f"environments differ: rank {first_rank} has {first}, rank {rank} has {other}; all need equal spaces"
            )
    return first
