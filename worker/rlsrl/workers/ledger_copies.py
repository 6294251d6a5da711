"""Copies of all workers' ledger pages, as the coordinator keeps them: a page goes with its pod, its copy does not.

Every heartbeat brings its worker's page. Whoever is next at an index begins on the copy where the page itself is gone,
and the books of the run are drawn up from the copies. Pure: the coordinator stores the document.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any, Self

from rlsrl.runtime.ledger import CHAIN, PageRecord, balance


class LedgerCopies:
    """The newest known page of each index. An index of which nothing is known has an empty one."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        """Nothing is known yet; ``capacity`` says how many indices each role has."""
        self._pages = {
            (role, index): PageRecord(role=role, index=index)
            for role in CHAIN
            for index in range(capacity.get(role, 0))
        }

    def put(self, page: PageRecord) -> None:
        """A worker showed its page; one of a former life is passed over."""
        before = self._pages.get((page.role, page.index))
        if before is None or before.incarnation <= page.incarnation:
            self._pages[page.role, page.index] = page

    def get(self, role: str, index: int) -> PageRecord | None:
        """What the last life at that index had on its page, as far as is known; None if nothing is."""
        page = self._pages.get((role, index))
        return page if page is not None and page.lives else None

    def books(self, present: Iterable[str]) -> dict[str, Any]:
        """The run's ledger, ``present`` being the roles of workers that are there. See ``Balance.judge``."""
        return balance(self._pages.values(), ended=not {*CHAIN}.intersection(present), copies=True).to_checked_json()

    def to_json(self) -> dict[str, Any]:
        """What must outlive the coordinator, as a JSON value that ``restore`` reads."""
        roles: dict[str, dict[str, str]] = {}
        for (role, index), page in sorted(self._pages.items()):
            if page.lives:
                roles.setdefault(role, {})[str(index)] = base64.b64encode(page.encode()).decode()
        return {"pages": roles}

    def restore(self, value: Mapping[str, Any]) -> Self:
        """Put what an earlier coordinator kept.

        Raises:
            AttributeError, KeyError, TypeError, ValueError, LedgerError: the value is no such document.
        """
        for role, pages in value["pages"].items():
            for index, page in pages.items():
                self.put(PageRecord.decode(base64.b64decode(page, validate=True), role=str(role), index=int(index)))
        return self
