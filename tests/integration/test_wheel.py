"""The wheel, installed into a clean environment with what training needs: it trains, acts and names what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: small}
spec:
  environment: {id: CartPole-v1}
  algorithm: {ppo: {minibatchSize: 64}}
  actors: {environments: 2, rolloutLength: 32}
  trainers: {compile: "off"}
  stop: {trainSteps: 3}
"""


def call(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that finds neither the clone nor its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_wheel_trains_in_a_clean_environment(tmp_path: Path) -> None:
    built = call(tmp_path, sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", "wheels", str(ROOT))
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "wheels").glob("rlsrl-*.whl")
    assert call(tmp_path, sys.executable, "-m", "venv", "clean").returncode == 0
    python, rlsrl = (str(tmp_path / "clean" / "bin" / name) for name in ("python", "rlsrl"))
    constraints = str(ROOT / "constraints.txt")
    named = f"{wheel}[rpc,env,torch,local]"
    installed = call(tmp_path, python, "-m", "pip", "install", "--quiet", "--constraint", constraints, named)
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "small.yaml").write_text(EXPERIMENT)
    found = call(tmp_path, python, "-c", "import rlsrl; print(rlsrl.__file__)")
    assert found.stdout.startswith(str(tmp_path / "clean")), "not that of the clone"

    for command in (("validate", "small.yaml"), ("run", "small.yaml"), ("plot", "small"), ("params", "list", "small")):
        done = call(tmp_path, rlsrl, *command)
        assert done.returncode == 0, done.stdout + done.stderr
    acts = "import rlsrl; policy = rlsrl.load('small'); print(policy.act([0.0, 0.0, 0.1, 0.0]))"
    acted = call(tmp_path, python, "-c", acts)
    assert acted.stdout.strip() in ("0", "1"), acted.stderr

    for command, extra in (
        (("video", "small"), "video"),
        (("export", "small", "--format", "onnx"), "onnx"),
        (("run", "small.yaml", "--fresh", "--set", "environment.id=HalfCheetah-v5"), "mujoco"),
        (("run", "small.yaml", "--fresh", "--set", "environment.id=BipedalWalker-v3"), "box2d"),
        (("run", "small.yaml", "--fresh", "--set", "environment.id=ALE/Pong-v5"), "atari"),
    ):
        done = call(tmp_path, rlsrl, *command)
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"pip install 'rlsrl[{extra}]'" in done.stderr
