"""Specs of named arrays, of actions and of environments.

A nested structure is a flat mapping whose names are paths (``"observation/camera"``). Slots, messages and files all use
this form, so code between the environment and the network does not depend on the nesting.
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

from rlsrl.api.spec import VectorActions

Arrays = Mapping[str, NDArray[Any]]
"""Arrays by path, for example ``{"observation": ..., "reward": ...}``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """One array's shape, without leading batch axes, and dtype (numpy's name, for example ``"float32"``)."""

    shape: tuple[int, ...]
    dtype: str
    categories: tuple[tuple[int, int], ...] = ()
    """(First value, number of values) of each entry, flattened, if entries are categories: networks see them one-hot.
    Empty if entries are numbers."""

    @property
    def size(self) -> int:
        """Values of one such array."""
        return math.prod(self.shape)

    @property
    def num_features(self) -> int:
        """Network inputs of one such array: a number is one input, a category one input for each of its values."""
        return sum(number for _, number in self.categories) if self.categories else self.size

    @property
    def nbytes(self) -> int:
        """Bytes of one such array."""
        return self.size * np.dtype(self.dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that ``from_json`` reads back."""
        categories = {"categories": [list(each) for each in self.categories]} if self.categories else {}
        return {"shape": list(self.shape), "dtype": self.dtype, **categories}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: the dtype is not a boolean, integer or float type, a size is negative, or the categories do not
                fit the array.
        """
        dtype = np.dtype(value["dtype"])
        if dtype.hasobject or dtype.kind not in "biuf":
            raise ValueError(f"dtype {value['dtype']!r} is not a boolean, integer or float type")
        shape = tuple(int(size) for size in value["shape"])
        if any(size < 0 for size in shape):
            raise ValueError(f"shape {shape} has a negative size")
        categories = tuple((int(first), int(number)) for first, number in value.get("categories", ()))
        if categories and (len(categories) != math.prod(shape) or dtype.kind not in "iu"):
            raise ValueError(f"{len(categories)} categories do not fit an array of {dtype.name}{list(shape)}")
        return cls(shape=shape, dtype=dtype.name, categories=categories)


PartKind = Literal["categorical", "bernoulli", "gaussian", "squashed", "clipped"]
"""The last three are ``VectorActions``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionPart:
    """One part of an action. Parts are independent: an action's probability is the product of its parts'.

    ``categorical``: one of ``num_outputs`` choices. Parameters: a logit per choice.
    ``bernoulli``: ``num_outputs`` flags, 0 or 1. Parameters: the logit of each flag's 1.
    ``gaussian``: ``num_outputs`` floats. Parameters: the mean of each, then the logarithm of each standard deviation.
    ``squashed``: the tanh of such floats, so within [-1, 1]. Both parameters depend on the observation.
    ``clipped``: such floats, cut to [-1, 1], where the means lie, too. Deviations are those of the version.
    """

    kind: PartKind
    num_outputs: int
    """Logits or means."""

    @property
    def num_entries(self) -> int:
        """Entries of the part in the action's array."""
        return 1 if self.kind == "categorical" else self.num_outputs

    @property
    def is_vector(self) -> bool:
        """Whether the part is a vector of floats."""
        return self.kind not in ("categorical", "bernoulli")

    @property
    def num_deviations(self) -> int:
        """Standard deviations of the part."""
        return self.num_outputs if self.is_vector else 0

    @property
    def num_layer_outputs(self) -> int:
        """Outputs of a network's last layer: logits or means, and deviations that depend on the observation."""
        return 2 * self.num_outputs if self.kind == "squashed" else self.num_outputs

    @property
    def num_parameters(self) -> int:
        """Parameters of the part's distribution."""
        return self.num_outputs + self.num_deviations


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSpec:
    """The actions of an environment.

    ``discrete``: one integer in ``[0, num_actions)``, array spec ``() int64``.
    ``continuous``: a float vector within ``[low, high]``, array spec ``(dim,) float32``; a bound may be infinite. How
    it is drawn, ``vectors`` says.
    ``joint``: several parts, whose entries follow each other in one vector, array spec ``(entries,)``. The dtype is
    int64, or float32 if a part is ``gaussian``. A choice counts from 0.
    """

    kind: Literal["discrete", "continuous", "joint"]
    array: ArraySpec
    num_actions: int = 0
    """Number of choices of discrete actions; 0 for others."""
    low: tuple[float, ...] = ()
    """Lower bound of each entry of continuous actions, maybe -inf. Empty for others."""
    high: tuple[float, ...] = ()
    """Upper bound of each entry of continuous actions, maybe inf. Empty for others."""
    vectors: VectorActions = "gaussian"
    """How continuous actions are drawn. Those that are ``squashed`` or ``clipped`` have the bounds -1 and 1."""
    joint: tuple[ActionPart, ...] = ()
    """The parts of joint actions. Empty for others."""
    mask: str | None = None
    """Path of the observation array [num_outputs] whose entries are 0 for choices that are illegal now. None: all
    choices are always legal, or a part is not ``categorical``."""

    @property
    def parts(self) -> tuple[ActionPart, ...]:
        """The parts, in the order of the array and of the distribution's parameters. Most actions have one."""
        if self.kind == "joint":
            return self.joint
        if self.kind == "discrete":
            return (ActionPart(kind="categorical", num_outputs=self.num_actions),)
        return (ActionPart(kind=self.vectors, num_outputs=math.prod(self.array.shape)),)

    @property
    def num_outputs(self) -> int:
        """Logits and means of all parts."""
        return sum(part.num_outputs for part in self.parts)

    @property
    def num_layer_outputs(self) -> int:
        """Outputs of a network's last layer for all parts."""
        return sum(part.num_layer_outputs for part in self.parts)

    @property
    def num_constant_deviations(self) -> int:
        """Standard deviations that are parameters of the network by themselves."""
        return sum(part.num_deviations for part in self.parts if part.kind == "gaussian")

    @property
    def head_size(self) -> int:
        """Outputs of a network's head ``policy``: the parameters of the distribution that the network decides."""
        return self.num_layer_outputs + self.num_constant_deviations

    @property
    def distribution_size(self) -> int:
        """Number of parameters of one action's distribution: those of its parts, one part after the other."""
        return sum(part.num_parameters for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that ``from_json`` reads back. Infinite bounds, which JSON cannot hold, become null."""
        return {
            "kind": self.kind,
            "array": self.array.to_json(),
            "num_actions": self.num_actions,
            "low": [None if math.isinf(bound) else bound for bound in self.low],
            "high": [None if math.isinf(bound) else bound for bound in self.high],
            "vectors": self.vectors,
            "joint": [[part.kind, part.num_outputs] for part in self.joint],
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
            vectors=value["vectors"],
            joint=tuple(ActionPart(kind=kind, num_outputs=int(number)) for kind, number in value["joint"]),
            mask=None if value["mask"] is None else str(value["mask"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """The observations and actions of one environment, per lane."""

    observation: Mapping[str, ArraySpec]
    """Array specs by path: ``{"observation": ...}``, or ``{"observation/<key>": ...}`` for a Dict or Tuple space."""
    action: ActionSpec

    @property
    def unmasked(self) -> EnvSpec:
        """The spec without the action mask, for which networks are made. The mask is applied to a network's logits."""
        observation = {path: spec for path, spec in self.observation.items() if path != self.action.mask}
        return EnvSpec(observation=observation, action=replace(self.action, mask=None))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that ``from_json`` reads back."""
        observation = {path: spec.to_json() for path, spec in self.observation.items()}
        return {"observation": observation, "action": self.action.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote."""
        observation = {str(path): ArraySpec.from_json(spec) for path, spec in value["observation"].items()}
        return cls(observation=observation, action=ActionSpec.from_json(value["action"]))


def state_specs(sizes: Mapping[str, int]) -> dict[str, ArraySpec]:
    """Return the specs of a network's recurrent state of those sizes by name, per lane."""
    return {name: ArraySpec(shape=(size,), dtype="float32") for name, size in sizes.items()}


def digest(value: Any) -> str:
    """Return a short hash of a JSON value. Equal values have equal hashes in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
