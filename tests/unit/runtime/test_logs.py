import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlsrl.runtime.logs import REDACTED, redact


def lines_of(code: str, path: Path | None = None) -> list[dict[str, Any]]:
    """Return the log lines of a new process, because the logging configuration is process-wide."""
    preamble = (
        "import logging, sys, threading, structlog\n"
        "from pathlib import Path\n"
        "from rlsrl.runtime.logs import configure_logging\n"
        "def configure():\n"
        "    path = Path(sys.argv[1]) if len(sys.argv) > 1 else None\n"
        "    configure_logging(experiment='cartpole', role='actor', index=2, path=path)\n"
    )
    arguments = [] if path is None else [str(path)]
    done = subprocess.run(
        [sys.executable, "-c", preamble + code, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "TZ": "Asia/Tokyo"},
    )
    assert done.stderr == ""
    text = done.stdout if path is None else path.read_text()
    assert path is None or done.stdout == ""
    return [json.loads(line) for line in text.splitlines()]


def test_events_are_json_lines_bound_to_their_writer() -> None:
    (line,) = lines_of("configure(); structlog.get_logger('rlsrl.actor').info('slot_posted', sequence=7, lanes=[1, 2])")
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "slot_posted",
        "level": "info",
        "logger": "rlsrl.actor",
        "experiment": "cartpole",
        "role": "actor",
        "index": 2,
        "sequence": 7,
        "lanes": [1, 2],
    }


def test_a_file_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "actor-2.jsonl"
    for number in (1, 2):
        lines = lines_of(f"configure(); structlog.get_logger().info('life', number={number})", path)
    assert [line["number"] for line in lines] == [1, 2]


def test_standard_logging_has_the_same_format() -> None:
    (line,) = lines_of("configure(); logging.getLogger('grpc').warning('lost %s', 'peer', extra={'attempt': 3})")
    assert (line["event"], line["level"], line["logger"]) == ("lost peer", "warning", "grpc")
    assert (line["role"], line["index"], line["attempt"]) == ("actor", 2, 3)


def test_other_threads_are_bound_too() -> None:
    code = "configure()\nt = threading.Thread(target=lambda: structlog.get_logger().info('here')); t.start(); t.join()"
    (line,) = lines_of(code)
    assert (line["event"], line["experiment"], line["role"]) == ("here", "cartpole", "actor")


def test_loggers_made_before_the_configuration_obey_it() -> None:
    (line,) = lines_of("log = structlog.get_logger('early'); configure(); log.info('late')")
    assert (line["event"], line["logger"]) == ("late", "early")


def test_exceptions_are_in_the_line() -> None:
    code = """
configure()
def fail(): raise ValueError("bad sample") from KeyError("reward")
try: fail()
except ValueError: structlog.get_logger().exception("poll_failed")
try: fail()
except ValueError: logging.getLogger("std").exception("std_failed")
"""
    for line, event in zip(lines_of(code), ("poll_failed", "std_failed"), strict=True):
        assert (line["event"], line["level"]) == (event, "error")
        assert "KeyError: 'reward'" in line["exception"]
        assert line["exception"].endswith("ValueError: bad sample")


def test_a_second_configuration_does_not_duplicate_lines() -> None:
    assert len(lines_of("configure(); configure(); structlog.get_logger().info('once'); logging.info('twice')")) == 2


def test_no_token_is_rendered() -> None:
    code = """
configure()
log = structlog.get_logger()
log.info("joined", token="s3cr3t", headers={"Authorization": "Bearer s3cr3t", "deep": [{"rlsrl-token": "s3cr3t"}]})
log.bind(RLSRL_TOKEN="s3cr3t").warning("bound")
logging.warning("std", extra={"api_token": "s3cr3t"})
"""
    lines = lines_of(code)
    assert "s3cr3t" not in json.dumps(lines)
    assert lines[0]["token"] == REDACTED
    assert lines[0]["headers"] == {"Authorization": REDACTED, "deep": [{"rlsrl-token": REDACTED}]}


@pytest.mark.parametrize("value", [("a", {"token": "x"}), [{"TOKEN": "x"}]])
def test_redaction_reaches_into_sequences(value: Any) -> None:
    assert "x" not in json.dumps(redact(None, "info", {"event": "e", "value": value})["value"])
