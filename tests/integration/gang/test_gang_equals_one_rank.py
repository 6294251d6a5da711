"""Two ranks on half a batch each train as one rank on the batch, under the real torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsrl.runtime.process import worker_environment

SCRIPT = Path(__file__).with_name("rank_script.py")
COMPILED_SCRIPT = Path(__file__).with_name("compiled_rank_script.py")
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--max-restarts=0",
    f"--log-dir={os.devnull}",
    "--nproc-per-node=2",
]


def train(folder: Path, *, ranks: int, poison: int | None = None) -> None:
    launcher = TORCHRUN if ranks > 1 else []
    arguments = [str(folder), *([] if poison is None else [str(poison)])]
    subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *arguments],
        env=worker_environment(os.environ),
        check=True,
        timeout=120,
        stdout=subprocess.DEVNULL,
    )


def report(folder: Path, size: int, rank: int) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / f"report-{size}-{rank}.json").read_text())
    return loaded


def vector(folder: Path, size: int, rank: int) -> np.ndarray:
    loaded: np.ndarray = np.load(folder / f"vector-{size}-{rank}.npy")
    return loaded


@pytest.mark.parametrize(
    "poison", [pytest.param(None, id="finite", marks=pytest.mark.slow), pytest.param(2, id="one rank meets a NaN")]
)
def test_two_ranks_train_as_one(tmp_path: Path, poison: int | None) -> None:
    train(tmp_path, ranks=1, poison=poison)
    train(tmp_path, ranks=2, poison=poison)
    alone, first, second = vector(tmp_path, 1, 0), vector(tmp_path, 2, 0), vector(tmp_path, 2, 1)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, alone, rtol=0, atol=2e-6)
    reports = [report(tmp_path, 2, rank) for rank in range(2)]
    assert reports[0]["skipped"] == reports[1]["skipped"] == report(tmp_path, 1, 0)["skipped"]
    of_both = [sum(pair) for pair in zip(*(each["untrained"] for each in reports), strict=True)]
    assert of_both == report(tmp_path, 1, 0)["untrained"]
    assert (sum(reports[0]["skipped"]) > 0) == (poison is not None)
    assert [each["said"] for each in reports] == [[[0, 0], [1, 10_000]]] * 2, "messages of any length arrive"
    for mine, whole in zip(reports[0]["metrics"], report(tmp_path, 1, 0)["metrics"], strict=True):
        assert mine == pytest.approx(whole, rel=1e-3, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_two_compiled_ranks_train_as_two_eager_ones(tmp_path: Path, backend: str) -> None:
    """``aot_eager`` traces the same graphs without a C++ compiler's seconds."""
    environment = worker_environment(os.environ) | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, *TORCHRUN, str(COMPILED_SCRIPT), str(tmp_path), backend]
    subprocess.run(command, env=environment, check=True, timeout=240, stdout=subprocess.DEVNULL)
    first, second = (np.load(tmp_path / f"rank-{rank}.npz") for rank in range(2))
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name])
    for step in range(5):
        np.testing.assert_allclose(first[f"compiled-{step}"], first[f"eager-{step}"], rtol=0, atol=2e-6)
        assert first[f"evaluations-{step}"] == second[f"evaluations-{step}"] == 1, "only the eager learner's"
        eager, compiled = first[f"skipped-{step}"]
        assert eager == compiled
        assert (eager > 0) == (step == 2), "one rank meets a NaN"
