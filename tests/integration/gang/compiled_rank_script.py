"""One rank of a gang under torchrun: trains each batch eager and compiled from one state, and writes both results."""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rank_script import batches, lanes_of, learner_of

from rlsrl.algorithms.base import Tensors
from rlsrl.algorithms.ppo import Ppo
from rlsrl.data.version import Version
from rlsrl.workers.gang import Gang, ProcessGroupGang


class CountingPpo(Ppo):
    """Counts the eager evaluations of its network."""

    num_evaluations = 0

    def evaluate(self, params: torch.Tensor, rows: Tensors) -> Tensors:
        if not torch.compiler.is_compiling():
            CountingPpo.num_evaluations += 1
        return super().evaluate(params, rows)


def zeros_like(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    zeros = {name: np.zeros_like(array) for name, array in arrays.items()}
    zeros["mask"][...] = True
    return zeros


def trained(gang: Gang) -> dict[str, np.ndarray]:
    eager, compiled = learner_of(gang, kind=CountingPpo), learner_of(gang, kind=CountingPpo)
    results = {}
    for step, arrays in enumerate(batches(poison=2)):
        mine = lanes_of(arrays, gang.rank, gang.size)
        if step == 0:
            assert "torch._dynamo" not in sys.modules
            eager.step(mine)  # as before a switch during a run
            eager = learner_of(gang, kind=CountingPpo)
            compiled.compile(zeros_like(mine))
            compiled.use_compiled()
            torch.compiler.set_stance("fail_on_recompile")
        before = CountingPpo.num_evaluations
        results[f"skipped-{step}"] = np.array([learner.step(mine).skipped for learner in (eager, compiled)])
        results[f"evaluations-{step}"] = np.array(CountingPpo.num_evaluations - before)
        results[f"eager-{step}"] = eager.parameters(Version(1, 1)).vector
        results[f"compiled-{step}"] = compiled.parameters(Version(1, 1)).vector
        following = learner_of(gang, kind=CountingPpo, initial=compiled.parameters(Version(1, 1)))
        following.load_state_dict(*compiled.state_dict())
        eager = following
    return results


def main(out: Path, backend: str) -> None:
    torch.set_num_threads(1)
    gang: Gang = ProcessGroupGang(timeout_seconds=60)
    if backend != "inductor":
        torch.compile = partial(torch.compile, backend=backend)
    np.savez(out / f"rank-{gang.rank}.npz", **trained(gang))
    gang.close()
    os._exit(0)  # as a worker does: gloo's threads may abort an interpreter that ends slowly


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
