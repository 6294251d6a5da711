"""Stands in for ``python -m rlsrl.workers`` in tests of the controller: plays the script of its role.

The script is ``<folder>/<role>.script``, JSON ``[[step, ...], ...]``; STANDIN_FOLDER in the environment is the folder.
The n-th life of the role plays the n-th list of steps, further lives the last one. Each life appends
``{"role", "pid", "attempt", "config", "token", "tls", "path"}`` to ``<folder>/<role>.lives``. Steps:

- ``{"print": text}``, ``{"exit": code}``, ``{"die": signal}`` (itself), ``{"touch": file}``
- ``{"append": file}``: adds a byte to the file
- ``{"signal_parent": signal}``, ``{"until": signal}`` (waits for it), ``{"insist": signal}`` (signals the parent until
  this process is killed)
- ``{"write_fifo": file}``, ``{"read_fifo": file, "bytes": n}`` (each waits for the other)
- ``{"remove": folder}``, ``{"move": folder}`` (to another name)
- ``{"fork": file}``: leaves a process in its group that ignores SIGTERM, its pid in the file
- ``{"push": metadata, "terminal": reason}``: stores a version of this attempt, as a trainer does at its end
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
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
    folder = Path(os.environ["STANDIN_FOLDER"])
    life = register(folder / f"{arguments.role}.lives", arguments)
    lives = json.loads((folder / f"{arguments.role}.script").read_text())
    for step in lives[min(life, len(lives) - 1)]:
        play(folder, arguments, step)


def register(path: Path, arguments: argparse.Namespace) -> int:
    """Record this life; return the number of earlier lives."""
    entry = {
        "role": arguments.role,
        "pid": os.getpid(),
        "attempt": arguments.attempt,
        "config": str(arguments.config),
        "token": os.environ.get("RLSRL_TOKEN"),
        "tls": os.environ.get("RLSRL_TLS_FOLDER"),
        "path": sys.path,
    }
    with path.open("a+") as lives:
        lives.write(json.dumps(entry) + "\n")
        lives.flush()
        lives.seek(0)
        return len(lives.readlines()) - 1


def play(folder: Path, arguments: argparse.Namespace, step: dict) -> None:
    match step:
        case {"print": text}:
            sys.stderr.write(f"{text}\n")
        case {"exit": code}:
            sys.exit(code)
        case {"die": signum}:
            os.kill(os.getpid(), signal.Signals[signum])
        case {"touch": name}:
            (folder / name).touch()
        case {"append": name}:
            with (folder / name).open("ab") as file:
                file.write(b".")
        case {"signal_parent": signum}:
            os.kill(os.getppid(), signal.Signals[signum])
        case {"insist": signum}:
            while True:
                os.kill(os.getppid(), signal.Signals[signum])
                time.sleep(0.1)
        case {"until": signum}:
            signal.sigwait({signal.Signals[signum]})
        case {"write_fifo": name}:
            (folder / name).write_bytes(b".")
        case {"read_fifo": name, "bytes": count}:
            fifo = os.open(folder / name, os.O_RDWR)  # Also a writer itself, so that it never ends.
            while count:
                count -= len(os.read(fifo, count))
        case {"remove": name}:
            shutil.rmtree(folder / name)
        case {"move": name}:
            (folder / name).rename(folder / "elsewhere")
        case {"fork": name}:
            code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
            child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            child.stdout.readline()
            (folder / name).write_text(str(child.pid))
        case {"push": metadata, "terminal": reason}:
            push(arguments, metadata, reason)
        case _:
            raise ValueError(f"unknown step {step}")


def push(arguments: argparse.Namespace, metadata: dict, reason: str | None) -> None:
    import numpy as np

    from rlsrl.data.version import Version
    from rlsrl.parameters.filesystem import FilesystemParameterDB
    from rlsrl.parameters.protocols import Parameters, TrainerState

    config = json.loads(arguments.config.read_text())
    db = FilesystemParameterDB(Path(config["parameter_store"]["folder"]))
    version = Version(arguments.attempt, metadata["train_steps"])
    parameters = Parameters(version=version, vector=np.zeros(4, np.float32), layout="standin")
    state = TrainerState(version=version, arrays={"moments": np.zeros(1, np.float32)}, values={})
    db.push(config["policy_name"], parameters, metadata=metadata, state=state)
    if reason is not None:
        record = {"reason": reason, "version": str(version), "result": metadata}
        db.annotate(config["policy_name"], version, {"terminal": record})


if __name__ == "__main__":
    main()
