"""What `rlsrl control` and `kubectl rlsrl control` change in an experiment's spec. Pure.

Control is desired state, as all else of the spec: a worker, coordinator or operator that restarts finds it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlsrl.api.role_names import COORDINATOR, TRAINER
from rlsrl.api.roles import ROLES
from rlsrl.api.spec import ExperimentSpec, PausedWorkers
from rlsrl.api.spec.run import MAX_INDICES

ControlAction = Literal["pause", "resume", "stop", "checkpoint"]
CONTROLLED_ROLES = tuple(role.name for role in ROLES if role.name != COORDINATOR)
"""The roles that can be paused."""


class ControlRefused(ValueError):
    """The action is not possible for this experiment; the text says why and what is allowed."""


def control_changes(
    spec: ExperimentSpec, action: ControlAction, *, role: str | None, index: int | None, now: str
) -> Mapping[str, Any]:
    """Return the new values of fields of the spec, by path without ``spec.``, as JSON values.

    Args:
        spec: the present spec.
        action: what is asked for.
        role: only the workers of this role; None: of all roles. For pause and resume.
        index: only the worker with this index; None: all. For pause and resume of a role.
        now: the time, as text that differs from that of every earlier request.

    Raises:
        ControlRefused: the experiment has no such workers, or the action takes none.
    """
    if action in ("pause", "resume"):
        paused = _paused_after(spec, is_pause=action == "pause", role=role, index=index)
        return {"paused": [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in paused]}
    if role is not None:
        raise ControlRefused(f"{action} concerns the whole run: leave --role out")
    if action == "checkpoint":
        return {"parameters.storeRequest": now}
    # Paused evaluators would keep the run from its end: they play its last version.
    return {"stop.now": True, **({"paused": []} if spec.paused else {})}


def merge_patch(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes as a JSON merge patch of the spec."""
    patch: dict[str, Any] = {}
    for path, value in changes.items():
        *parents, name = path.split(".")
        at = patch
        for parent in parents:
            at = at.setdefault(parent, {})
        at[name] = value
    return patch


def overrides_of(changes: Mapping[str, Any]) -> list[str]:
    """Return the changes as ``rlsrl.api.load.apply_overrides`` takes them."""
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


def _paused_after(
    spec: ExperimentSpec, *, is_pause: bool, role: str | None, index: int | None
) -> Sequence[PausedWorkers]:
    numbers = {each.name: each.num_workers(spec) for each in ROLES if each.name in CONTROLLED_ROLES}
    if role is None:
        if index is not None:
            raise ControlRefused("--index names a worker of one role: add --role")
        return [_entry(name) for name in sorted(numbers) if numbers[name]] if is_pause else ()
    if not numbers[role]:
        there = ", ".join(sorted(name for name in numbers if numbers[name]))
        raise ControlRefused(f"the experiment has no {role} workers; it has {there}")
    if index is not None and role == TRAINER:
        raise ControlRefused("trainers train together, so all of them pause or none: leave --index out")
    if index is not None and not 0 <= index < numbers[role]:
        raise ControlRefused(f"{role}-{index} does not exist: --index goes from 0 to {numbers[role] - 1}")
    paused = _indices(spec, role, numbers[role])
    chosen = set(range(numbers[role])) if index is None else {index}
    left = paused | chosen if is_pause else paused - chosen
    entries = [each for each in spec.paused if each.role != role]
    if len(left) == numbers[role]:
        entries.append(_entry(role))
    elif len(left) > MAX_INDICES:
        raise ControlRefused(f"{len(left)} single workers of one role; at most {MAX_INDICES}, or all of them")
    elif left:
        entries.append(_entry(role, sorted(left)))
    return sorted(entries, key=lambda entry: entry.role)


def _indices(spec: ExperimentSpec, role: str, number: int) -> set[int]:
    """Return the indices of the role's paused workers."""
    return {index for index in range(number) if any(each.covers(role, index) for each in spec.paused)}


def _entry(role: str, indices: Sequence[int] | None = None) -> PausedWorkers:
    return PausedWorkers.model_validate({"role": role, "indices": indices})
