"""The parameter database in an object store: S3 or a compatible one.

A policy's folder holds one object for each version and state, under keys that are used only once, and an index that
says which of these objects are current (``index.py``). There is no lock. A change reads the index, decides, uploads its
large blobs, and happens when it replaces the index. The store refuses the replacement if another change came first; the
change then reads and decides again. Three promises follow:

- A gang that was replaced cannot write, however long it slept between its decision and its write.
- A push and its tags happen at the same moment.
- A reader sees the content of one moment.

A writer that dies or loses a race leaves objects that no index refers to. The next change that removes a blob removes
those, too. It lists the objects before it replaces the index. Once it has replaced the index, no unreferenced object of
that list can come into use: its writer has read an older index, so its own replacement fails.
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
from typing_extensions import override

from rlsrl.parameters.blobs import BlobChange, Blobs, BlobView, T
from rlsrl.parameters.database import BlobParameterDB
from rlsrl.parameters.index import NAME, REMEMBERED_COMMITS, Entry, Index, inline, new_key
from rlsrl.parameters.objects import Conflict, Objects, StoreRefused, StoreUnreachable
from rlsrl.parameters.protocols import Corrupt
from rlsrl.rpc.back_off import BackOff
from rlsrl.runtime.clock import Clock, SystemClock

_CHANGE_SECONDS = 60.0
"""How long a change is repeated because others came first."""
_FIRST_BACK_OFF_SECONDS = 0.01
_MAX_BACK_OFF_SECONDS = 0.5
_KEPT_HEADS = 128
"""Objects whose first bytes are cached, so that repeated listings of versions cost few requests."""

_log = structlog.stdlib.get_logger(__name__)


class ObjectStoreParameterDB(BlobParameterDB):
    """A ``ParameterDB`` in an object store. The bucket must exist."""

    def __init__(
        self, objects: Objects, *, clock: Clock | None = None, keep_states: int = 3, change_seconds: float | None = None
    ) -> None:
        """``change_seconds`` is how long a change is repeated because other processes' changes came first."""
        super().__init__(
            ObjectBlobs(objects, change_seconds=_CHANGE_SECONDS if change_seconds is None else change_seconds),
            clock=clock or SystemClock(),
            keep_states=keep_states,
        )


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    """An index, as it was read."""

    index: Index
    etag: str | None
    """None if the policy has no index yet."""


class ObjectBlobs(Blobs):
    """``Blobs`` in objects, with one index for each policy. A view shows the content of one moment."""

    def __init__(self, objects: Objects, *, change_seconds: float) -> None:
        self._objects = objects
        self._heads = _Heads(_KEPT_HEADS)
        self._change_seconds = change_seconds
        self._last_seen: dict[str, _Snapshot] = {}
        self._reported: set[str] = set()
        """Etags of the corrupt indexes that were logged."""
        self._has_conditional_writes = False
        self._never_set = threading.Event()

    @override
    def policies(self) -> list[str]:
        return self._objects.folders()

    @override
    def view(self, policy: str) -> BlobView:
        # Reading a blob that was removed since this moment raises FileNotFoundError.
        return _IndexView(self, policy, self.snapshot(policy).index)

    @override
    def change(self, policy: str, body: Callable[[BlobChange], T]) -> T:
        """Run ``body`` and replace the index: the change happens as a whole, at one moment. See ``Blobs``.

        Raises:
            TimeoutError: other changes came first for too long.
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
            self._never_set.wait(random.uniform(0, back_off.next_delay()))  # noqa: S311 - spreads writers, keeps no secret

    def snapshot(self, policy: str) -> _Snapshot:
        """Return the current index. If it is corrupt, return one that is rebuilt from the objects."""
        known = self._last_seen.get(policy)
        corrupt: tuple[str, Corrupt] | None = None
        while True:
            try:
                found = self._objects.read_changed(f"{policy}/{NAME}", None if known is None else known.etag)
            except FileNotFoundError:
                return _Snapshot(index=Index(), etag=None)
            if found is None:
                assert known is not None, "no etag, no unchanged answer"
                return known
            try:
                index = Index.decode(found.data, f"{policy}/{NAME}")
            except Corrupt as error:
                # Read twice before the rebuild: some stores mix two writes in one answer.
                if corrupt is not None and corrupt[0] == found.etag:
                    return self._rebuilt(policy, found.etag, error)
                corrupt = found.etag, error
                continue
            snapshot = _Snapshot(index=index, etag=found.etag)
            self._last_seen[policy] = snapshot
            return snapshot

    def read(self, policy: str, entry: Entry, limit: int | None) -> bytes:
        """Return the bytes of an entry's object, at most the first ``limit``.

        Raises:
            FileNotFoundError: the object was removed.
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

    def missing(self, path: str) -> Corrupt:
        """Return the error for a missing object that the index refers to."""
        return Corrupt(f"{path}: its object is gone from {self._objects.name}")

    def upload(self, policy: str, path: str, data: bytes) -> Entry:
        """Write the blob into a new object, to which no index refers yet; return its entry."""
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
        """Replace the index; return False if another change came first."""
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
            # An earlier attempt of the same request may have succeeded, with its answer lost.
            if identity not in self.snapshot(policy).index.commits:
                if isinstance(error, Conflict):
                    return False
                raise
        else:
            self._last_seen[policy] = _Snapshot(index=index, etag=etag)
        self._remove(sorted(unused - {f"{policy}/{key}" for key in (*index.keys, NAME)}))
        return True

    def _remove(self, keys: Sequence[str]) -> None:
        """Free space after a change. A failure is only logged: the next change that removes objects tries again."""
        if not keys:
            return
        try:
            self._objects.remove(keys)
        except (StoreRefused, StoreUnreachable) as error:
            _log.warning("objects_left", error=str(error), num_objects=len(keys))

    def _require_conditional_writes(self) -> None:
        if not self._has_conditional_writes:
            self._objects.require_conditional_writes()
            self._has_conditional_writes = True


