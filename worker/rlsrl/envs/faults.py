"""Environment faults: an environment raised, or gave what training cannot use, and the run goes on without it.

``VectorEnv`` implementations find faults and repair slots. ``EnvironmentFaults`` counts and logs them, for all
environments of one actor. It ends the run if only faults come, and the actor if one environment fails repeatedly.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Literal

import numpy as np
import structlog
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.specs import Arrays, EnvSpec
from rlsrl.envs.check import BrokenContract
from rlsrl.envs.unreachable import EnvironmentUnreachable, RemoteEnvironmentError
from rlsrl.runtime.budget import Spent
from rlsrl.runtime.errors import EnvironmentFailed, EnvironmentFault
from rlsrl.runtime.tracebacks import users_traceback

FaultReason = Literal["non_finite", "environment_error", "unreachable", "vector_reset"]
"""``non_finite``: a reward or an observation is NaN or infinite. ``environment_error``: a step or a reset raised, or
returned what does not fit; the environment is made again. ``unreachable``: the environment's server did not answer, or
had lost the episode; the environment is made again once the server answers. ``vector_reset``: the environment's own
step is fine, but it was reset together with an environment that had a fault."""

REPEAT_SECONDS = 60.0
"""Time between two log events of one environment."""

ERROR_BUDGET = 5
"""Errors of one environment after which it is made again, by default. One more ends the actor."""
ERROR_DECAY_SECONDS = 600.0
"""Seconds in which the spent errors of an environment fall by one, continuously."""
_ERROR_CHARACTERS = 500
"""Longest line about an error. The log has the traceback."""
_ASKING_SHARE = 10
"""An actor looks at the fleet once its own row is at least ``max_non_finite`` divided by this number."""

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class NonFiniteValue:
    """A value that is not finite, and where it is."""

    rank: int
    """The environment's rank in the whole fleet."""
    step: int
    """The step of its episode, from 1; 0 for a reset."""
    key: str
    """``reward``, or the path of the observation, with the index of the first such entry."""
    value: float
    """The value as a 32-bit float: larger values are infinite."""

    @override
    def __str__(self) -> str:
        place = f"step {self.step} of its episode" if self.step else "reset"
        return f"environment rank {self.rank}: {self.key} is {self.value} at {place}"


class FleetRow:
    """The non-finite steps and resets in a row over the environments of the whole fleet, here of one actor alone."""

    def report(self, num_ended: int, length: int) -> None:
        """Take note of this actor's own row.

        Args:
            num_ended: Rows that a finite transition of this actor has ended.
            length: Non-finite steps and resets of this actor since then.
        """

    def length(self, own: int) -> int:
        """Return the length of the fleet's row, as far as it is known. ``own``: that of this actor's row."""
        return own


@dataclass(frozen=True, kw_only=True, slots=True)
class _Errors:
    """The errors of one environment."""

    number: int
    """How many since the start of the actor."""
    spent: Spent
    first: str
    """The first error that is not forgiven, in one line."""
    traceback: str
    """Its traceback."""


