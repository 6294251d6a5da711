"""The index of one policy in an object store: a small object that says which object holds which blob.

An object store changes one object at a time, and can make that change conditional. So one object, the index, decides
what is stored. A change first uploads its blobs as new objects. It happens when it replaces the index, on the condition
that the index is still the one that the change has read. This also stops a gang that was replaced.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from rlsrl.parameters.encoding import decode_note, encode_note
from rlsrl.parameters.objects import Listed
from rlsrl.parameters.protocols import Corrupt

NAME = "index.json"
"""Key of the index in a policy's folder."""
REMEMBERED_COMMITS = 16
"""How many of the last changes the index remembers."""

_FORMAT = "rlsrl.index.1"
_NOTE = ".json"
_MAX_INLINE_BYTES = 64 * 1024
_KEY = re.compile(r"(?P<stem>.+)\.[0-9a-f]{16}(?P<suffix>\.[a-z]+)")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The place of one blob: an object, or the index itself."""

    key: str | None = None
    """The object's key in the policy's folder; None if the blob is in the index."""
    size: int
    """Size of the blob in bytes."""
    text: str = ""
    """The blob's content, if it is in the index."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """The content of one policy at one moment."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    """Entries by the blob's path in the policy's folder."""
    commits: tuple[str, ...] = ()
    """Identities of the last changes, newest last. A writer that lost the store's answer looks here."""
    collection: str = ""
    """Identity of the last change that removed unreferenced objects. Objects uploaded before it may be gone."""

    @property
    def keys(self) -> frozenset[str]:
        """The keys of the objects that the index refers to."""
        return frozenset(entry.key for entry in self.entries.values() if entry.key is not None)

    def encode(self) -> bytes:
        """Return the index object's bytes."""
        return encode_note(
            {
                "format": _FORMAT,
                "blobs": {path: _to_json(entry) for path, entry in sorted(self.entries.items())},
                "commits": list(self.commits),
                "collection": self.collection,
            }
        )

    @classmethod
    def decode(cls, data: bytes, source: str) -> Self:
        """Return the index that ``encode`` wrote.

        Raises:
            Corrupt: the bytes are not what was written; the text names ``source``.
        """
        value = decode_note(data, source)
        try:
            if value["format"] != _FORMAT:
                raise Corrupt(f"{source}: holds {value['format']!r}, not {_FORMAT!r}")
            return cls(
                entries={path: _from_json(entry) for path, entry in value["blobs"].items()},
                commits=tuple(value["commits"]),
                collection=value["collection"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{source}: {error!r}") from error

    @classmethod
    def rebuilt(cls, listed: Iterable[Listed]) -> Self:
        """Return an index made from the objects in the policy's folder: the newest object of each path.

        The content of the lost index itself cannot be recovered: tags, annotations, and a fence above the versions.
        """
        entries = {}
        for each in sorted(listed, key=lambda each: (each.last_modified, each.key)):
            if (match := _KEY.fullmatch(each.key)) is not None:
                entries[match["stem"] + match["suffix"]] = Entry(key=each.key, size=each.size)
        return cls(entries=entries, collection=secrets.token_hex(8))


def new_key(path: str) -> str:
    """Return a new, unique key for an object that holds the blob of that path."""
    stem, dot, suffix = path.rpartition(".")
    return f"{stem}.{secrets.token_hex(8)}{dot}{suffix}"


def inline(path: str, data: bytes) -> Entry | None:
    """Return the entry of a note that is small enough for the index; None for any other blob. Notes are text."""
    if path.endswith(_NOTE) and len(data) <= _MAX_INLINE_BYTES:
        return Entry(size=len(data), text=data.decode())
    return None


def _to_json(entry: Entry) -> dict[str, str | int]:
    return {"text": entry.text} if entry.key is None else {"key": entry.key, "size": entry.size}


def _from_json(value: Mapping[str, str | int]) -> Entry:
    if "key" in value:
        return Entry(key=str(value["key"]), size=int(value["size"]))
    text = str(value["text"])
    return Entry(size=len(text.encode()), text=text)