@dataclass(frozen=True, kw_only=True)
class _Upload:
    """An object that was uploaded for a change that has not happened yet."""

    data: bytes
    entry: Entry
    collection: str
    """``Index.collection`` at the time of the upload."""


class _Heads:
    """A cache of objects' first bytes, by least recent use. An object never changes, so a cached entry stays valid."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._heads: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """Return the object's cached bytes; None if there are none."""
        with self._lock:
            if key in self._heads:
                self._heads.move_to_end(key)
            return self._heads.get(key)

    def put(self, key: str, head: bytes) -> None:
        """Store the bytes, and drop the least recently used entry if the cache is full."""
        with self._lock:
            self._heads[key] = head
            self._heads.move_to_end(key)
            if len(self._heads) > self._capacity:
                self._heads.popitem(last=False)


class _IndexView(BlobView):
    """The blobs that an index refers to."""

    def __init__(self, blobs: ObjectBlobs, policy: str, index: Index) -> None:
        self._blobs = blobs
        self._policy = policy
        self._index = index
        self.entries: dict[str, Entry] = dict(index.entries)

    @override
    def names(self, folder: str) -> list[str]:
        prefix = self._relative(f"{folder}/")
        return [path.removeprefix(prefix) for path in self.entries if path.startswith(prefix)]

    @override
    def size(self, path: str) -> int:
        return self._entry(path).size

    @override
    def read(self, path: str, limit: int | None = None) -> bytes:
        entry = self._entry(path)
        if entry.key is None:
            return entry.text.encode()[:limit]
        try:
            return self._blobs.read(self._policy, entry, limit)
        except FileNotFoundError:
            if self._blobs.snapshot(self._policy).index.entries.get(self._relative(path)) == entry:
                raise self._blobs.missing(path) from None
            raise

    def _entry(self, path: str) -> Entry:
        try:
            return self.entries[self._relative(path)]
        except KeyError:
            raise FileNotFoundError(path) from None

    def _relative(self, path: str) -> str:
        return path.removeprefix(f"{self._policy}/")


class _IndexChange(_IndexView, BlobChange):
    """A change of the blobs that an index refers to. It happens when the index is replaced."""

    def __init__(self, blobs: ObjectBlobs, policy: str, index: Index, uploads: dict[str, _Upload]) -> None:
        """``uploads`` holds the objects of earlier runs of the same change."""
        super().__init__(blobs, policy, index)
        self._uploads = uploads

    @override
    def write(self, path: str, data: bytes) -> None:
        # An earlier run's object is used again, unless it may have been removed since.
        relative = self._relative(path)
        self.entries[relative] = inline(relative, data) or self._uploaded(relative, data)

    @override
    def confirm(self, path: str) -> None:
        pass  # every object that an index refers to is durable

    @override
    def remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.entries.pop(self._relative(path), None)

    def _uploaded(self, relative: str, data: bytes) -> Entry:
        collection = self._index.collection
        earlier = self._uploads.get(relative)
        if earlier is not None and earlier.collection == collection and earlier.data == data:
            return earlier.entry
        entry = self._blobs.upload(self._policy, relative, data)
        self._uploads[relative] = _Upload(data=data, entry=entry, collection=collection)
        return entry
