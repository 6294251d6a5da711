"""Shapes and dtypes of named arrays, and what an environment takes and gives.

A nested structure is a flat mapping whose names are paths (``"observation/camera"``): one form for slots, messages
and files, so nothing on the way has to know how an observation is nested.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
"""Arrays by path, for example ``{"observation": ..., "reward": ...}``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """One array's shape, without leading batch axes, and dtype (numpy's name, for example ``"float32"``)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Values of one such array."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one such array."""
        return self.size * np.dtype(self.dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        """A JSON value that ``from_json`` reads back."""
        return {"shape": list(self.shape), "dtype": self.dtype}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote; object dtypes are refused."""
        dtype = np.dtype(value["dtype"])
        if dtype.hasobject or dtype.kind not in "biuf":
            raise ValueError(f"dtype {value['dtype']!r} is not a plain boolean, integer or float type")
        shape = tuple(int(size) for size in value["shape"])
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {shape} has a negative size")
        return cls(shape=shape, dtype=dtype.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSpec:
    """What an environment takes for an action.

    ``discrete``: one integer in ``[0, num_actions)``, array spec ``() int64``.
    ``continuous``: a float vector within ``[low, high]``, array spec ``(dim,) float32``; a bound may be infinite.
    """

    kind: Literal["discrete", "continuous"]
    array: ArraySpec
    num_actions: int = 0
    """Number of choices; 0 unless discrete."""
    low: tuple[float, ...] = ()
    """Least value of each entry; -inf where there is none. Empty unless continuous."""
    high: tuple[float, ...] = ()
    """Greatest value of each entry; inf where there is none. Empty unless continuous."""
    mask: str | None = None
    """Path of the observation array, [num_actions], whose entries are 0 for the choices that are illegal now; None:
    all are always legal. None unless discrete."""

    @property
    def distribution_size(self) -> int:
        """Parameters of the distribution that one action is drawn from.

        ``discrete``: a logit for each choice. ``continuous``: the mean of each entry, then the logarithm of each
        entry's standard deviation.
        """
        return self.num_actions if self.kind == "discrete" else 2 * math.prod(self.array.shape)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that ``from_json`` reads back; null for an infinite bound, which JSON cannot hold."""
        return {
            "kind": self.kind,
            "array": self.array.to_json(),
            "num_actions": self.num_actions,
            "low": [None if math.isinf(bound) else bound for bound in self.low],
            "high": [None if math.isinf(bound) else bound for bound in self.high],
            "mask": self.mask,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote."""
        return cls(
            kind=value["kind"],
            array=ArraySpec.from_json(value["array"]),
            num_actions=int(value["num_actions"]),
            low=tuple(-math.inf if bound is None else float(bound) for bound in value["low"]),
            high=tuple(math.inf if bound is None else float(bound) for bound in value["high"]),
            mask=None if value["mask"] is None else str(value["mask"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """What one environment gives and takes, per lane; learnt from an instance that is closed again."""

    observation: Mapping[str, ArraySpec]
    """Array specs by path: ``{"observation": ...}``, or ``{"observation/<key>": ...}`` for a Dict space."""
    action: ActionSpec

    @property
    def unmasked(self) -> EnvSpec:
        """The same without the action mask: what a network is made for. Whoever runs it applies the mask."""
        observation = {path: spec for path, spec in self.observation.items() if path != self.action.mask}
        return EnvSpec(observation=observation, action=replace(self.action, mask=None))

    def to_json(self) -> dict[str, Any]:
        """A JSON value that ``from_json`` reads back."""
        observation = {path: spec.to_json() for path, spec in self.observation.items()}
        return {"observation": observation, "action": self.action.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote."""
        observation = {str(path): ArraySpec.from_json(spec) for path, spec in value["observation"].items()}
        return cls(observation=observation, action=ActionSpec.from_json(value["action"]))


def digest(value: Any) -> str:
    """A short hash of a JSON value, equal in every process for equal values."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
