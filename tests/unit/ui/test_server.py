"""The page's server over real HTTP: its answers, and what it refuses."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from rlsrl.local.run_folder import METRICS
from rlsrl.local.run_names import RECORD
from rlsrl.testing.waiting import until
from rlsrl.ui import folder as ui_folder
from rlsrl.ui.folder import FolderRuns
from rlsrl.ui.server import HEADERS, LOCAL_HOSTS, GuardedApp, make_app


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Serve a folder with one run."""
    (tmp_path / "run 1").mkdir()
    (tmp_path / "run 1" / RECORD).write_text("{}")
    scalars = {"env_steps": 10, "return_mean": 3}
    row = {"step": 1, "wall": 0, "role": "trainer", "scalars": scalars}
    (tmp_path / "run 1" / METRICS).write_text(json.dumps(row) + "\n")
    (tmp_path / "secret").write_text("no")
    app = make_app(FolderRuns(tmp_path), hosts=(*LOCAL_HOSTS, "lab"))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
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
        ("/static/../folder.py", 404),
        ("/static/%2e%2e/folder.py", 404),
        ("/secret", 404),
        ("/api/runs/run%201/curve?after=x", 400),
    ],
)
def test_what_is_not_there_is_refused(address: str, path: str, status: int) -> None:
    assert call(address, path)[0] == status


def test_only_reading_is_answered(address: str) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert call(address, "/api/runs", method=method)[0] == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:PORT", 200),
        ("127.0.0.1", 200),
        ("[::1]:PORT", 200),
        ("lab:PORT", 200),
        ("LAB", 200),
        ("evil.example", 400),
        ("lab.evil.example:PORT", 400),
        ("127.0.0.1.evil.example", 400),
        ("[::1", 400),
        ("", 400),
    ],
)
def test_only_names_under_which_the_page_is_served_are_answered(address: str, host: str, status: int) -> None:
    host = host.replace("PORT", str(urlsplit("//" + address).port))
    found, text, _ = call(address, "/api/runs", host=host)
    assert found == status
    assert status == 200 or b"rlsrl ui --name HOST" in text


def test_the_address_of_the_connection_needs_no_name() -> None:
    """With ``--host 0.0.0.0``, browsers call the machine by one of its addresses: no other site leads there by one."""

    def status_of(host: str) -> int:
        headers = [(b"host", host.encode())]
        scope = {"type": "http", "method": "GET", "path": "/", "server": ("192.0.2.7", 8266), "headers": headers}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        asyncio.run(GuardedApp(PlainTextResponse("the page"), hosts=LOCAL_HOSTS)(scope, receive, send))
        return int(sent[0]["status"])

    assert status_of("192.0.2.7:8266") == 200
    assert status_of("192.0.2.8:8266") == 400


def test_every_answer_has_the_security_headers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ui_folder, "run_list", fail)
    answers = [
        call(address, "/"),
        call(address, "/", host="evil.example"),
        call(address, "/absent"),
        call(address, "/", method="POST"),
        call(address, "/api/runs"),
    ]
    assert [status for status, _, _ in answers] == [200, 400, 404, 405, 500]
    for status, _, headers in answers:
        missing = {name for name, value in HEADERS.items() if headers.get(name.lower()) != value}
        assert missing == set(), f"{status} lacks them"
    assert b"a bug" not in answers[-1][1]


def test_versions_come_from_an_address_of_their_own(address: str) -> None:
    assert call(address, "/api/runs/run%201/versions")[1] == {"versions": [], "problem": None}
    assert call(address, "/api/runs/absent/versions")[0] == 404


def test_what_json_lacks_in_damaged_files_is_left_out(address: str, tmp_path: Path) -> None:
    (tmp_path / "run 1" / "status.json").write_text('{"totals": {"policy_lag": NaN, "version": "\\udcff"}}')
    status, page, _ = call(address, "/api/runs/run%201")
    assert status == 200
    assert page["totals"] == {"policy_lag": None, "version": "\udcff"}
