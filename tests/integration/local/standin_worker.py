"""Stands in for ``python -m rlsrl.workers`` in tests of the controller: plays the script that its config holds.

The config is ``{"folder": ..., "lives": [[step, ...], ...]}``: the n-th life of the role plays the n-th list of steps,
further lives the last one. Each life appends ``{"role", "pid", "attempt", "token"}`` to ``<folder>/<role>.lives``. Steps:
``{"print": text}``, ``{"exit": code}``, ``{"die": signal}`` (itself), ``{"touch": file}``, ``{"signal_parent": signal}``,
``{"until": signal}`` (wait for it), ``{"ignore": signal}``, ``{"write_fifo": file}``, ``{"read_fifo": file, "bytes": n}``,
``{"fork": file}`` (leaves a process in its group that ignores SIGTERM and writes its pid to the file).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from rlsrl.runtime.process import die_with_parent

BLOCKED = {signal.SIGTERM, signal.SIGUSR1}


def main() -> None:
    die_with_parent(int(os.environ["RLSRL_PARENT_PID"]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", required=True)
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--attempt", type=int)
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    folder = Path(config["folder"])
    life = register(folder / f"{arguments.role}.lives", arguments)
    lives = config["lives"]
    for step in lives[min(life, len(lives) - 1)]:
        play(folder, step)


def register(path: Path, arguments: argparse.Namespace) -> int:
    """Write down this life; returns how many there were before."""
    entry = {"pid": os.getpid(), "attempt": arguments.attempt, "token": os.environ.get("RLSRL_TOKEN")}
    with path.open("a+") as lives:
        lives.write(json.dumps({"role": arguments.role, **entry}) + "\n")
        lives.flush()
        lives.seek(0)
        return len(lives.readlines()) - 1


def play(folder: Path, step: dict) -> None:
    match step:
        case {"print": text}:
            print(text, flush=True)
        case {"exit": code}:
            sys.exit(code)
        case {"die": signum}:
            os.kill(os.getpid(), signal.Signals[signum])
        case {"touch": name}:
            (folder / name).touch()
        case {"signal_parent": signum}:
            os.kill(os.getppid(), signal.Signals[signum])
        case {"until": signum}:
            signal.sigwait({signal.Signals[signum]})
        case {"write_fifo": name}:
            (folder / name).write_bytes(b".")
        case {"read_fifo": name, "bytes": count}:
            fifo = os.open(folder / name, os.O_RDWR)  # Also a writer itself, so that it never ends.
            while count:
                count -= len(os.read(fifo, count))
        case {"fork": name}:
            code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            child.stdout.readline()
            (folder / name).write_text(str(child.pid))
        case _:
            raise ValueError(f"unknown step {step}")


if __name__ == "__main__":
    main()
