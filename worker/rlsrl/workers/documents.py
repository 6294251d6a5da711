"""The documents that outlive a coordinator: files on its volume, or objects beside the weights where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.runtime.durable import write_durably
from rlsrl.workers.build.parameters import open_objects

if TYPE_CHECKING:
    from rlsrl.parameters.objects import Objects

ROSTER = "roster.json"
"""Object name of the roster's leases (``rlsrl.workers.leases``). The config gives the name of the file."""
LEDGER_COPIES = "ledger.json"
"""Name of the copies of ledger pages. The file is beside that of the leases."""
COORDINATORS = "coordinators.json"
"""Name of the list of coordinators (``rlsrl.workers.leadership``). The file is beside that of the leases."""


class StoredDocument(Protocol):
    """One document. A write replaces it as a whole."""

    def read(self) -> bytes:
        """Return the newest content.

        Raises:
            FileNotFoundError: the document was never written.
            OSError: the document cannot be read.
        """

    def write(self, content: bytes) -> None:
        """Replace the content, durably. Raises OSError on failure."""


class DocumentFile(StoredDocument):
    """A document in a file, which a write replaces atomically."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @override
    def read(self) -> bytes:
        return self._path.read_bytes()

    @override
    def write(self, content: bytes) -> None:
        write_durably(self._path, content)

    @override
    def __str__(self) -> str:
        return str(self._path)


class DocumentObject(StoredDocument):
    """A document in an object store."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name

    @override
    def read(self) -> bytes:
        return self._objects.read(self._name)

    @override
    def write(self, content: bytes) -> None:
        self._objects.write(self._name, content)

    @override
    def __str__(self) -> str:
        return f"{self._objects.name}: {self._name}"


def open_document(config: CoordinatorConfig, name: str) -> StoredDocument:
    """Return the coordinator's document ``ROSTER``, ``LEDGER_COPIES`` or ``COORDINATORS`` without reading it.

    Raises:
        ConfigurationError: the environment has no credentials for the object store.
    """
    if config.roster_path is not None:
        roster = Path(config.roster_path)
        return DocumentFile(roster if name == ROSTER else roster.with_name(name))
    assert config.parameter_store.object_store is not None, "validation says so"
    return DocumentObject(open_objects(config.parameter_store.object_store), name)
