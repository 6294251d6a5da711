"""The token and the user's keys are only in the environment of the processes that need them."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlsrl.rpc.auth import TOKEN_VARIABLE
from rlsrl.testing.live_runs import Desk, LiveRun, fetch

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {{factory: "rlsrl.testing.environments:GatedEnv", kwargs: {{gate: "{gate}"}}}}
  policy: {{network: {{mlp: {{hiddenSizes: [16]}}}}}}
  algorithm: {{ppo: {{epochs: 1, minibatchSize: 256}}}}
  actors: {{replicas: 2, environments: 8, rolloutLength: 64}}
  policyWorkers: {{replicas: 1}}
  bufferWorkers: {{replicas: 1}}
  trainers: {{replicas: 2}}
  evaluators: {{replicas: 1, environments: 1, episodesPerEnvironment: 1}}
  parameters: {{everySteps: 10}}
  transport: grpc
  stop: {{returnMean: 7.5, episodes: 50}}
  restarts: {{budget: 10, decaySeconds: 1}}
"""
USERS_KEYS = {"WANDB_API_KEY": "key-of-weights-and-biases", "AWS_SECRET_ACCESS_KEY": "key-of-the-bucket"}
MIN_FILES = 15
"""A run writes at least this much; less means that the wrong folder is searched."""


def spellings(secret: str) -> list[bytes]:
    """Return the secret in all encodings of logs and pages."""
    return [secret.encode(), base64.b64encode(secret.encode()).rstrip(b"="), secret.encode().hex().encode()]


def found_in(content: bytes, secrets: list[str]) -> list[str]:
    return [secret for secret in secrets if any(each in content for each in spellings(secret))]


def everything_written(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path, path.read_bytes()


def processes_of(run: LiveRun) -> list[psutil.Process]:
    controller = psutil.Process(run.pid)
    return [controller, *controller.children(recursive=True)]


@pytest.mark.slow
def test_no_secret_is_in_files_pages_or_command_lines_of_a_run(tmp_path: Path) -> None:
    desk = Desk(tmp_path, EXPERIMENT.format(gate=tmp_path / "gate"))
    with desk.begin(environment=USERS_KEYS) as run:
        run.until(run.is_complete, "all workers at work")
        token = desk.facts()._token()
        assert len(token) > 30
        secrets = [token, *USERS_KEYS.values()]
        # Failures tell more than success: a killed worker's successor, a stranger, a consumer that went away.
        (buffer,) = run.workers("buffer")
        os.kill(buffer.pid, signal.SIGKILL)
        run.until(lambda: buffer not in run.workers() and run.is_complete(), "the buffer worker's successor")

        status = desk.facts().status()
        assert status is not None
        pages = {"status": repr(status)}
        for workers in status["roles"].values():
            for worker in workers:
                url = f"http://{worker['endpoints']['metrics']}/metrics"
                pages[url] = fetch(url)
        assert len(pages) > 7
        for name, page in pages.items():
            assert found_in(page.encode(), secrets) == [], name

        processes = processes_of(run)
        assert len(processes) > 8
        for process in processes:
            assert found_in("\0".join(process.cmdline()).encode(), secrets) == [], process
            holders = {name for name, value in process.environ().items() if found_in(value.encode(), secrets)}
            allowed = {*USERS_KEYS} if process.pid == run.pid else {*USERS_KEYS, TOKEN_VARIABLE}
            assert holders <= allowed, process

        (tmp_path / "gate").touch()
        assert run.wait() == 0, run.output
    written = dict(everything_written(tmp_path))
    assert len(written) > MIN_FILES
    for path, content in written.items():
        assert found_in(content, secrets) == [], path


@pytest.mark.parametrize("turned", spellings("a-secret-token"))
def test_the_search_finds_encoded_secrets(turned: bytes) -> None:
    assert found_in(b"before " + turned + b" after", ["a-secret-token"]) == ["a-secret-token"]
