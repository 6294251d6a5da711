"""The coordinator's copies of all workers' ledger pages. A page is lost with its pod; the copy remains.

Every heartbeat contains the worker's page. If a page is lost, the next worker at the index starts from the copy. The
status document's ledger is computed from the copies. Pure: the coordinator stores the document.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any, Self

from rlsrl.runtime.ledger import CHAIN, PageRecord, balance


class LedgerCopies:
    """The newest known page of each index; empty for an index whose worker has not sent one."""

    def __init__(self, capacity: Mapping[str, int]) -> None:
        """Start with empty pages. ``capacity`` is the number of indices of each role."""
        self._capacity = capacity
        self._pages = {
            (role, index): PageRecord(role=role, index=index)
            for role in CHAIN
            for index in range(capacity.get(role, 0))
        }

    def resize(self, capacity: Mapping[str, int]) -> None:
        """Change the number of indices of the roles. Pages beyond it stay: their workers may come back."""
        self._capacity = capacity

    def put(self, page: PageRecord) -> None:
        """Store a worker's page. A page of an earlier incarnation is ignored."""
        before = self._pages.get((page.role, page.index))
        if before is None or before.incarnation <= page.incarnation:
            self._pages[page.role, page.index] = page

    def get(self, role: str, index: int) -> PageRecord | None:
        """Return the newest page of the index, or None."""
        page = self._pages.get((role, index))
        return page if page is not None and page.lives else None

    @property
    def pages(self) -> list[PageRecord]:
        """The pages of all indices whose workers have sent one."""
        return [page for page in self._pages.values() if page.lives]

    def ledger(self, present: Iterable[str]) -> dict[str, Any]:
        """Return ``Balance.to_checked_json`` of the run. ``present`` are the roles with present workers.

        What an index beyond the capacity keeps counts as evicted: nothing is drawn from its store.
        """
        pages = [self._without_removed(page) for page in self._pages.values()]
        return balance(pages, ended=not {*CHAIN}.intersection(present), copies=True).to_checked_json()

    def _without_removed(self, page: PageRecord) -> PageRecord:
        if not page.keeps or page.index < self._capacity.get(page.role, 0):
            return page
        kept = page.counters["in_buffer"]
        return page.count(in_buffer=-kept, **{"dropped.evicted": kept})

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that ``restore`` reads."""
        roles: dict[str, dict[str, str]] = {}
        for (role, index), page in sorted(self._pages.items()):
            if page.lives:
                roles.setdefault(role, {})[str(index)] = base64.b64encode(page.encode()).decode()
        return {"pages": roles}

    def restore(self, value: Mapping[str, Any]) -> Self:
        """Store the pages that an earlier coordinator wrote.

        Raises:
            AttributeError, KeyError, TypeError, ValueError, LedgerError: the value is not such a document.
        """
        for role, pages in value["pages"].items():
            for index, page in pages.items():
                self.put(PageRecord.decode(base64.b64decode(page, validate=True), role=str(role), index=int(index)))
        return self
