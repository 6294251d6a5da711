"""The parameter database in an object store, S3 or what speaks like it.

A policy's folder holds one object for each version and state, under names that are used once, and an index that says
which of them count (``index.py``). Nobody waits for a lock: a change is decided on the index it read, its large blobs
are uploaded, and it happens when the index is replaced, which the store refuses if another change came first; then it
is decided anew. So a gang that was succeeded cannot write, however long it slept between deciding and writing; a push
with its tags happens at one moment; and a reader sees one moment.

An object that no index refers to is left by a writer that died or lost a race. The next change that removes something
removes it too: it lists the objects first, and what it then does not refer to cannot be in use once it has happened,
because every writer that uploaded before decided on an index that is no longer the last.
"""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog

from rlsrl.parameters.blobs import Change, T, View
from rlsrl.parameters.database import BlobParameterDB
from rlsrl.parameters.index import NAME, REMEMBERED_COMMITS, Entry, Index, inline, new_key
from rlsrl.parameters.objects import Conflict, Objects, StoreRefused, StoreUnreachable
from rlsrl.parameters.protocols import Corrupt
from rlsrl.rpc.reconnect import BackOff
from rlsrl.runtime.clock import Clock, SystemClock

RECHECK_SECONDS = 1.0
"""How often ``watch`` looks again; each look is a request that costs money."""

_CHANGE_SECONDS = 60.0
"""How long a change is tried again because others came first."""
_FIRST_BACK_OFF_SECONDS = 0.01
_MAX_BACK_OFF_SECONDS = 0.5
_KEPT_HEADS = 128
"""Objects whose first bytes are remembered, so that listing versions again and again costs next to nothing."""

_log = structlog.stdlib.get_logger(__name__)


class ObjectStoreParameterDB(BlobParameterDB):
    """A ``ParameterDB`` in an object store; the bucket must be there."""

    def __init__(
        self, objects: Objects, *, clock: Clock | None = None, keep_states: int = 3, change_seconds: float | None = None
    ) -> None:
        """``change_seconds`` is how long a change is tried again because other processes' came first."""
        super().__init__(
            ObjectBlobs(objects, change_seconds=_CHANGE_SECONDS if change_seconds is None else change_seconds),
            clock=clock or SystemClock(),
            keep_states=keep_states,
            recheck_seconds=RECHECK_SECONDS,
        )


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """An index as it was read."""

    index: Index
    etag: str | None
    """None if there was none yet."""


class ObjectBlobs:
    """``Blobs`` in objects that an index for each policy refers to; a view shows one moment."""

    def __init__(self, objects: Objects, *, change_seconds: float) -> None:
        self._objects = objects
        self._heads = _Heads(_KEPT_HEADS)
        self._change_seconds = change_seconds
        self._last_seen: dict[str, _Snapshot] = {}
        self._reported: set[str] = set()
        """Etags of corrupt indexes."""
        self._conditions_kept = False
        self._never = threading.Event()

    def policies(self) -> list[str]:
        """See ``Blobs``."""
        return self._objects.folders()

    def view(self, policy: str) -> View:
        """See ``Blobs``: everything is as it was at one moment, and a moment that has passed ends in
        FileNotFoundError where something was removed since.
        """
        return _IndexView(self, policy, self.snapshot(policy).index)

    def change(self, policy: str, body: Callable[[Change], T]) -> T:
        """See ``Blobs``. Happens at one moment, as a whole.

        Raises:
            StoreUnreachable: the store failed. If it failed at the last step, the change may have happened.
        """
        self._require_conditional_writes()
        deadline = time.monotonic() + self._change_seconds
        uploads: dict[str, _Upload] = {}
        back_off = BackOff(first_seconds=_FIRST_BACK_OFF_SECONDS, max_seconds=_MAX_BACK_OFF_SECONDS)
        while True:
            snapshot = self.snapshot(policy)
            change = _IndexChange(self, policy, snapshot.index, uploads)
            result = body(change)
            if self._commit(policy, snapshot, change):
                return result
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"others have been changing policy {policy!r} in {self._objects.name} for "
                    f"{self._change_seconds} seconds"
                )
            self._never.wait(random.uniform(0, back_off.next_delay()))  # noqa: S311 - spreads writers, keeps no secret

    def snapshot(self, policy: str) -> _Snapshot:
        """The index as it is now. A corrupt one is replaced by what the objects tell."""
        known = self._last_seen.get(policy)
        corrupt: tuple[str, Corrupt] | None = None
        while True:
            try:
                found = self._objects.read_changed(f"{policy}/{NAME}", None if known is None else known.etag)
            except FileNotFoundError:
                return _Snapshot(index=Index(), etag=None)
            if found is None:
                assert known is not None, "only what is known can be unchanged"
                return known
            try:
                index = Index.decode(found.data, f"{policy}/{NAME}")
            except Corrupt as error:
                # Read again before it is believed: some stores mix two writes in one answer.
                if corrupt is not None and corrupt[0] == found.etag:
                    return self._rebuilt(policy, found.etag, error)
                corrupt = found.etag, error
                continue
            snapshot = _Snapshot(index=index, etag=found.etag)
            self._last_seen[policy] = snapshot
            return snapshot

    def read(self, policy: str, entry: Entry, limit: int | None) -> bytes:
        """The bytes of an entry's object, at most the first ``limit``.

        Raises:
            FileNotFoundError: it is gone.
        """
        key = f"{policy}/{entry.key}"
        if limit is None:
            return self._objects.read(key)
        wanted = min(limit, entry.size)
        head = self._heads.get(key)
        if head is None or len(head) < wanted:
            head = self._objects.read(key, wanted)
            self._heads.put(key, head)
        return head[:wanted]

    def gone(self, path: str) -> Corrupt:
        """The error for an object that an index refers to and that is not there."""
        return Corrupt(f"{path}: its object is gone from {self._objects.name}")

    def upload(self, policy: str, path: str, data: bytes) -> Entry:
        """Put the bytes of the blob at ``path`` into an object of their own, which no index refers to yet."""
        entry = Entry(key=new_key(path), size=len(data))
        self._objects.write(f"{policy}/{entry.key}", data)
        return entry

    def _rebuilt(self, policy: str, etag: str, error: Corrupt) -> _Snapshot:
        if etag not in self._reported:
            self._reported.add(etag)
            _log.error("parameters_index_corrupt", error=str(error), store=self._objects.name)
        prefix = f"{policy}/"
        listed = [replace(each, key=each.key.removeprefix(prefix)) for each in self._objects.listed(prefix)]
        return _Snapshot(index=Index.rebuilt(listed), etag=etag)

    def _commit(self, policy: str, snapshot: _Snapshot, change: _IndexChange) -> bool:
        """Let the change happen; False if another came first."""
        if change.entries == snapshot.index.entries:
            return True
        identity = secrets.token_hex(8)
        index = Index(
            entries=change.entries,
            commits=(*snapshot.index.commits, identity)[-REMEMBERED_COMMITS:],
            collection=snapshot.index.collection,
        )
        unused: set[str] = set()
        if not index.keys >= snapshot.index.keys:
            index = replace(index, collection=identity)
            unused = {each.key for each in self._objects.listed(f"{policy}/")}
        try:
            etag = self._objects.replace(f"{policy}/{NAME}", index.encode(), etag=snapshot.etag)
        except (Conflict, StoreUnreachable) as error:
            # The answer to an earlier try of the same request may have been lost.
            if identity not in self.snapshot(policy).index.commits:
                if isinstance(error, Conflict):
                    return False
                raise
        else:
            self._last_seen[policy] = _Snapshot(index=index, etag=etag)
        self._remove(sorted(unused - {f"{policy}/{key}" for key in (*index.keys, NAME)}))
        return True

    def _remove(self, keys: Sequence[str]) -> None:
        """Free the space. The change has happened: what cannot be removed now is found by the next."""
        if not keys:
            return
        try:
            self._objects.remove(keys)
        except (StoreRefused, StoreUnreachable) as error:
            _log.warning("objects_left", error=str(error), num_objects=len(keys))

    def _require_conditional_writes(self) -> None:
        if not self._conditions_kept:
            self._objects.require_conditional_writes()
            self._conditions_kept = True


