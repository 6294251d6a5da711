"""Decides which of a run's coordinators leads, so that only one writes the run's documents.

A coordinator on a node that lost its network keeps running while its successor uses the same volume or bucket. Each
coordinator that starts appends its name to a list there. Only the last one in the list may write; the others exit. A
name that others have followed cannot lead again: kubelet restarts the container of a cut-off pod under the same name.
"""

from __future__ import annotations

import json

from typing_extensions import override

from rlsrl.runtime.errors import RunDamaged, damage
from rlsrl.workers.documents import StoredDocument

MAX_NAMES = 64
"""Names kept in the list. A pod that so many coordinators have followed no longer exists."""


class Superseded(Exception):
    """A newer coordinator has started for this run."""


class Leadership:
    """This coordinator's position in the list of coordinators."""

    def __init__(self, document: StoredDocument, process: str) -> None:
        """``process`` is this coordinator's process name (see ``rlsrl.runtime.identity``)."""
        self._document = document
        self._process = process
        self._acquired = False

    def acquire(self) -> None:
        """Become the leader, durably.

        Raises:
            Superseded: another coordinator has followed this one already.
            RunDamaged: the document is not a list of names.
            OSError: the document cannot be read or written.
        """
        names = self.names()
        if self._process in names[:-1]:
            raise self._superseded(names)
        if names[-1:] != [self._process]:
            self._document.write(json.dumps([*names, self._process][-MAX_NAMES:]).encode())
        self._acquired = True

    def check(self) -> None:
        """Check that this coordinator leads; acquire leadership if an earlier attempt failed or the list is gone.

        Raises:
            Superseded: another coordinator leads.
            RunDamaged: the document is not a list of names.
            OSError: the document cannot be read or written.
        """
        names = self.names()
        if not (names and self._acquired):
            self.acquire()
        elif names[-1] != self._process:
            raise self._superseded(names)

    def names(self) -> list[str]:
        """Return the list of coordinators, the newest last.

        Raises:
            RunDamaged: the document is not a list of names.
            OSError: the document cannot be read.
        """
        try:
            names = json.loads(self._document.read())
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise TypeError("the content is no JSON list of strings")
        except FileNotFoundError:
            return []
        except (TypeError, ValueError) as error:
            raise RunDamaged(
                f"{self._document} is not a list of coordinators ({damage(error)}); remove it: the next coordinator "
                "begins a new list"
            ) from error
        return names

    def _superseded(self, names: list[str]) -> Superseded:
        return Superseded(f"{names[-1]} has taken over from {self._process} ({self._document})")


class FencedDocument(StoredDocument):
    """A document that only the leading coordinator may write."""

    def __init__(self, document: StoredDocument, leadership: Leadership) -> None:
        self._document = document
        self._leadership = leadership

    @override
    def read(self) -> bytes:
        return self._document.read()

    @override
    def write(self, content: bytes) -> None:
        """Write if this coordinator leads; otherwise raise ``Superseded``."""
        self._leadership.check()
        self._document.write(content)

    @override
    def __str__(self) -> str:
        return str(self._document)
