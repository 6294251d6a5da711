"""The state that outlives a coordinator, the leases and the copies of ledger pages, and its documents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import structlog

from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.parameters.resumption import BEGIN_ANEW
from rlsrl.runtime.errors import RunDamaged, damage
from rlsrl.runtime.identity import own_process
from rlsrl.runtime.ledger import LedgerError, PageRecord
from rlsrl.workers.documents import COORDINATORS, LEDGER_COPIES, ROSTER, StoredDocument, open_document
from rlsrl.workers.leadership import FencedDocument, Leadership, Superseded
from rlsrl.workers.leases import Leases
from rlsrl.workers.ledger_copies import LedgerCopies


class CoordinatorState:
    """The leases and the copies of ledger pages. Writes of their documents run in tasks of the event loop.

    A write that has begun continues if its caller is cancelled.
    """

    def __init__(
        self,
        *,
        leases: Leases,
        leases_document: StoredDocument,
        copies: LedgerCopies,
        copies_document: StoredDocument,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self.leases = leases
        self.copies = copies
        self._leases_writer = _DocumentWriter(leases_document, leases.to_json)
        self._copies_writer = _DocumentWriter(copies_document, copies.to_json)
        self._log = log
        self._tasks: set[asyncio.Task[None]] = set()
        self._superseded: Superseded | None = None

    def write_leases(self) -> asyncio.Task[None]:
        """Begin to make the leases durable. The task raises OSError, or Superseded, if they are not written."""
        return self._begin(self._leases_writer.write())

    def write_copies(self) -> asyncio.Task[None]:
        """Begin to make the copies of ledger pages durable. The task raises as that of ``write_leases``."""
        return self._begin(self._copies_writer.write())

    async def flush(self) -> None:
        """Write both documents and wait for the writes, whether they succeed or not."""
        await asyncio.wait({self.write_leases(), self.write_copies()})

    def check(self) -> None:
        """Raise ``Superseded`` if a write found that another coordinator leads."""
        if self._superseded is not None:
            raise self._superseded

    def _begin(self, write: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(write)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self._log.error("record_not_written", error=repr(error))
        if isinstance(error, Superseded):
            self._superseded = error


class _DocumentWriter:
    """Writes a document when its value has changed."""

    def __init__(self, document: StoredDocument, value: Callable[[], Any]) -> None:
        """``value`` returns the present JSON value."""
        self._document = document
        self._value = value
        self._written = b""
        self._writing = asyncio.Lock()

    async def write(self) -> None:
        """Make the present value durable; one write serves all waiting callers. Raises OSError on failure."""
        async with self._writing:
            content = json.dumps(self._value(), indent=1).encode()
            if content != self._written:
                await asyncio.to_thread(self._document.write, content)
                self._written = content


def take_over(config: CoordinatorConfig, *, now: float, log: structlog.stdlib.BoundLogger) -> CoordinatorState:
    """Become the leading coordinator of the run, and return the state that the one before left.

    ``now`` is the time on the coordinator's monotonic clock.

    Raises:
        RunDamaged: the content of a document is invalid, or a lease is missing.
        Superseded: a later coordinator has taken over from this one's pod already.
        OSError: a document cannot be read.
    """
    leadership = Leadership(open_document(config, COORDINATORS), own_process())
    try:
        leadership.acquire()
    except OSError as error:
        log.warning("record_not_written", error=repr(error))  # Every later write tries again.
    leases_document = FencedDocument(open_document(config, ROSTER), leadership)
    copies_document = FencedDocument(open_document(config, LEDGER_COPIES), leadership)
    leases = read_leases(config, leases_document, now=now)
    copies = read_ledger_copies(config.num_workers, copies_document)
    check_leases(leases, copies.pages, leases_document)
    return CoordinatorState(
        leases=leases,
        leases_document=leases_document,
        copies=copies,
        copies_document=copies_document,
        log=log,
    )


def check_documents(config: CoordinatorConfig) -> tuple[Leases, LedgerCopies]:
    """Read the documents that an earlier coordinator left, without leading. Return its leases and ledger copies.

    Raises:
        RunDamaged: the content of a document is invalid.
        OSError: a document cannot be read.
    """
    Leadership(open_document(config, COORDINATORS), own_process()).names()
    leases = read_leases(config, open_document(config, ROSTER), now=0.0)
    return leases, read_ledger_copies(config.num_workers, open_document(config, LEDGER_COPIES))


def check_leases(leases: Leases, pages: Iterable[PageRecord], document: object) -> None:
    """Check that each worker with a ledger page has a lease. Without it a new worker would repeat its incarnation,
    which the ledger refuses.

    Args:
        leases: the leases in the document.
        pages: ledger pages, or copies of them.
        document: the document of the leases, for the error.

    Raises:
        RunDamaged: a lease is missing.
    """
    for page in pages:
        if page.incarnation >= 0 and not leases.knows(page.role, page.index):
            raise RunDamaged(
                f"{document} has no lease of {page.role} {page.index}, whose ledger page exists; restore it, or give "
                f"the run up: {BEGIN_ANEW}"
            )


def read_leases(config: CoordinatorConfig, document: StoredDocument, *, now: float) -> Leases:
    """Return the leases that an earlier coordinator of this run left; none if there is no document.

    Raises:
        RunDamaged: the content of the document is invalid.
        OSError: the document cannot be read.
    """
    capacity = config.num_workers
    try:
        value = json.loads(document.read())
        return Leases.from_json(value, lease_seconds=config.lease_seconds, capacity=capacity, now=now)
    except FileNotFoundError:
        return Leases(lease_seconds=config.lease_seconds, capacity=capacity)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunDamaged(
            f"{document} is not a roster ({damage(error)}); restore it, or give the run up: {BEGIN_ANEW}"
        ) from error


def read_ledger_copies(capacity: Mapping[str, int], document: StoredDocument) -> LedgerCopies:
    """Return the copies of ledger pages that an earlier coordinator of this run left; none if there is no document.

    Raises:
        RunDamaged: the content of the document is invalid.
        OSError: the document cannot be read.
    """
    copies = LedgerCopies(capacity)
    try:
        return copies.restore(json.loads(document.read()))
    except FileNotFoundError:
        return copies
    except (AttributeError, KeyError, TypeError, ValueError, LedgerError) as error:
        raise RunDamaged(
            f"{document} does not hold ledger pages ({damage(error)}); remove it: the run needs these copies only for "
            "workers whose own page is lost"
        ) from error
