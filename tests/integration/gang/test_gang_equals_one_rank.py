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
REPLAYED = ("dqn", "r2d2", "sac", "td3")
KINDS = ("ppo", "recurrent", "two groups", *REPLAYED)
TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--max-restarts=0",
    f"--log-dir={os.devnull}",
    "--nproc-per-node=2",
]


def train(folder: Path, kind: str, *, ranks: int, poison: int | None = None) -> None:
    launcher = TORCHRUN if ranks > 1 else []
    arguments = [str(folder), kind, *([] if poison is None else [str(poison)])]
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


def arrays(folder: Path, size: int, rank: int) -> dict[str, np.ndarray]:
    return dict(np.load(folder / f"arrays-{size}-{rank}.npz"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "poison", [pytest.param(None, id="finite", marks=pytest.mark.slow), pytest.param(2, id="one rank meets a NaN")]
)
def test_two_ranks_train_as_one(tmp_path: Path, kind: str, poison: int | None) -> None:
    train(tmp_path, kind, ranks=1, poison=poison)
    train(tmp_path, kind, ranks=2, poison=poison)
    alone, first, second = arrays(tmp_path, 1, 0), arrays(tmp_path, 2, 0), arrays(tmp_path, 2, 1)
    for name, array in alone.items():
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        np.testing.assert_allclose(first[name], array, rtol=1e-4, atol=2e-6, err_msg=name)
    reports = [report(tmp_path, 2, rank) for rank in range(2)]
    assert reports[0]["skipped"] == reports[1]["skipped"] == report(tmp_path, 1, 0)["skipped"]
    of_both = [sum(pair) for pair in zip(*(each["untrained"] for each in reports), strict=True)]
    assert of_both == report(tmp_path, 1, 0)["untrained"]
    assert (sum(reports[0]["skipped"]) > 0) == (poison is not None)
    assert [each["said"] for each in reports] == [[[0, 0], [1, 10_000]]] * 2, "messages of any length arrive"
    for mine, whole in zip(reports[0]["metrics"], report(tmp_path, 1, 0)["metrics"], strict=True):
        assert mine == pytest.approx(whole, rel=1e-3, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_two_compiled_ranks_train_as_two_eager_ones(tmp_path: Path, backend: str, kind: str) -> None:
    """``aot_eager`` traces the same graphs without a C++ compiler's seconds."""
    environment = worker_environment(os.environ) | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, *TORCHRUN, str(COMPILED_SCRIPT), str(tmp_path), backend, kind]
    subprocess.run(command, env=environment, check=True, timeout=240, stdout=subprocess.DEVNULL)
    first, second = (np.load(tmp_path / f"rank-{rank}.npz") for rank in range(2))
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name])
    for step in range(5):
        names = [name for name in first.files if name.startswith(f"eager-{step}-")]
        assert names
        for name in names:
            compiled = first[name.replace("eager", "compiled")]
            np.testing.assert_allclose(compiled, first[name], rtol=1e-4, atol=2e-6, err_msg=name)
        # Only the eager learner's, but a recurrent network is evaluated eagerly by both. Rows of a store need none.
        expected = 2 if kind == "recurrent" else int(kind not in REPLAYED)
        assert first[f"evaluations-{step}"] == second[f"evaluations-{step}"] == expected
        by_eager, by_compiled = first[f"skipped-{step}"]
        assert by_eager == by_compiled
        assert (by_eager > 0) == (step == 2), "one rank meets a NaN"
