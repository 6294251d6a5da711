"""A new role is one entry in the table of roles, its config and its worker: nothing else has to know of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlsrl.api.role_names import COORDINATOR
from rlsrl.rpc.auth import TOKEN_VARIABLE
from rlsrl.runtime.coordination import CoordinatorClient
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

PROGRAM = Path(__file__).parent / "toy_role.py"
ROLE = "counter"
TOKEN = "the-token"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the program that knows the role; it is killed in the end."""
    with ExitStack() as stack:

        def begin(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *arguments],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, TOKEN_VARIABLE: TOKEN},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield begin


def test_the_operator_makes_its_objects(start: Start) -> None:
    output, _ = start("manifests").communicate(timeout=DEADLINE_SECONDS)
    made = {(each["kind"], each["metadata"]["name"]): each for each in json.loads(output)}
    deployment = made["Deployment", f"a-{ROLE}"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert deployment["spec"]["replicas"] == 2
    assert container["command"][-4:] == ["--role", ROLE, "--config", f"/etc/rlsrl/config/{ROLE}.json"]
    assert any(kind == "ConfigMap" and f"{ROLE}.json" in each.get("data", {}) for (kind, _), each in made.items())
    assert made["NetworkPolicy", f"a-{ROLE}"]["spec"]["egress"]
    (settings,) = [
        json.loads(each["data"]["settings.json"]) for each in made.values() if "settings.json" in each.get("data", {})
    ]
    assert settings[COORDINATOR]["num_others"] == {ROLE: 2}


def test_its_workers_join_and_work(start: Start, tmp_path: Path) -> None:
    assert start("configs", str(tmp_path)).wait(DEADLINE_SECONDS) == 0
    start("work", "--role", COORDINATOR, "--config", str(tmp_path / f"{COORDINATOR}.json"))
    workers = [start("work", "--role", ROLE, "--config", str(tmp_path / f"{ROLE}.json")) for _ in range(2)]
    address = json.loads((tmp_path / f"{ROLE}.json").read_text())["coordinator_address"]
    client = CoordinatorClient(address, TOKEN)

    def counts() -> list[float]:
        found: list[dict[str, Any]] = client.status(DEADLINE_SECONDS)["roles"].get(ROLE, [])
        return [worker["stats"].get("count", 0.0) for worker in found]

    with ExitStack() as stack:
        stack.callback(client.close)
        until(lambda: len(counts()) == 2 and min(counts()) > 1, "both workers count")
        for worker in workers:
            worker.terminate()
            assert worker.wait(DEADLINE_SECONDS) == 0