class EnvironmentFaults:
    """The faults of one actor's environments. Any thread may use it."""

    def __init__(
        self,
        *,
        max_non_finite: int | None = None,
        fleet_row: FleetRow | None = None,
        error_budget: int = ERROR_BUDGET,
        on_fault: Callable[[FaultReason], None] = lambda _: None,
        on_own_fault: Callable[[FaultReason, int, str], None] = lambda *_: None,
        on_wait: Callable[[int, str], None] = lambda *_: None,
        log: structlog.stdlib.BoundLogger = _log,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count faults from 0.

        Args:
            max_non_finite: How many faults without a finite transition of any environment in between end the run;
                None: no limit.
            fleet_row: Counts the faults of all actors; None: this actor is the only one.
            error_budget: Errors of one environment after which it is made again.
            on_fault: Called with the reason of each fault.
            on_own_fault: Called at each fault that is the environment's own, so not for ``vector_reset``: with its
                reason, the number of faults of all environments with this reason, and a line about this one.
            on_wait: Called when environments begin or end to wait for their server: with how many wait, and why the
                last one does. One call at a time, in order.
            log: Gets the first fault of each environment, then at most one every ``REPEAT_SECONDS``.
            now: The time in seconds.
        """
        self.num_in_a_row = 0
        """Non-finite steps and resets since the last finite transition of any environment of this actor."""
        self.num_faults = 0
        """Non-finite steps and resets, errors, and episodes that an unreachable server cut."""
        self._num_rows = 0
        """Rows that a finite transition has ended."""
        self._max_non_finite = max_non_finite
        self._fleet_row = fleet_row or FleetRow()
        self._error_budget = error_budget
        self._on_fault = on_fault
        self._on_own_fault = on_own_fault
        self._on_wait = on_wait
        self._num_waiting = 0
        self._log = log
        self._now = now
        self._lock = threading.Lock()
        self._num_dropped = 0
        self._num_non_finite = 0
        self._num_errors = 0
        self._num_unreachable = 0
        self._errors: dict[int, _Errors] = {}
        """By the first rank of those that are made again together."""
        self._quiet_until: dict[int, float] = {}
        """By rank."""
        self._num_unlogged: dict[int, int] = {}
        """Faults since the last log event, by rank."""

    def finite(self) -> None:
        """Record a finite transition. Needed only while ``num_in_a_row`` is not 0."""
        with self._lock:
            if not self.num_in_a_row:
                return
            self.num_in_a_row = 0
            self._num_rows += 1
            num_rows = self._num_rows
        self._fleet_row.report(num_rows, 0)

    def non_finite(self, found: NonFiniteValue) -> None:
        """Record a step or a reset that gave ``found``. A step was a transition that must be dropped.

        Raises:
            EnvironmentFault: ``max_non_finite`` faults have come in a row.
        """
        with self._lock:
            self.num_in_a_row += 1
            self.num_faults += 1
            self._num_non_finite += 1
            self._num_dropped += found.step > 0
            self._warn(found.rank, "non_finite", step=found.step, key=found.key, value=str(found.value))
            num_rows, in_a_row, num_non_finite = self._num_rows, self.num_in_a_row, self._num_non_finite
        self._on_fault("non_finite")
        self._on_own_fault("non_finite", num_non_finite, str(found))
        self._fleet_row.report(num_rows, in_a_row)
        limit = self._max_non_finite
        if limit is None or in_a_row * _ASKING_SHARE < limit:
            return
        # A single fault is a row of one, whatever the others do.
        row = in_a_row if limit == 1 else self._fleet_row.length(in_a_row)
        if row >= limit:
            raise EnvironmentFault(
                f"{found}; {row} steps and resets in a row of all environments were not finite "
                "(environment.maxNonFinite); correct the environment"
            )

    def error(self, ranks: range, step: int, error: BaseException) -> None:
        """Record that environments raised ``error``, so that they are made again.

        ``EnvironmentUnreachable`` spends no budget: the environment may be well.

        Args:
            ranks: The rank of the environment, or the ranks of those that step in bulk.
            step: The step of the episode, from 1; 0 for a reset or for the making.
            error: The error, or ``BrokenContract``.

        Raises:
            EnvironmentFailed: the budget is spent: the environment is not made again.
            KeyboardInterrupt: ``error`` is the user's Ctrl-C.
        """
        _raise_if_interrupt(error)
        if isinstance(error, EnvironmentUnreachable):
            self._unreachable(ranks.start, step, error)
            return
        line, text = f"{named(ranks)} {_in_words(error)}", _traceback(error)
        with self._lock:
            self.num_faults += 1
            self._num_errors += 1
            num_errors = self._num_errors
            now, before = self._now(), self._errors.get(ranks.start)
            spent = 0.0 if before is None else before.spent.amount_at(now, decay_seconds=ERROR_DECAY_SECONDS)
            is_first = before is None or spent == 0.0
            errors = _Errors(
                number=1 if before is None else before.number + 1,
                spent=Spent(amount=spent + 1.0, at=now),
                first=line if before is None or is_first else before.first,
                traceback=text if before is None or is_first else before.traceback,
            )
            self._errors[ranks.start] = errors
            details = {"traceback": text} if is_first and text else {}
            self._log.warning(
                "environment_fault", reason="environment_error", rank=ranks.start, step=step, error=line, **details
            )
        self._on_fault("environment_error")
        described = f"{line} (error {errors.number} of {_described(ranks)})"
        self._on_own_fault("environment_error", num_errors, described)
        if errors.spent.amount > self._error_budget:
            raise EnvironmentFailed(
                f"{errors.first}; it is not made again after error {self._error_budget + 1} "
                f"(one is forgiven every {ERROR_DECAY_SECONDS:g} s)",
                traceback=errors.traceback,
            ) from error

    def _unreachable(self, rank: int, step: int, error: EnvironmentUnreachable) -> None:
        line = f"environment rank {rank}: {shorten(str(error), _ERROR_CHARACTERS, placeholder='...')}"
        with self._lock:
            self.num_faults += 1
            self._num_unreachable += 1
            num_unreachable = self._num_unreachable
            self._warn(rank, "unreachable", step=step, error=line)
        self._on_fault("unreachable")
        self._on_own_fault("unreachable", num_unreachable, line)

    @contextmanager
    def waiting(self, num_environments: int, error: EnvironmentUnreachable) -> Iterator[None]:
        """Count environments as waiting for their server while the body lasts, because of ``error``."""
        reason = shorten(str(error), _ERROR_CHARACTERS, placeholder="...")
        self._wait_for(num_environments, reason)
        try:
            yield
        finally:
            self._wait_for(-num_environments, reason)

    def _wait_for(self, change: int, reason: str) -> None:
        with self._lock:
            self._num_waiting += change
            self._on_wait(self._num_waiting, reason)

    def reset_with_vector(self) -> None:
        """Record an episode that was truncated because another environment had a fault."""
        self._on_fault("vector_reset")

    def take_dropped(self) -> int:
        """Return the dropped transitions since the last call."""
        with self._lock:
            dropped, self._num_dropped = self._num_dropped, 0
        return dropped

    def _warn(self, rank: int, reason: FaultReason, **details: Any) -> None:
        now = self._now()
        if now < self._quiet_until.get(rank, -math.inf):
            self._num_unlogged[rank] = self._num_unlogged.get(rank, 0) + 1
            return
        self._quiet_until[rank] = now + REPEAT_SECONDS
        unlogged = self._num_unlogged.pop(rank, 0)
        self._log.warning("environment_fault", reason=reason, rank=rank, **details, unlogged=unlogged)


def not_made(name: str, error: BaseException) -> EnvironmentFailed:
    """Return the failure of the environment of that name, which raised ``error`` when it was made.

    Raises:
        KeyboardInterrupt: ``error`` is the user's Ctrl-C.
    """
    _raise_if_interrupt(error)
    return EnvironmentFailed(f"{name} cannot be made: it {_in_words(error)}", traceback=_traceback(error))


def failed_in(call: str, error: BaseException) -> EnvironmentFailed:
    """Return the failure of a call of an environment, such as ``step()``, that raised ``error``.

    Raises:
        KeyboardInterrupt: ``error`` is the user's Ctrl-C.
    """
    _raise_if_interrupt(error)
    return EnvironmentFailed(f"{call} of the environment {_in_words(error)}", traceback=_traceback(error))


def named(ranks: range) -> str:
    """Return a text for one environment, or for several that step in bulk."""
    if len(ranks) == 1:
        return f"environment rank {ranks.start}"
    return f"environment ranks {ranks.start} to {ranks[-1]}, which step in bulk,"


def _described(ranks: range) -> str:
    return "this environment" if len(ranks) == 1 else "these environments"


def _in_words(error: BaseException) -> str:
    is_contract = isinstance(error, BrokenContract)
    kind = error.kind if isinstance(error, RemoteEnvironmentError) else type(error).__name__
    text = f"breaks Gymnasium's contract: {error}" if is_contract else f"raised {kind}: {error}"
    return shorten(text, _ERROR_CHARACTERS, placeholder="...")


def _raise_if_interrupt(error: BaseException) -> None:
    """Raise the KeyboardInterrupt of a Ctrl-C, such as that of ``rlsrl eval``. Workers ignore SIGINT."""
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        raise error


def _traceback(error: BaseException) -> str:
    """Return the traceback of the environment's own error, where it was raised; a broken contract has none."""
    if isinstance(error, RemoteEnvironmentError):
        return error.traceback
    return "" if isinstance(error, BrokenContract) else users_traceback(error)


def is_finite(values: NDArray[Any], zeros: NDArray[Any]) -> bool:
    """Return whether all values are finite. ``zeros`` are as many, of the same dtype.

    The product with zeros is 0 only then. It takes a third of the time of ``isfinite`` and ``all``, which counts at
    each step of an actor. ``dot`` would also warn.
    """
    return not np.vdot(values, zeros)  # NaN counts as true


class SlotGuard:
    """Keeps what is not finite out of the slots of one vector environment.

    A faulty transition becomes the step that resets its lane: the earlier steps of the episode end as truncated at the
    last finite observation. A lane without a finite observation to go on from gets a stand-in until a reset gives one.
    """

    def __init__(self, spec: EnvSpec, num_lanes: int) -> None:
        self.reward_zeros = np.zeros(num_lanes, np.float32)
        """Zeros for ``is_finite`` of a step's rewards."""
        self.frame_zeros: dict[str, NDArray[Any] | None] = {
            path: np.zeros(num_lanes * math.prod(array.shape), array.dtype)
            if np.dtype(array.dtype).kind == "f"
            else None
            for path, array in spec.observation.items()
        }
        """Zeros for ``is_finite`` of a frame, by path; None: its numbers are always finite."""
        self._stand_ins: dict[int, dict[str, NDArray[Any]]] = {}
        """By lane, then by path."""

    def find(self, arrays: Arrays, step: int) -> dict[int, tuple[str, float]]:
        """Return key and value of each lane whose reward of that step, or frame after it, is not finite."""
        found: dict[int, tuple[str, float]] = {}
        for lane, reward in enumerate(arrays["reward"][step].tolist()):
            in_reward = None if math.isfinite(reward) else ("reward", reward)
            if (value := in_reward or self.find_in_frame(arrays, step + 1, lane)) is not None:
                found[lane] = value
        return found

    def find_in_frame(self, arrays: Arrays, frame: int, lane: int) -> tuple[str, float] | None:
        """Return key and value of the lane's first entry that is not finite, or None."""
        for path, zeros in self.frame_zeros.items():
            if zeros is None:
                continue
            entries = arrays[path][frame, lane]
            places = np.argwhere(~np.isfinite(entries))
            if len(places):
                place = tuple(places[0].tolist())
                index = f"[{', '.join(map(str, place))}]" if place else ""
                return f"{path}{index}", float(entries[place])
        return None

    def discard(self, arrays: Arrays, step: int, lane: int) -> None:
        """Turn the lane's transition into its reset. The caller writes the next frame.

        At a slot's first step the transition before is in another slot. It bootstraps from the same frame either way.
        """
        for name in ("reward", "terminated", "truncated", "episode_return", "episode_length"):
            arrays[name][step, lane] = 0
        if arrays["mask"][step, lane]:
            arrays["mask"][step, lane] = False
            if step > 0 and arrays["mask"][step - 1, lane]:
                arrays["truncated"][step - 1, lane] = True

    def stand_in(self, arrays: Arrays, frame: int, lane: int) -> None:
        """Write the frame before, or zeros into frame 0. ``begin`` writes the same until ``has_frame``."""
        rows = {path: arrays[path][max(frame - 1, 0), lane].copy() for path in self.frame_zeros}
        if frame == 0:
            for row in rows.values():
                row.fill(0)
        self._stand_ins[lane] = rows
        self._write(arrays, frame, lane)

    def has_frame(self, lane: int) -> None:
        """Record that the lane has an observation of its own again."""
        self._stand_ins.pop(lane, None)

    def begin(self, arrays: Arrays) -> None:
        """Write frame 0 of the lanes that still have stand-ins."""
        for lane in self._stand_ins:
            self._write(arrays, 0, lane)

    def _write(self, arrays: Arrays, frame: int, lane: int) -> None:
        for path, row in self._stand_ins[lane].items():
            arrays[path][frame, lane] = row
