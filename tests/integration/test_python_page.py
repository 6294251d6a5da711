"""The blocks of ``docs/python.md`` run as they stand, one after the other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: cartpole}
spec:
  environment: {id: CartPole-v1}
  algorithm: {ppo: {minibatchSize: 128}}
  actors: {environments: 4, rolloutLength: 64}
  trainers: {compile: "off"}
  evaluators: {environments: 2, episodesPerEnvironment: 1}
  stop: {envSteps: 1000000}
"""


def test_the_blocks_run(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 8
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "cartpole envSteps" in lines
    for said in (
        r"now with score 0\.\d\d",
        r"version [12]\.\d+: return \d+\.0",
        r"the last logits: \(1, 2\)",
        r"recorded \d+ steps",
        r"started from runs/cartpole: envSteps",
        r"\d+ rows: step, wall, .*env_steps.*",
    ):
        assert any(re.fullmatch(said, line) for line in lines), said
