"""The blocks of every page for users run, one after the other; ``tests/e2e`` runs those that need a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from page_blocks import MOST_MARKS, PAGES, blocks_of
from page_session import PageSession

pytestmark = pytest.mark.timeout(900)

PRINTED = {
    "docs/python.md": (
        r"python envSteps",
        r"now with score 0\.\d\d",
        r"version [12]\.\d+: return \d+\.0",
        r"the last logits: \(1, 2\)",
        r"recorded \d+ steps",
        r"started from runs/python: envSteps",
        r"\d+ rows: step, wall, .*env_steps.*",
        r"[12]\.\d+: \d+\.0 env steps, evaluation \d+\.\d+, tags .*best",
        r"tagged [12]\.\d+",
        r"EXPERIMENT +RUNS +RETURN .*",
        r"my-cartpole, .*: 1 runs, [\d,]+ env steps",
        r"drew curves\.png",
    ),
    "docs/your-own-environment.md": (r"my-robot finished \(envSteps\): .*", r"version 1\.\d+: return -?\d\.\d\d"),
    "docs/kubernetes/from-one-machine.md": (r"version 1\.\d+: action [01], exported to cartpole\.onnx",),
}
"""Lines that the blocks of a page print, as regular expressions."""


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_the_blocks_run(page: str, tmp_path: Path) -> None:
    with PageSession(tmp_path / "reader") as session:
        for block in blocks_of(page):
            if not block.needs_cluster:
                session.run(block)
        session.finish()
        lines = session.output.splitlines()
    for expected in PRINTED.get(page, ()):
        assert any(re.fullmatch(expected, line) for line in lines), expected


def test_few_blocks_are_not_run() -> None:
    marks = [f"{block.place}: {block.not_run}" for page in PAGES for block in blocks_of(page) if block.not_run]
    assert len(marks) <= MOST_MARKS, "\n".join(marks)
