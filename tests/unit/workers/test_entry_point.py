"""The entry point of worker processes: the index that a worker asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.testing.contexts import TOKEN
from rlsrl.workers import __main__ as workers

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: a}
spec:
  environment: {id: CartPole-v1}
  actors: {environments: 8}
  bufferWorkers: {}
  stop: {envSteps: 1000}
"""


@pytest.mark.parametrize(
    ("role", "arguments", "rank", "index"),
    [
        pytest.param("buffer", (), "3", None, id="the lowest free"),
        pytest.param("buffer", ("--index", "2"), None, 2, id="its pod's"),
        pytest.param("trainer", (), None, 0, id="the only rank"),
        pytest.param("trainer", (), "3", 3, id="torchrun's rank"),
    ],
)
def test_the_index_that_a_worker_asks_for(
    role: str, arguments: tuple[str, ...], rank: str | None, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["workers", "--role", role, "--config", "unread", *arguments])
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    config = resolve(load_text(EXPERIMENT), local_placement("uid", Path("/run"))).configs[role]
    request = workers._Process(workers._arguments(), config, None, None)._join_request({}, TOKEN, None)
    assert (request.role, request.index) == (role, index)
