"""``rlsrl ui`` as a process that listens at all addresses of the machine."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsrl.testing.live_runs import rlsrl_command


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Serve an empty folder under the further names ``lab`` and ``proxy.example``."""
    command = [rlsrl_command(), "ui", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]
    names = ["--name", "Lab", "--name", "proxy.example"]
    process = subprocess.Popen([*command, *names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r": http://lab:(\d+)/ ", line)
        assert found, line
        yield int(found[1])
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_it_answers_under_its_names_and_addresses_alone(port: int) -> None:
    expected = {"lab": 200, "proxy.example": 200, "localhost": 200, "127.0.0.1": 200, "127.0.0.2": 400, "evil": 400}
    found = {}
    for name in expected:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/api/runs", headers={"Host": f"{name}:{port}"})
        found[name] = connection.getresponse().status
        connection.close()
    assert found == expected
    other = http.client.HTTPConnection("127.0.0.2", port, timeout=30)  # another address of this machine
    other.request("GET", "/api/runs")
    assert other.getresponse().status == 200
    other.close()
