"""Where what the coordinator knows outlives it: a file, or an object beside the weights where there is no volume."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.runtime.durable import write_durably
from rlsrl.workers.build.parameters import open_objects

if TYPE_CHECKING:
    from rlsrl.parameters.objects import Objects

ROSTER = "roster.json"
"""The roster's name where it is an object; as a file it has the name that the config gives."""
PAGES = "ledger.json"
"""The name of the copies of ledger pages; as a file it is beside the roster's."""


SUCCESSION = "coordinators.json"
"""The name of the list of coordinators (``rlsrl.workers.succession``); as a file it is beside the roster's."""


class Record(Protocol):
    """One document, replaced as a whole."""

    def read(self) -> bytes:
        """What was written last.

        Raises:
            FileNotFoundError: nothing was.
            OSError: it cannot be read.
        """

    def write(self, document: bytes) -> None:
        """Replace it; durable when this returns. Raises OSError if that cannot be."""


class RecordFile:
    """In a file, by atomic replacement."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes:
        """See ``Record``."""
        return self._path.read_bytes()

    def write(self, document: bytes) -> None:
        """See ``Record``."""
        write_durably(self._path, document)

    def __str__(self) -> str:
        return str(self._path)


class RecordObject:
    """In an object store."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name

    def read(self) -> bytes:
        """See ``Record``."""
        return self._objects.read(self._name)

    def write(self, document: bytes) -> None:
        """See ``Record``."""
        self._objects.write(self._name, document)

    def __str__(self) -> str:
        return f"{self._objects.name}: {self._name}"


def open_record(config: CoordinatorConfig, name: str) -> Record:
    """Where that coordinator keeps ``ROSTER``, ``PAGES`` or ``SUCCESSION``. Nothing is looked at yet.

    Raises:
        ConfigurationError: the environment has no credentials for the object store.
    """
    if config.roster_path is not None:
        roster = Path(config.roster_path)
        return RecordFile(roster if name == ROSTER else roster.with_name(name))
    assert config.parameter_store.object_store is not None, "validation says so"  # noqa: S101 - an invariant of our own
    return RecordObject(open_objects(config.parameter_store.object_store), name)
