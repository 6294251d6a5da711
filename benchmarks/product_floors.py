"""Measure how fast the matrix products of a training step with replay could be on all cores, and the share reached.

    python benchmarks/product_floors.py            # of all workloads with replay
    python benchmarks/product_floors.py --keep     # and keep the figures

The products of one eager step of a workload, convolutions and gradients included, are listed and each is timed by
itself with as many threads as the machine has cores: by torch's own call, and dense ones of float32 also by oneDNN. The
least times add up to the floor of an update. The share is what the workload's kept result reaches of the updates a
second that the floor allows. Only the result of the same machine is compared, and only a quiet machine tells.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import REPOSITORY, described
from results import FLOORS_KEPT_AS, FOLDER, kept_rate, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry
from typing_extensions import override
from workloads import REPLAY_WORKLOADS, ReplayWorkload

from rlsrl.algorithms.base import one_rank
from rlsrl.algorithms.learner import Learner
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.spec import RLExperiment
from rlsrl.data.specs import Arrays
from rlsrl.data.version import INITIAL
from rlsrl.envs.factory import environment_spec
from rlsrl.policies.device import CPU
from rlsrl.policies.product_counter import DENSE
from rlsrl.workers.build.common import environment_source, torch_policy
from rlsrl.workers.build.learner import build_learner, example_batch

SECONDS = 0.3
"""Each product is repeated for so long."""
WARM_CALLS = 3
KEPT = FOLDER / f"{FLOORS_KEPT_AS}.json"


@dataclass(frozen=True)
class Form:
    """The form of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Any) -> Any:
        """Return the form of a tensor, and any other value as it is."""
        return cls(tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value

    def tensor(self) -> Tensor:
        """Return a tensor of this form with random numbers."""
        size = 1 + sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        return torch.rand(size).to(self.dtype).as_strided(self.shape, self.stride)


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Counts the products that torch computes within the block, by operator and forms of the arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[tuple[Any, Any]] = Counter()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in flop_registry:
            self.found[func, _hashable(tree_map(Form.of, args))] += 1
        return func(*args, **(kwargs or {}))


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def products_of(workload: ReplayWorkload) -> Mapping[tuple[Any, Any], float]:
    """Return the products of an update, each with its mean number."""
    learner, batch = _learner(workload)
    learner.step(batch)
    with Products() as products:
        updates = len(learner.step(batch).taken)
    return {key: number / updates for key, number in products.found.items()}


def _learner(workload: ReplayWorkload) -> tuple[Learner, Arrays]:
    experiment = RLExperiment.model_validate(workload.experiment())
    config = resolve(experiment, local_placement(run_uid="floors", run_folder=Path("floors"))).trainer
    env_spec = environment_spec(environment_source(config.environment))
    policy = torch_policy(config.network, env_spec, outputs=config.algorithm.chosen.outputs, seed=config.seed)
    learner = build_learner(config, env_spec, policy, policy.parameters(INITIAL), one_rank, CPU)
    return learner, example_batch(config, env_spec)


def least_seconds(operator: Any, forms: Any) -> float:
    """Return the least time of a product, by torch's call or by oneDNN's."""
    arguments = [form.tensor() if isinstance(form, Form) else _listed(form) for form in forms]
    ways: list[Callable[[], Any]] = [lambda: operator(*arguments)]
    if operator.overloadpacket.__name__ in DENSE:
        ways.append(_by_onednn(*arguments[-2:]))
    return min(map(_least, ways))


def _by_onednn(a: Tensor, b: Tensor) -> Callable[[], Any]:
    pairs = [(a, b)] if a.dim() == 2 else list(zip(a, b, strict=True))
    prepared = [(one.contiguous(), other.t().contiguous()) for one, other in pairs]
    linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - torch has no other name for it
    return lambda: [linear(one, other, None, "none", [], "") for one, other in prepared]


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple) else value


def _least(call: Callable[[], Any]) -> float:
    for _ in range(WARM_CALLS):
        call()
    least, end = float("inf"), time.perf_counter() + SECONDS
    while (began := time.perf_counter()) < end:
        call()
        least = min(least, time.perf_counter() - began)
    return least


def measured(workload: ReplayWorkload) -> dict[str, Any]:
    """Return a workload's floor, and the share of it that the kept result reaches if there is one of this machine."""
    products = products_of(workload)
    torch.set_num_threads(os.cpu_count() or 1)
    with torch.no_grad():
        seconds = sum(number * least_seconds(*key) for key, number in products.items())
    found = {"products": round(sum(products.values()), 1), "floor_seconds": seconds}
    rate = kept_rate(workload.name)
    if rate is None:
        return found
    return {**found, "env_steps_a_second": rate, "share": rate * workload.updates_per_env_step * seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.relative_to(REPOSITORY)}")
    arguments = parser.parse_args()
    floors = {}
    for name, workload in REPLAY_WORKLOADS.items():
        floors[name] = found = measured(workload)
        share = f"{found['share']:.0%} of it reached" if "share" in found else "no result of this machine"
        print(f"{name}: {found['products']:g} products, {1e3 * found['floor_seconds']:.3f} ms an update; {share}")
    if arguments.keep:
        write(KEPT, {"machine": described(REPOSITORY), "floors": floors})
    return 0


if __name__ == "__main__":
    sys.exit(main())
