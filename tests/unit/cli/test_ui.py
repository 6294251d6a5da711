"""The options of ``rlsrl ui``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlsrl.cli import main
from rlsrl.ui import server


def test_names_are_those_that_requests_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda runs, **options: served.append(options["names"]))
    names = ["Lab.example", "lab.example", "192.0.2.7", "[2001:DB8::1]", "gpu_box-2"]
    result = CliRunner().invoke(main, ["ui", str(tmp_path), *(part for name in names for part in ("--name", name))])
    assert result.exit_code == 0, result.output
    assert served == [("lab.example", "192.0.2.7", "2001:db8::1", "gpu_box-2")]


@pytest.mark.parametrize("name", ["http://lab", "lab:8266", "lab/runs", "*", "*.example", "", "a b", "me@lab"])
def test_what_is_no_host_name_is_refused(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(main, ["ui", str(tmp_path), "--name", name])
    assert result.exit_code == 2
    assert "is not a host name: give the name alone" in " ".join(result.output.split())
