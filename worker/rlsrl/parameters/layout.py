"""Names and shapes of the weights in a flat vector, as each version's metadata has them. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import Arrays, digest

NETWORK_KEY = "network"
"""The key, in a version's metadata, of the shapes of the network's parameters by name, in the vector's order."""
NAMED = 3
"""Parameters that a text about a difference names."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a network's parameters by name, in the order of the vector."""


def layout_digest(shapes: Shapes) -> str:
    """Return ``Parameters.layout`` of a flat vector with parameters of these shapes, by name, in this order."""
    return digest([[name, list(shape)] for name, shape in shapes.items()])


def shapes_in(metadata: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes in a version's metadata; None if an older rlsrl stored the version.

    Raises:
        ValueError: the metadata's value is something else.
    """
    value = metadata.get(NETWORK_KEY)
    if value is None:
        return None
    try:
        return {str(name): tuple(int(size) for size in shape) for name, shape in value.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the metadata's {NETWORK_KEY!r} is {value!r:.80}, not shapes by name") from error


def split(vector: NDArray[np.float32], shapes: Shapes) -> dict[str, NDArray[np.float32]]:
    """Return views of the vector, [P], by name.

    Raises:
        ValueError: the vector has another length.
    """
    places = [0, *accumulate(math.prod(shape) for shape in shapes.values())]
    if vector.size != places[-1]:
        raise ValueError(f"{vector.size} weights are not the {places[-1]} of {len(shapes)} named parameters")
    return {
        name: vector[start:end].reshape(shape)
        for (name, shape), (start, end) in zip(shapes.items(), pairwise(places), strict=True)
    }


def joined(tensors: Arrays, shapes: Shapes) -> NDArray[np.float32]:
    """Return the flat vector, [P], of tensors that have these names and shapes. Read-only."""
    vector = np.concatenate([tensors[name].ravel() for name in shapes]).astype(np.float32, copy=False)
    vector.flags.writeable = False
    return vector


def difference(found: Shapes, expected: Shapes) -> str:
    """Return how the parameters of one network differ from the expected ones, in any order; empty if they do not."""
    names = [*expected, *(name for name in found if name not in expected)]
    texts = [
        f"{name} is {_text(found.get(name))} there and {_text(expected.get(name))} here"
        for name in names
        if found.get(name) != expected.get(name)
    ]
    more = [f"{len(texts) - NAMED} more parameters differ"] if len(texts) > NAMED else []
    return "; ".join([*texts[:NAMED], *more])


def _text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"{list(shape)}"
