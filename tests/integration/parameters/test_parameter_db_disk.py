"""A filesystem parameter database and its disk: the order of its system calls, and their failures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

SCRIPT = Path(__file__).with_name("parameter_db_disk.py")


def write(*arguments: str | Path, under: Sequence[str | Path]) -> str:
    """Run the script under that command; return its output. The script raises if a file is not whole."""
    command = [*map(str, under), sys.executable, str(SCRIPT), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_full_file_system_keeps_its_versions_and_accepts_more_once_there_is_space(tmp_path: Path) -> None:
    """A tmpfs of 256 KiB, in a mount namespace of the script's own."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    refusal = write("small", tmp_path, under=namespace)
    assert refusal.startswith("refused: No space left on device after ")


# -- system calls and their failures, by strace ------------------------------------------------------------------------


@pytest.fixture
def strace() -> str:
    """Return strace's path. `make test` installs strace; without it these tests fail."""
    found = shutil.which("strace")
    if found is None:
        pytest.fail("there is no strace: `make system-tools` installs it", pytrace=False)
    return found


def test_disk_errors_are_raised_and_damage_nothing(tmp_path: Path, strace: str) -> None:
    """Each kind of system call fails at its own rate, so that each call of the steps fails at some time."""
    paces = {"fsync": "EIO:when=2+7", "write": "ENOSPC:when=3+5", "rename": "EIO:when=2+5", "unlink": "EIO:when=2+3"}
    inject = [f"--inject={call}:error={pace}" for call, pace in paces.items()]
    trace = tmp_path / "trace"
    under = [strace, "--follow-forks", "--seccomp-bpf", f"--trace={','.join(paces)}", *inject, "--output", trace]
    refusals = json.loads(write("errors", tmp_path / "store", "14", under=under))
    injected = [line for line in trace.read_text().splitlines() if "INJECTED" in line]
    counts = {call: sum(f" {call}(" in line for line in injected) for call in paces}
    assert min(counts.values()) >= 5, counts
    assert refusals.keys() == {"Input/output error", "No space left on device"}
    assert sum(refusals.values()) <= len(injected), "one failure is raised once"


@dataclass(frozen=True)
class Event:
    """A system call that changed something."""

    call: Literal["write", "fsync", "rename", "unlink", "mkdir", "done"]
    path: Path
    to: Path = Path()
    """Where a rename goes."""


_CALL = re.compile(r"^\d+ +(?P<call>\w+)\((?P<arguments>.*)\) += \d+")


def read_trace(text: str, folder: Path) -> list[Event]:
    """Return the changes in the folder and the ends of the steps."""
    events = []
    for line in text.splitlines():
        match = _CALL.match(line)
        if match is None:
            continue
        call, arguments = match["call"], match["arguments"]
        paths = [Path(path) for path in re.findall(r'[<"](/[^">]*)[">]', arguments)]
        if call == "write" and '"done"' in arguments:
            events.append(Event("done", folder))
        elif paths and paths[0].is_relative_to(folder):
            events.append(Event(call, *paths[: 2 if call == "rename" else 1]))
    return events


def violations(events: Sequence[Event]) -> list[str]:
    """Return where a power loss could leave a partial file, restore a removed one or lose acknowledged data."""
    found: list[str] = []
    unflushed: set[Path] = set()
    """Files that were written to since they were flushed."""
    unsettled: set[Path] = set()
    """Folders whose names changed since they were flushed."""
    for number, event in enumerate(events):
        match event.call:
            case "write":
                if not event.path.name.startswith("."):
                    found.append(f"{number}: {event.path} is written in place")
                unflushed.add(event.path)
            case "fsync":
                unflushed.discard(event.path)
                unsettled.discard(event.path)
            case "rename":
                if event.path in unflushed:
                    found.append(f"{number}: {event.path} has its name before it is on the disk")
                if unsettled:
                    found.append(f"{number}: {event.to} appears before the change in {unsettled} is on the disk")
                if event.path.parent != event.to.parent:
                    found.append(f"{number}: {event.path} moves between folders")
                unsettled.add(event.to.parent)
            case "unlink" | "mkdir":
                if unsettled - {event.path.parent}:
                    found.append(f"{number}: {event} before the change in {unsettled} is on the disk")
                unsettled.add(event.path.parent)
            case "done":
                if unsettled or unflushed:
                    found.append(f"{number}: acknowledged before {unsettled | unflushed} is on the disk")
    return found


def test_a_file_is_written_flushed_renamed_and_its_folder_flushed_in_that_order(tmp_path: Path, strace: str) -> None:
    """Each flush is necessary: the check reports the order without it."""
    trace, root = tmp_path / "trace", tmp_path / "store"
    calls = "write,fsync,rename,unlink,mkdir"
    under = [strace, "--follow-forks", "--seccomp-bpf", "--decode-fds=path", f"--trace={calls}", "--output", trace]
    write("steps", root, under=under)
    events = read_trace(trace.read_text(), tmp_path)
    assert [event.call for event in events].count("done") == 7
    renamed = [event.to.name for event in events if event.call == "rename"]
    assert len(renamed) == 12, renamed
    assert [event.path.name for event in events if event.call == "unlink"] == ["000001-000000000001.safetensors"]
    assert violations(events) == []
    flushes = [n for n in range(1, len(events)) if events[n].call == "fsync"]
    needed = [n for n in flushes if events[n - 1].call in ("write", "rename", "unlink")]
    assert len(needed) >= 2 * len(renamed)
    for flush in needed:
        assert violations([*events[:flush], *events[flush + 1 :]]) != []
    of_new_folders = {n for n in flushes if events[n - 1].call == "mkdir"}
    assert violations([event for n, event in enumerate(events) if n not in of_new_folders]) != []
