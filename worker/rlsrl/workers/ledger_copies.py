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
        self._pages = {
            (role, index): PageRecord(role=role, index=index)
            for role in CHAIN
            for index in range(capacity.get(role, 0))
        }

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
        """Return ``Balance.to_checked_json`` of the run. ``present`` are the roles with present workers."""
        return balance(self._pages.values(), ended=not {*CHAIN}.intersection(present), copies=True).to_checked_json()

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
