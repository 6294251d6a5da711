"""The parts of an observation that encoders take, by key. Without torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlsrl.data.specs import ArraySpec
from rlsrl.runtime.errors import ConfigurationError

_ROOT = "observation/"
"""Begins the path of each array of a Dict or Tuple observation."""
MOST_LISTED = 12
"""Keys that an error lists."""


@dataclass(frozen=True, kw_only=True)
class ObservationPart:
    """Arrays that one encoder takes, or one array without an encoder."""

    encoder: int | None
    """The encoder's place among the keys."""
    arrays: Mapping[str, ArraySpec]
    """By path, in the order of the observation."""


def parts_of(observation: Mapping[str, ArraySpec], keys: Sequence[str]) -> list[ObservationPart]:
    """Return the parts of an observation in its own order, whatever that of the keys.

    Args:
        observation: The arrays by path.
        keys: Those of arrays, or of nested observations, joined by slashes. They have no array in common.

    Raises:
        ConfigurationError: the observation has no such key, or others between the arrays of one.
    """
    by_key = [_below(key, observation) for key in keys]
    order = list(observation)
    for key, paths in zip(keys, by_key, strict=True):
        if not paths:
            raise ConfigurationError(f"policy.network.encoders: {key!r} {_unknown(key, observation)}")
        first = order.index(paths[0])
        if order[first : first + len(paths)] != paths:
            raise ConfigurationError(
                f"policy.network.encoders: {key!r} stands for {_listed(paths)}, which do not follow each other in the "
                "observation: its keys with slashes are ambiguous, rename them"
            )
    encoders = {path: place for place, paths in enumerate(by_key) for path in paths}
    parts: dict[str, ObservationPart] = {}
    for path in observation:
        encoder = encoders.get(path)
        paths = [path] if encoder is None else by_key[encoder]
        parts[paths[0]] = ObservationPart(encoder=encoder, arrays={each: observation[each] for each in paths})
    return [*parts.values()]


def _below(key: str, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if f"{path}/".startswith(f"{_ROOT}{key}/")]


def _unknown(key: str, paths: Iterable[str]) -> str:
    known = [path.removeprefix(_ROOT) for path in paths if path.startswith(_ROOT)]
    if not known:
        return "is no key of the observation, which is one array: use mlp, cnn or impalaCnn without encoders"
    steps = [each.split("/") for each in known]
    nested = dict.fromkeys("/".join(each[:length]) for each in steps for length in range(1, len(each)))
    near = difflib.get_close_matches(key.strip("/").removeprefix(_ROOT), [*nested, *known], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"is no key that the network gets: {_listed(known)}{hint}"


def _listed(names: Sequence[str]) -> str:
    """Return names for an error, the first of many."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(map(repr, names[:MOST_LISTED])) + more
