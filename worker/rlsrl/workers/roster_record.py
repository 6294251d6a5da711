"""Where the roster outlives the coordinator: a file, or an object beside the weights where there is no volume."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.runtime.durable import write_durably
from rlsrl.workers.build.parameters import open_objects

if TYPE_CHECKING:
    from rlsrl.parameters.objects import Objects

OBJECT = "roster.json"


class RosterRecord(Protocol):
    """One document, replaced as a whole."""

    def read(self) -> bytes:
        """What was written last.

        Raises:
            FileNotFoundError: nothing was.
            OSError: it cannot be read.
        """

    def write(self, document: bytes) -> None:
        """Replace it; durable when this returns. Raises OSError if that cannot be."""


class RosterFile:
    """In a file, by atomic replacement."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> bytes:
        """See ``RosterRecord``."""
        return self._path.read_bytes()

    def write(self, document: bytes) -> None:
        """See ``RosterRecord``."""
        write_durably(self._path, document)

    def __str__(self) -> str:
        return str(self._path)


class RosterObject:
    """In an object store."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def read(self) -> bytes:
        """See ``RosterRecord``."""
        return self._objects.read(OBJECT)

    def write(self, document: bytes) -> None:
        """See ``RosterRecord``."""
        self._objects.write(OBJECT, document)

    def __str__(self) -> str:
        return f"{self._objects.name}: {OBJECT}"


def open_roster_record(config: CoordinatorConfig) -> RosterRecord:
    """Where that coordinator keeps its roster. Nothing is looked at yet.

    Raises:
        ConfigurationError: the environment has no credentials for the object store.
    """
    if config.roster_path is not None:
        return RosterFile(Path(config.roster_path))
    assert config.parameter_store.object_store is not None, "validation says so"  # noqa: S101 - an invariant of our own
    return RosterObject(open_objects(config.parameter_store.object_store))
