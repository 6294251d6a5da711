"""The virtual environments of the peers: one each, from its pins in ``requirements/``, made when first asked for.

They are kept under ``$XDG_CACHE_HOME/rlsrl/benchmarks`` by the peer's name and a mark of its pins and the Python: other
pins make another one, and nobody measures with what was installed for something else.
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
"""The file that says that everything was installed; written last."""
QUOTED_LINES = 3
"""How many of the last lines of pip's a refusal repeats."""


class PeerUnavailable(Exception):
    """A peer cannot be installed here; the text has pip's own words."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the environments are kept."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlsrl" / "benchmarks"


def requirements_of(peer: str) -> Path:
    """The peer's pins."""
    return REQUIREMENTS / f"{peer}.txt"


def home_of(peer: str) -> Path:
    """Where the peer's environment is or will be."""
    marked = f"{sys.version}\n{requirements_of(peer).read_text()}"
    return cache_folder() / f"{peer}-{hashlib.sha256(marked.encode()).hexdigest()[:16]}"


def python_of(peer: str) -> Path:
    """The Python of the peer's environment, which is made if it is not there: minutes, and 5 GB of disk.

    Raises:
        PeerUnavailable: pip cannot install the pins with this Python.
    """
    home = home_of(peer)
    python = home / "bin" / "python"
    if not (home / COMPLETE).exists():
        print(f"{peer}: makes its environment in {home}, once (PyTorch: 3 GB to download)", file=sys.stderr, flush=True)
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*pip, "--requirement", str(requirements_of(peer))], capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = " / ".join(done.stderr.strip().splitlines()[-QUOTED_LINES:])
            raise PeerUnavailable(f"{peer} does not install with Python {sys.version.split()[0]}: {said}")
        (home / COMPLETE).touch()
    return python


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(python_of(name))
