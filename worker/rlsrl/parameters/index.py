"""The index of one policy in an object store: which object holds which blob. One small object, replaced as a whole.

An object store can change one object at a time, and only that under a condition. So what belongs together, and what
must not be written by a gang that was succeeded, is told by one object: a change is uploaded beside what is there and
happens when the index is replaced, on the condition that it is still the one the change was decided on.
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
"""The index's own key in a policy's folder."""
REMEMBERED_COMMITS = 16
"""Of how many of the last changes the index knows that they happened."""

_FORMAT = "rlsrl.index.1"
_NOTE = ".json"
_MAX_INLINE_BYTES = 64 * 1024
_KEY = re.compile(r"(?P<stem>.+)\.[0-9a-f]{16}(?P<suffix>\.[a-z]+)")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Where one blob is: in an object, or in the index itself."""

    key: str | None = None
    """The object's key in the policy's folder; None if the blob is in the index."""
    size: int
    """Bytes of the blob."""
    text: str = ""
    """The blob, if it is in the index."""


@dataclass(frozen=True, kw_only=True)
class Index:
    """One state of a policy."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    """By the blob's path in the policy's folder."""
    commits: tuple[str, ...] = ()
    """Identities of the last changes, newest last: a writer whose answer was lost learns here that it was heard."""
    collection: str = ""
    """Identity of the last change that removed objects nobody refers to: an upload from before it may be gone."""

    @property
    def keys(self) -> frozenset[str]:
        """The objects that are referred to."""
        return frozenset(entry.key for entry in self.entries.values() if entry.key is not None)

    def encode(self) -> bytes:
        """The index object."""
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
        """Read what ``encode`` wrote.

        Raises:
            Corrupt: it does not hold what was written; the text names ``source``.
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
        """What can be told without an index, from the objects in the policy's folder: the newest of each path.

        What was in the index itself is lost: tags, annotations, the fence above the versions.
        """
        entries = {}
        for each in sorted(listed, key=lambda each: (each.last_modified, each.key)):
            if (match := _KEY.fullmatch(each.key)) is not None:
                entries[match["stem"] + match["suffix"]] = Entry(key=each.key, size=each.size)
        return cls(entries=entries, collection=secrets.token_hex(8))


def new_key(path: str) -> str:
    """A key for an object that holds the blob of that path; given to nobody before."""
    stem, dot, suffix = path.rpartition(".")
    return f"{stem}.{secrets.token_hex(8)}{dot}{suffix}"


def inline(path: str, data: bytes) -> Entry | None:
    """The entry of a blob that is small enough to be in the index; None for others. Notes only: they are text."""
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
