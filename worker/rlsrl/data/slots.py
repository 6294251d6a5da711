"""Slots: the preallocated arrays of one rollout. An actor writes them in place, and a trainer reads them.

A slot has T steps of N lanes. Frames (observations) have T + 1 entries: the frame after the last step serves to
bootstrap, without a side array. Autoreset is NEXT_STEP, as in Gymnasium's vector environments: after a step that ended
an episode, the next frame is that episode's FINAL observation. The step taken from it only resets: it is not a
transition, and its ``mask`` is False.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.episodes import info_field
from rlsrl.data.specs import ArraySpec, EnvSpec, digest
from rlsrl.data.version import INITIAL, Version

Axes = Literal["frames", "steps", "lanes", "clock"]
"""Leading axes of a field: frames [T+1, N], steps [T, N], lanes [N], clock [T]."""

DISCOUNTED_RETURN = "discounted_return"
"""A field [T, N] of slots whose rewards are scaled: the discounted return of each lane so far."""

ALIGNMENT = 64
"""Every array starts on a cache line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """One array of a slot: its leading axes, and the spec of each entry."""

    axes: Axes
    array: ArraySpec


@dataclass(frozen=True, kw_only=True)
class SlotLayout:
    """The place of each array in a slot. Both ends of a stream compare a hash of it in their handshake."""

    num_steps: int
    """T: steps of one rollout."""
    num_lanes: int
    """N: lanes that are stepped together. Each environment is one lane."""
    fields: Mapping[str, FieldSpec]
    """Field specs by path, in memory order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a field, leading axes included."""
        field_spec = self.fields[name]
        leading = {
            "frames": (self.num_steps + 1, self.num_lanes),
            "steps": (self.num_steps, self.num_lanes),
            "lanes": (self.num_lanes,),
            "clock": (self.num_steps,),
        }[field_spec.axes]
        return leading + field_spec.array.shape

    def nbytes_of(self, name: str) -> int:
        """Bytes of a whole field."""
        return math.prod(self.shape(name)) * np.dtype(self.fields[name].array.dtype).itemsize

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each field from the slot's start."""
        offsets: dict[str, int] = {}
        position = 0
        for name in self.fields:
            offsets[name] = position
            position += -(-self.nbytes_of(name) // ALIGNMENT) * ALIGNMENT
        return offsets

    @property
    def nbytes(self) -> int:
        """Bytes of one slot, padding included."""
        return sum(-(-self.nbytes_of(name) // ALIGNMENT) * ALIGNMENT for name in self.fields)

    @property
    def step_digest(self) -> str:
        """A hash of steps and fields: equal for layouts that differ only in the number of lanes."""
        return digest({"num_steps": self.num_steps, "fields": self.to_json()["fields"]})

    def view(self, buffer: memoryview | bytearray | Any) -> dict[str, NDArray[Any]]:
        """Return one array per field over ``buffer`` (at least ``nbytes`` long). Nothing is copied.

        Raises:
            ValueError: the buffer is too short.
        """
        return {
            name: np.ndarray(self.shape(name), dtype=self.fields[name].array.dtype, buffer=buffer, offset=offset)
            for name, offset in self.offsets.items()
        }

    def with_lanes(self, num_lanes: int) -> Self:
        """Return the layout with the same fields for another number of lanes."""
        return type(self)(num_steps=self.num_steps, num_lanes=num_lanes, fields=self.fields)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that ``from_json`` reads back."""
        return {
            "num_steps": self.num_steps,
            "num_lanes": self.num_lanes,
            "fields": {name: {"axes": spec.axes, "array": spec.array.to_json()} for name, spec in self.fields.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, ValueError: the value is not a layout.
        """
        fields = {
            str(name): FieldSpec(axes=_axes(spec["axes"]), array=ArraySpec.from_json(spec["array"]))
            for name, spec in value["fields"].items()
        }
        num_steps, num_lanes = int(value["num_steps"]), int(value["num_lanes"])
        if num_steps < 1 or num_lanes < 1:
            raise ValueError(f"num_steps is {num_steps} and num_lanes {num_lanes}; both must be at least 1")
        return cls(num_steps=num_steps, num_lanes=num_lanes, fields=fields)


def _axes(value: Any) -> Axes:
    if value not in ("frames", "steps", "lanes", "clock"):
        raise ValueError(f"axes {value!r} is not one of frames, steps, lanes, clock")
    return value  # type: ignore[no-any-return]


_STATE = "state/"


def state_field(name: str) -> str:
    """Return the field of the recurrent state of that name."""
    return f"{_STATE}{name}"


def is_state_field(name: str) -> bool:
    """Return whether a field of a slot is one of recurrent state, whose axes are lanes."""
    return name.startswith(_STATE)


def rollout_layout(
    env: EnvSpec,
    *,
    num_steps: int,
    num_lanes: int,
    state: Mapping[str, ArraySpec] | None = None,
    discounted_return: bool = False,
    episode_info: Sequence[str] = (),
) -> SlotLayout:
    """Return the layout of a rollout, which an actor writes and a trainer reads.

    Fields:
        ``observation...``: frames.
        ``action``, ``reward``, ``terminated``, ``truncated``.
        ``behavior_log_prob``: by the policy that acted.
        ``mask``: False where the step is not a transition (autoreset, a value that is not finite).
        ``episode_return``, ``episode_length``: of the raw rewards, at the step that ends an episode; else 0. An episode
            that ends only for training is not reported.
        ``episode_info/...``: values of ``info`` under the keys ``episode_info``, where an episode is reported. NaN:
            there is no finite value. Elsewhere undefined.
        ``version_attempt``, ``version_step``: of the weights that chose the step's actions.
        ``state/...``: the recurrent state with which each lane acted in frame 0.
        ``discounted_return``: of the lane's episode so far; only if ``discounted_return`` is true.
    """
    fields = {name: FieldSpec(axes="frames", array=spec) for name, spec in env.observation.items()}
    per_step = {
        "action": env.action.array,
        "behavior_log_prob": ArraySpec(shape=(), dtype="float32"),
        "reward": ArraySpec(shape=(), dtype="float32"),
        "terminated": ArraySpec(shape=(), dtype="bool"),
        "truncated": ArraySpec(shape=(), dtype="bool"),
        "mask": ArraySpec(shape=(), dtype="bool"),
        "episode_return": ArraySpec(shape=(), dtype="float32"),
        "episode_length": ArraySpec(shape=(), dtype="int32"),
    }
    per_step |= {info_field(key): ArraySpec(shape=(), dtype="float32") for key in episode_info}
    if discounted_return:
        per_step[DISCOUNTED_RETURN] = ArraySpec(shape=(), dtype="float32")
    fields |= {name: FieldSpec(axes="steps", array=spec) for name, spec in per_step.items()}
    version = ArraySpec(shape=(), dtype="int64")
    fields |= {name: FieldSpec(axes="clock", array=version) for name in ("version_attempt", "version_step")}
    fields |= {state_field(name): FieldSpec(axes="lanes", array=spec) for name, spec in (state or {}).items()}
    return SlotLayout(num_steps=num_steps, num_lanes=num_lanes, fields=fields)


@dataclass(frozen=True, order=True, slots=True)
class ProducerId:
    """Identifies an actor: its leased index, and how often that index was leased before."""

    index: int
    incarnation: int


@dataclass(kw_only=True, slots=True, eq=False)
class Slot:
    """The memory of one rollout with its metadata. Two slots are equal only if they are the same object."""

    arrays: dict[str, NDArray[Any]]
    """The layout's fields by name, over the transport's memory."""
    min_version: Version = INITIAL
    """The oldest weights that may act in this slot. Set when its credit is granted."""
    credit: int = -1
    """The credit's place in the order of granting, unique per consumer; -1 without a credit."""
    producer: ProducerId | None = None
    """The actor that filled it. The transport sets it on arrival."""
    sequence: int = -1
    """The producer's count of slots posted in its incarnation, from 0. ``post`` sets it."""
    num_transitions: int = 0
    """True entries of ``mask``: the ledger counts them. The producer sets it before ``post``."""
    total: int = 0
    """Transitions that the producer's index ever posted to this consumer, this slot included. ``post`` sets it."""
    handle: Any = field(default=None, repr=False)
    """Private to the transport."""

    @property
    def num_lanes(self) -> int:
        """N of this slot."""
        return int(self.arrays["mask"].shape[1])

    @property
    def oldest_version(self) -> Version:
        """The version of the slot's oldest action. Policy lag is measured from it."""
        attempts, steps = self.arrays["version_attempt"], self.arrays["version_step"]
        attempt = attempts.min()
        return Version(int(attempt), int(steps[attempts == attempt].min()))
