"""Which of the coordinators that a run has had is the present one.

A coordinator on a node that was cut off goes on, and its successor elsewhere reads and writes the same volume or
bucket. Each that comes up puts its name at the end of a list there; whoever is not the last one writes nothing, and
ends. A name that was followed by another cannot come back: a cut-off pod's container is started again and again.
"""

from __future__ import annotations

import json

from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.record import Record

REMEMBERED = 64
"""How many names are kept; a pod that so many have followed is long gone."""


class Superseded(Exception):  # noqa: N818 - named for what happened
    """Another coordinator has come up for this run since."""


class Succession:
    """This coordinator's place in the list."""

    def __init__(self, record: Record, process: str) -> None:
        """``process`` is this one's name (see ``rlsrl.runtime.identity``)."""
        self._record = record
        self._process = process
        self._entered = False

    def enter(self) -> None:
        """Be the present one from now on; durable when this returns.

        Raises:
            Superseded: this one has been followed by another already.
            ConfigurationError: the record holds something else.
            OSError: it cannot be read or written.
        """
        names = self._names()
        if self._process in names[:-1]:
            raise self._superseded(names)
        if names[-1:] != [self._process]:
            self._record.write(json.dumps([*names, self._process][-REMEMBERED:]).encode())
        self._entered = True

    def check(self) -> None:
        """Nobody has followed. A list that is gone, perhaps with all beside it, is begun anew; and this one enters it
        now, if the disk did not take that before.

        Raises:
            Superseded: somebody has.
            ConfigurationError: the record holds something else.
            OSError: it cannot be read or written.
        """
        names = self._names()
        if not (names and self._entered):
            self.enter()
        elif names[-1] != self._process:
            raise self._superseded(names)

    def _names(self) -> list[str]:
        try:
            names = json.loads(self._record.read())
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise ConfigurationError(f"{self._record} is no list of coordinators: {error}") from error
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"{self._record} is no list of coordinators: {names!r}")
        return names

    def _superseded(self, names: list[str]) -> Superseded:
        return Superseded(f"{names[-1]} has taken over from {self._process} ({self._record})")


class Inherited:
    """A record that the present coordinator alone may write."""

    def __init__(self, record: Record, succession: Succession) -> None:
        self._record = record
        self._succession = succession

    def read(self) -> bytes:
        """See ``Record``."""
        return self._record.read()

    def write(self, document: bytes) -> None:
        """See ``Record``; raises ``Superseded`` in whoever has been followed."""
        self._succession.check()
        self._record.write(document)

    def __str__(self) -> str:
        return str(self._record)
