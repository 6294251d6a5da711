"""The peers' virtual environments: one for each peer, from its pins in ``requirements/``, made at first use.

They are kept under ``$XDG_CACHE_HOME/rlsrl/benchmarks``, by the peer's name and a hash of its pins and the Python
version. Changed pins make a new environment.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
COMPLETE = "complete"
"""Marker file of a complete installation; written last."""
QUOTED_LINES = 3
"""Last lines of pip's output that an error repeats."""


class PeerUnavailable(Exception):
    """A peer cannot be installed on this machine; the text has pip's error."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the environments."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlsrl" / "benchmarks"


def requirements_of(peer: str) -> Path:
    """Return the file with the peer's pins."""
    return REQUIREMENTS / f"{peer}.txt"


def home_of(peer: str) -> Path:
    """Return the folder of the peer's environment."""
    marked = f"{sys.version}\n{requirements_of(peer).read_text()}"
    return cache_folder() / f"{peer}-{hashlib.sha256(marked.encode()).hexdigest()[:16]}"


def python_of(peer: str) -> Path:
    """Return the Python of the peer's environment. Makes the environment if missing: minutes, and 5 GB with PyTorch.

    Raises:
        PeerUnavailable: pip cannot install the pins with this Python.
    """
    home = home_of(peer)
    python = home / "bin" / "python"
    if not (home / COMPLETE).exists():
        size = " (PyTorch: a download of 3 GB)" if "torch==" in requirements_of(peer).read_text() else ""
        print(f"{peer}: making its environment in {home}, once{size}", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "--requirement", str(requirements_of(peer))], capture_output=True, text=True, check=False
        )
        if done.returncode:
            output = " / ".join(done.stderr.strip().splitlines()[-QUOTED_LINES:])
            raise PeerUnavailable(f"{peer} cannot be installed with Python {sys.version.split()[0]}: {output}")
        (home / COMPLETE).touch()
    return python


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(python_of(name))
