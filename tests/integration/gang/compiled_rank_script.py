"""One rank of a gang under torchrun: trains each batch eager and compiled from one state, and writes both results."""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rank_script import batches, everything, learner_of, part_of

from rlsrl.algorithms.base import Tensors
from rlsrl.algorithms.evaluation import evaluated_in_parts
from rlsrl.algorithms.learner import Learner
from rlsrl.buffers.replay.rows import IMPORTANCE
from rlsrl.data.version import Version
from rlsrl.workers.gang import Gang, ProcessGroupGang


class Counting:
    """Counts a learner's eager evaluations of the network."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner
        self.number = 0
        evaluate = learner._algorithm.evaluate

        def counted(params: Tensors, rows: Tensors) -> Tensors:
            if not torch.compiler.is_compiling():
                self.number += 1
            return evaluate(params, rows)

        learner._algorithm.evaluate = counted  # type: ignore[method-assign]
        learner._evaluate = evaluated_in_parts(counted)


def zeros_like(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    zeros = {name: np.zeros_like(array) for name, array in arrays.items()}
    for name in {"mask", IMPORTANCE} & zeros.keys():
        zeros[name][...] = 1
    return zeros


def trained(gang: Gang, kind: str) -> dict[str, np.ndarray]:
    eager, compiled = Counting(learner_of(gang, kind)), Counting(learner_of(gang, kind))
    results = {}
    for step, arrays in enumerate(batches(kind, poison=2)):
        mine = part_of(kind, arrays, gang.rank, gang.size)
        if step == 0:
            assert "torch._dynamo" not in sys.modules
            eager.learner.step(mine)  # as before a switch during a run
            eager = Counting(learner_of(gang, kind))
            compiled.learner.compile(zeros_like(mine))
            compiled.learner.use_compiled()
            torch.compiler.set_stance("fail_on_recompile")
        before = eager.number + compiled.number
        results[f"skipped-{step}"] = np.array([each.learner.step(mine).skipped for each in (eager, compiled)])
        results[f"evaluations-{step}"] = np.array(eager.number + compiled.number - before)
        for name, each in (("eager", eager), ("compiled", compiled)):
            results |= {f"{name}-{step}-{path}": array for path, array in everything(each.learner).items()}
        eager = Counting(learner_of(gang, kind, initial=compiled.learner.parameters(Version(1, 1))))
        eager.learner.load_state_dict(*compiled.learner.state_dict())
    return results


def main(out: Path, backend: str, kind: str) -> None:
    torch.set_num_threads(1)
    gang: Gang = ProcessGroupGang(timeout_seconds=60)
    if backend != "inductor":
        torch.compile = partial(torch.compile, backend=backend)
    np.savez(out / f"rank-{gang.rank}.npz", **trained(gang, kind))
    gang.close()
    os._exit(0)  # as a worker does: gloo's threads may abort an interpreter that ends slowly


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