@dataclass(frozen=True, kw_only=True)
class _Upload:
    """An object that was uploaded for a change that has not happened yet."""

    data: bytes
    entry: Entry
    collection: str
    """The index's, at the upload."""


class _Heads:
    """First bytes of the objects that were read last. An object never changes, so a listing asks for each only once."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._heads: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """What is known of the object; None if nothing is."""
        with self._lock:
            if key in self._heads:
                self._heads.move_to_end(key)
            return self._heads.get(key)

    def put(self, key: str, head: bytes) -> None:
        """Remember it, and forget what was not asked for the longest."""
        with self._lock:
            self._heads[key] = head
            self._heads.move_to_end(key)
            if len(self._heads) > self._capacity:
                self._heads.popitem(last=False)


class _IndexView:
    """``View`` of what an index refers to."""

    def __init__(self, blobs: ObjectBlobs, policy: str, index: Index) -> None:
        self._blobs = blobs
        self._policy = policy
        self._index = index
        self.entries: dict[str, Entry] = dict(index.entries)

    def names(self, folder: str) -> list[str]:
        """See ``View``."""
        prefix = self._inner(f"{folder}/")
        return [path.removeprefix(prefix) for path in self.entries if path.startswith(prefix)]

    def size(self, path: str) -> int:
        """See ``View``."""
        return self._entry(path).size

    def read(self, path: str, limit: int | None = None) -> bytes:
        """See ``View``."""
        entry = self._entry(path)
        if entry.key is None:
            return entry.text.encode()[:limit]
        try:
            return self._blobs.read(self._policy, entry, limit)
        except FileNotFoundError:
            if self._blobs.snapshot(self._policy).index.entries.get(self._inner(path)) == entry:
                raise self._blobs.gone(path) from None
            raise

    def _entry(self, path: str) -> Entry:
        try:
            return self.entries[self._inner(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _inner(self, path: str) -> str:
        return path.removeprefix(f"{self._policy}/")


class _IndexChange(_IndexView):
    """``Change`` of what an index refers to; happens when the index is replaced."""

    def __init__(self, blobs: ObjectBlobs, policy: str, index: Index, uploads: dict[str, _Upload]) -> None:
        """``uploads`` are those of earlier runs of the same change."""
        super().__init__(blobs, policy, index)
        self._uploads = uploads

    def write(self, path: str, data: bytes) -> None:
        """See ``Change``. What an earlier run uploaded is taken again, unless it may have been removed since."""
        inner = self._inner(path)
        self.entries[inner] = inline(inner, data) or self._uploaded(inner, data)

    def confirm(self, path: str) -> None:
        """See ``Change``: what an index refers to is durable."""

    def remove(self, paths: Sequence[str]) -> None:
        """See ``Change``."""
        for path in paths:
            self.entries.pop(self._inner(path), None)

    def _uploaded(self, inner: str, data: bytes) -> Entry:
        collection = self._index.collection
        earlier = self._uploads.get(inner)
        if earlier is not None and earlier.collection == collection and earlier.data == data:
            return earlier.entry
        entry = self._blobs.upload(self._policy, inner, data)
        self._uploads[inner] = _Upload(data=data, entry=entry, collection=collection)
        return entry
