"""The replay stores of an experiment: what each rank's keeps, and the room that their files need. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import JsonValue
from typing_extensions import override

from rlsrl.api.pods import CONTAINER
from rlsrl.api.quantities import amount_of
from rlsrl.api.spec import AlgorithmSpec, Environment, ExperimentSpec, ReplaySpec
from rlsrl.buffers.replay.layout import ReplayLayout
from rlsrl.buffers.replay.store_file import SUFFIX, file_bytes
from rlsrl.data.slots import SlotLayout, rollout_layout
from rlsrl.data.specs import EnvSpec, state_specs

_MIB, _GIB = 1024**2, 1024**3
_EPHEMERAL_STORAGE = "ephemeral-storage"
"""The resource that a pod's ``emptyDir`` volumes count as."""


@dataclass(frozen=True, kw_only=True)
class ReplayStores:
    """The stores that lie in one place, and whether they fit there."""

    field: str
    """Where the experiment has the capacity."""
    capacity: int
    """Transitions of all these stores together."""
    number: int
    """Stores, with an equal part of the capacity each."""
    layout: ReplayLayout
    """Of each store."""

    @override
    def __str__(self) -> str:
        files = "" if self.number == 1 else f" in {self.number} files"
        each = self.num_bytes / self.capacity
        return f"{self.capacity:,} transitions x {each:,.0f} bytes = {shown(self.num_bytes)}{files}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self.number * file_bytes(self.layout)

    def part(self, num_parts: int) -> ReplayStores:
        """Return those in one of several equal parts of the places."""
        field = self.field if num_parts == 1 else f"{self.field}, one of {num_parts} parts"
        return replace(self, field=field, capacity=-(-self.capacity // num_parts), number=self.number // num_parts)

    def largest_capacity(self, num_bytes: int) -> int:
        """Return the largest capacity, at most one that takes as many bytes as these, whose files fit into
        ``num_bytes``; 0: none fits."""
        each = num_bytes // self.number
        num_segments = bisect_right(
            range(1, self.layout.num_segments + 1),
            each,
            key=lambda number: file_bytes(replace(self.layout, num_segments=number)),
        )
        return self.number * num_segments * self.layout.num_steps

    def shortage(self, room: int, where: str) -> str | None:
        """Return that the files do not fit into ``room`` bytes, and the largest capacity that does; None: they fit.

        ``where``: of which medium the room is, and at which path.
        """
        if self.num_bytes <= room:
            return None
        return (
            f"{self.field}: {self}, and there is room for {shown(room)} {where}: at most "
            f"{self.largest_capacity(room):,} transitions fit; lower it, or make room"
        )


def stores_of(spec: ExperimentSpec, env_spec: EnvSpec) -> ReplayStores | None:
    """Return all stores of an experiment with such environments; None if nothing is replayed.

    They are the trainers', or those of buffer workers if there are any.
    """
    algorithm = spec.algorithm.chosen
    number = spec.num_replay_stores
    if (settings := algorithm.draws_from) is None:
        return None
    slot = rollout_layout(
        env_spec,
        num_steps=spec.actors.rollout_length,
        num_lanes=1,
        state=state_specs(spec.policy.network.state_sizes),
        discounted_return=algorithm.normalize_rewards,
    )
    return ReplayStores(
        field=capacity_field(spec.algorithm),
        capacity=settings.capacity,
        number=number,
        layout=replay_layout(spec.worker_environment, slot, share_of(settings, number)),
    )


def pod_shortage(spec: ExperimentSpec, stores: ReplayStores) -> str | None:
    """Return that the stores of a pod take more room than it has; None if they fit.

    A buffer worker has its volume. A trainer has ephemeral storage: without a limit in ``trainers.podTemplate`` the
    administrator's and the node's apply, which are not known here.
    """
    if spec.buffer_workers is not None:
        size = spec.buffer_workers.replay_volume.size
        room = amount_of(size)
        assert room is not None, "validation leaves only quantities"
        where = f"on the volume of each buffer worker, by its spec.bufferWorkers.volume.size of {size}"
        return stores.part(stores.number).shortage(room, where)
    limit = _ephemeral_limit(spec.trainers.pod_template)
    where = f"in each trainer pod, by its limit of {_EPHEMERAL_STORAGE}"
    return None if limit is None else stores.part(spec.trainers.num_pods).shortage(limit, where)


def _ephemeral_limit(template: Mapping[str, JsonValue]) -> int | None:
    match template:
        case {"spec": {"containers": [*containers]}}:
            for container in containers:
                match container:
                    case {"name": name, "resources": {"limits": dict(limits)}} if name == CONTAINER:
                        return amount_of(limits.get(_EPHEMERAL_STORAGE))
    return None


def capacity_field(algorithm: AlgorithmSpec) -> str:
    """Return where the experiment has the capacity of its stores."""
    return ".".join(("spec.algorithm", algorithm.name, *algorithm.chosen.replay_path, "capacity"))


def store_path(folder: str | Path, role: str, rank: int) -> Path:
    """Return the file of a rank's store in the folder of stores."""
    return Path(folder) / f"{role}-{rank}{SUFFIX}"


def share_of(settings: ReplaySpec, num_ranks: int) -> ReplaySpec:
    """Return the settings of one rank's store: each has an equal part of the transitions, rounded up."""
    shares = {"capacity": -(-settings.capacity // num_ranks), "start": -(-settings.start // num_ranks)}
    return settings.model_copy(update=shares)


def replay_layout(environment: Environment, slot: SlotLayout, settings: ReplaySpec) -> ReplayLayout:
    """Return the layout of the store that the spec asks for. Observations that ``frameStack`` stacks are kept once."""
    stacks = _stacks(environment, slot)
    has_priorities = settings.priorities is not None
    return ReplayLayout.of(slot, capacity=settings.capacity, stacks=stacks, has_priorities=has_priorities)


def shown(num_bytes: int) -> str:
    """Return a number of bytes with its unit."""
    return f"{num_bytes / _GIB:,.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:,.1f} MiB"


def _stacks(environment: Environment, slot: SlotLayout) -> dict[str, int]:
    """Return the number of images of each observation that ``environment.frameStack`` stacks."""
    images = environment.frame_stack
    if images is None:
        return {}
    mask = environment.action_mask
    return {
        name: images
        for name, field in slot.fields.items()
        if field.axes == "frames" and field.array.shape[:1] == (images,) and not (mask and name.endswith(f"/{mask}"))
    }
