"""Record statuses of a real run of twelve workers for the tests of the page: ``python hack/recorded_statuses.py``.

It writes tests/integration/recorded_statuses.json: one status each of workers that start, that train, of which one is
silent, and of which one is gone. Addresses and the name of the machine are left out.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlsrl.local.run_folder import STATUS
from rlsrl.testing.live_runs import Desk, LiveRun

RECORDED = Path(__file__).parents[1] / "tests" / "integration" / "recorded_statuses.json"
EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [16]}}}
  algorithm: {ppo: {minibatchSize: 224}}
  actors: {replicas: 7, environments: 14, rolloutLength: 64}
  policyWorkers: {replicas: 1}
  bufferWorkers: {replicas: 1}
  trainers: {replicas: 2}
  evaluators: {replicas: 1, environments: 2, episodesPerEnvironment: 1, everySeconds: 2}
  stop: {wallSeconds: 600}
"""
NUM_WORKERS = 12
PLACES = {"host": "machine", "endpoints": {}, "run_uid": "recorded"}
"""Members of a status that tell about this machine, with what takes their place."""


def main() -> None:
    """Record, and write the file."""
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder), EXPERIMENT)
        with desk.begin() as run:
            statuses = [
                _awaited(run, lambda status: bool(_workers(status)), "the first workers"),
                _awaited(run, _trains, "training with all workers"),
            ]
            (stopped, *_) = run.workers("actor")
            os.kill(stopped.pid, signal.SIGSTOP)
            statuses += [
                _awaited(run, lambda status: any(each["stale"] for each in _workers(status)), "a silent worker"),
                _awaited(run, lambda status: bool(status["gone"]), "a worker that is gone"),
            ]
    lines = ",\n".join(json.dumps(_without_places(each), separators=(",", ":")) for each in statuses)
    RECORDED.write_text(f'{{"made by": "hack/recorded_statuses.py", "statuses": [\n{lines}\n]}}\n')


def _awaited(run: LiveRun, is_met: Callable[[Mapping[str, Any]], bool], what: str) -> dict[str, Any]:
    """Return the first status that meets the condition."""

    def found() -> dict[str, Any] | None:
        try:
            status: dict[str, Any] = run.facts.json(STATUS)
        except FileNotFoundError:
            return None
        return status if is_met(status) else None

    return run.until(found, what)


def _trains(status: Mapping[str, Any]) -> bool:
    workers = _workers(status)
    is_complete = len(workers) == NUM_WORKERS and all(each["state"] == "running" for each in workers)
    have_rates = all("samples_per_second" in each["stats"] for each in status["roles"].get("actor", ()))
    return is_complete and have_rates and bool(status["totals"]["env_steps_per_second"])


def _workers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [each for workers in status["roles"].values() for each in workers]


def _without_places(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: PLACES.get(name, _without_places(member)) for name, member in value.items()}
    return [_without_places(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
