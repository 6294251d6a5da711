"""The page's server over real HTTP: its answers, and what it refuses."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

from rlsrl.local.run_folder import METRICS, RECORD
from rlsrl.testing.waiting import until
from rlsrl.ui.server import make_app


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Serve a folder with one run."""
    (tmp_path / "run 1").mkdir()
    (tmp_path / "run 1" / RECORD).write_text("{}")
    scalars = {"env_steps": 10, "return_mean": 3}
    row = {"step": 1, "wall": 0, "role": "trainer", "scalars": scalars}
    (tmp_path / "run 1" / METRICS).write_text(json.dumps(row) + "\n")
    (tmp_path / "secret").write_text("no")
    server = uvicorn.Server(uvicorn.Config(make_app(tmp_path), host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, "the server serves")
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def call(address: str, path: str, *, method: str = "GET", host: str | None = None) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    is_json = (answer.getheader("content-type") or "").startswith("application/json")
    return (
        answer.status,
        json.loads(data) if is_json else data,
        {name.lower(): value for name, value in answer.getheaders()},
    )


def test_the_page_and_its_parts_come_from_the_package(address: str) -> None:
    status, page, headers = call(address, "/")
    assert status == 200
    assert b'src="/static/app.js"' in page
    assert b"http" not in page.replace(b"http-equiv", b""), "nothing comes from elsewhere"
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert headers["x-content-type-options"] == "nosniff"
    for part in ("app.js", "curve.js", "picture.js", "elements.js", "style.css", "icon.svg"):
        assert call(address, f"/static/{part}")[0] == 200


def test_runs_are_answered_as_json(address: str) -> None:
    (listed,) = call(address, "/api/runs")[1]
    assert listed["name"] == "run 1"
    assert call(address, "/api/runs/run%201")[1]["name"] == "run 1"
    assert call(address, "/api/runs/run%201/curve?after=0")[1]["rows"][0]["scalars"]["return_mean"] == 3


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/absent", 404),
        ("/api/runs/..", 404),
        ("/api/runs/%2e%2e", 404),
        ("/api/runs/..%2f..", 404),
        ("/api/runs/run%201/logs/..%2fcontroller.json", 404),
        ("/static/../views.py", 404),
        ("/static/%2e%2e/views.py", 404),
        ("/secret", 404),
        ("/api/runs/run%201/curve?after=x", 400),
    ],
)
def test_what_is_not_there_is_refused(address: str, path: str, status: int) -> None:
    assert call(address, path)[0] == status


def test_only_reading_by_a_name_of_this_machine_is_answered(address: str) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert call(address, "/api/runs", method=method)[0] == 405
    assert call(address, "/api/runs", host="evil.example")[0] == 400, "a name that leads here from elsewhere"
    assert call(address, "/api/runs", host=f"localhost:{urlsplit('//' + address).port}")[0] == 200


def test_what_json_lacks_in_damaged_files_is_left_out(address: str, tmp_path: Path) -> None:
    (tmp_path / "run 1" / "status.json").write_text('{"totals": {"policy_lag": NaN, "version": "\\udcff"}}')
    status, page, _ = call(address, "/api/runs/run%201")
    assert status == 200
    assert page["totals"] == {"policy_lag": None, "version": "\udcff"}
