"""The on-policy buffer: each lane is trained once, in the order in which its credit was granted.

The order of arrival depends on timing; the order of credits does not. Batches are formed in credit order, and a batch
waits for every older credit that a live producer still holds. So fast producers never displace slow ones, the policy
lag is kept by waiting instead of dropping, and with a policy lag of 0 a run always forms the same batches.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.slots import Slot, SlotLayout
from rlsrl.data.version import Version


@dataclass(frozen=True, kw_only=True)
class LaneBatch:
    """One training batch of B lanes, with the slots' field names."""

    arrays: dict[str, NDArray[Any]]
    """Frames [T+1, B, ...], steps [T, B, ...], lanes [B, ...]; ``version_*`` are repeated to [T, B]."""
    num_transitions: int
    """Number of True entries in ``mask``."""
    oldest_version: Version
    """Version of the oldest action in the batch. Policy lag counts from it."""


@dataclass(frozen=True, kw_only=True)
class Discard:
    """Lanes that may no longer be trained, and why."""

    reason: str
    num_lanes: int
    num_transitions: int


@dataclass(order=True)
class _Held:
    """The copied lanes of a slot that are not trained yet."""

    credit: int
    arrays: dict[str, NDArray[Any]] = field(compare=False)
    oldest_version: Version = field(compare=False)
    first_lane: int = field(compare=False, default=0)

    @property
    def num_lanes(self) -> int:
        return int(self.arrays["mask"].shape[1]) - self.first_lane

    def transitions(self, num_lanes: int) -> int:
        return int(self.arrays["mask"][:, self.first_lane : self.first_lane + num_lanes].sum())


class FifoBuffer:
    """Forms batches of B lanes in credit order. One thread puts, one thread samples, any thread may close."""

    def __init__(self, *, layout: SlotLayout, batch_lanes: int, max_policy_lag: int) -> None:
        """``layout`` gives the slots' fields; its number of lanes is ignored."""
        self._layout = layout.with_lanes(batch_lanes)
        self._max_policy_lag = max_policy_lag
        self._changed = threading.Condition()
        self._held: list[_Held] = []
        self._oldest_outstanding: int | None = None
        self._current: Version | None = None
        self._closed = False

    @property
    def num_transitions(self) -> int:
        """Transitions held, counted now. It equals the ledger's ``in_buffer``."""
        with self._changed:
            return sum(held.transitions(held.num_lanes) for held in self._held)

    def put(self, slots: Sequence[Slot], *, oldest_outstanding: int | None) -> None:
        """Copy the slots' lanes. The caller may then release the slots.

        ``oldest_outstanding`` is the lowest credit that a live producer holds after these slots were received, or None.
        If only this changed, because a producer died, call ``put`` without slots.
        """
        copies = [
            _Held(slot.credit, {name: array.copy() for name, array in slot.arrays.items()}, slot.oldest_version)
            for slot in slots
        ]
        with self._changed:
            for held in copies:
                insort(self._held, held)
            self._oldest_outstanding = oldest_outstanding
            self._changed.notify_all()

    def discard_stale(self, current: Version) -> list[Discard]:
        """Remove and return lanes that training at ``current`` may not use: of another attempt, or beyond the lag.

        A slot filled under a credit of this consumer is never stale. A slot that a producer posts again after this
        consumer restarted may be stale. Such a slot may arrive at any time: ``sample`` then returns None until the next
        call of ``discard_stale``.
        """
        with self._changed:
            self._current = current
            return self._remove(self._stale_reason)

    def _stale_reason(self, held: _Held) -> str | None:
        """Return why a slot may not be trained now, or None if it may."""
        if self._current is None:
            return None
        if held.oldest_version.attempt != self._current.attempt:
            return "old_attempt"
        return "stale" if self._current.step - held.oldest_version.step > self._max_policy_lag else None

    def _holds_stale(self) -> bool:
        return any(self._stale_reason(held) is not None for held in self._held)

    def _remove(self, reason_of: Callable[[_Held], str | None]) -> list[Discard]:
        """Remove and return the slots for which ``reason_of`` returns a reason."""
        removed = [(reason, held) for held in self._held if (reason := reason_of(held)) is not None]
        self._held = [held for held in self._held if reason_of(held) is None]
        return [
            Discard(reason=reason, num_lanes=held.num_lanes, num_transitions=held.transitions(held.num_lanes))
            for reason, held in removed
        ]

    def sample(self, timeout: float) -> LaneBatch | None:
        """Return the next batch. ``put``, ``close`` or the timeout (seconds) ends the wait.

        Returns None if no batch is complete in time, if ``discard_stale`` has lanes to remove, or after ``close``.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._holds_stale() or self._complete(), timeout)
            if self._closed or self._holds_stale() or not self._complete():
                return None
            parts = self._take()
        return self._assemble(parts)

    def close(self) -> list[Discard]:
        """Form no more batches, wake the waiting thread, and return the lanes that were never trained."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._remove(lambda _: "end_of_run")

    def _complete(self) -> bool:
        lanes = 0
        for held in self._held:
            if self._oldest_outstanding is not None and self._oldest_outstanding < held.credit:
                return False
            lanes += held.num_lanes
            if lanes >= self._layout.num_lanes:
                return True
        return False

    def _take(self) -> list[_Held]:
        wanted = self._layout.num_lanes
        parts: list[_Held] = []
        while wanted:
            held = self._held[0]
            lanes = min(wanted, held.num_lanes)
            columns = slice(held.first_lane, held.first_lane + lanes)
            parts.append(_Held(held.credit, _columns(self._layout, held.arrays, columns), held.oldest_version))
            held.first_lane += lanes
            wanted -= lanes
            if held.num_lanes == 0:
                self._held.pop(0)
        return parts

    def _assemble(self, parts: list[_Held]) -> LaneBatch:
        arrays = {
            name: _join([part.arrays[name] for part in parts], axis=0 if spec.axes == "lanes" else 1)
            for name, spec in self._layout.fields.items()
        }
        return LaneBatch(
            arrays=arrays,
            num_transitions=int(arrays["mask"].sum()),
            oldest_version=min(part.oldest_version for part in parts),
        )


def _columns(layout: SlotLayout, arrays: dict[str, NDArray[Any]], columns: slice) -> dict[str, NDArray[Any]]:
    """Return the lanes ``columns`` of a slot. A value that a slot stores once a step is repeated for each lane."""
    picked: dict[str, NDArray[Any]] = {}
    for name, spec in layout.fields.items():
        if spec.axes == "lanes":
            picked[name] = arrays[name][columns]
        elif spec.axes == "clock":
            picked[name] = np.broadcast_to(arrays[name][:, None], (layout.num_steps, columns.stop - columns.start))
        else:
            picked[name] = arrays[name][:, columns]
    return picked


def _join(parts: list[NDArray[Any]], axis: int) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)
