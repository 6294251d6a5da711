"""The parameter database: its rules, over any store of blobs.

A policy's blobs under ``<policy>/``:

- ``versions/<attempt>-<step>.safetensors``: weights; never changed
- ``versions/<attempt>-<step>.json``: annotations, if there are any
- ``states/<attempt>-<step>.safetensors``: trainer states
- ``tags/<tag>.json``: the version that a tag names
- ``fence.json``: the highest attempt that has pushed

Every operation writes and removes blobs in an order in which a kill between any two leaves a consistent store:

- A higher attempt raises the fence before it writes its first version.
- A push's metadata are inside the version's blob, and its state is written before the version.
- A version is removed before its state and annotations. Leftovers of those are removed before a version of the same
  name is stored again.

Readers take no lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import structlog
from typing_extensions import override

from rlsrl.data.version import Version
from rlsrl.parameters.blobs import BlobChange, Blobs, BlobView
from rlsrl.parameters.contents import (
    Contents,
    annotations_path,
    dependent_paths,
    fence_path,
    state_path,
    tag_path,
    version_path,
)
from rlsrl.parameters.encoding import (
    check_json,
    check_parameters,
    check_state_of,
    content_digest,
    encode_note,
    encode_parameters,
    encode_state,
)
from rlsrl.parameters.names import LATEST, check_policy, check_tag
from rlsrl.parameters.protocols import (
    Corrupt,
    ParameterDB,
    ParameterError,
    Parameters,
    Ref,
    ResumePoint,
    StaleAttempt,
    TrainerState,
    VersionExists,
    VersionInfo,
)
from rlsrl.runtime.clock import Clock
from rlsrl.runtime.durable import NoRoom

_MAX_READS = 1000
"""How often a reader starts again because a prune removed what it had listed."""

_T = TypeVar("_T")

_log = structlog.stdlib.get_logger(__name__)


class BlobParameterDB(ParameterDB):
    """A ``ParameterDB`` over ``Blobs``. Any thread may call any method."""

    def __init__(self, blobs: Blobs, *, clock: Clock, keep_states: int) -> None:
        """Create the database; it reads and writes nothing yet.

        Args:
            blobs: the store.
            clock: gives each version its ``created_at``.
            keep_states: how many of the newest states are kept, 1 or more.
        """
        if keep_states < 1:
            raise ValueError(f"keep_states is {keep_states}; it must be at least 1, since resuming needs a state")
        self._blobs = blobs
        self._clock = clock
        self._keep_states = keep_states
        self._reported: set[str] = set()

    @override
    def get(self, policy: str, ref: Ref = LATEST, newer_than: Version | None = None) -> Parameters | None:
        # With `newer_than`, a policy without versions gives None instead of an error: an actor may start first.
        def read(contents: Contents) -> Parameters | None:
            if ref == LATEST:
                newest, corrupt = contents.newest_intact(newer_than)
                if newest is not None or newer_than is not None:
                    return newest
                raise corrupt or contents.unknown_policy()
            version = contents.resolve(ref)
            if newer_than is not None and version <= newer_than:
                return None
            return contents.parameters(version)

        return self._read(policy, read)

    @override
    def push(
        self,
        policy: str,
        parameters: Parameters,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        state: TrainerState | None = None,
    ) -> None:
        # A repeated push writes its tags and its state again, but keeps the metadata of the first one.
        check_policy(policy)
        check_parameters(parameters)
        for tag in tags:
            check_tag(tag)
        checked = check_json(metadata or {}, "metadata")
        version = parameters.version
        data = encode_parameters(parameters, created_at=self._clock.time(), metadata=checked)
        saved = None if state is None else encode_state(check_state_of(state, version))

        def push(change: BlobChange) -> None:
            self._pass_fence(change, policy, version)
            is_stored = self._is_stored(change, policy, parameters)
            if saved is not None:
                change.write(state_path(policy, version), saved)
            if not is_stored:
                change.write(version_path(policy, version), data)
            if saved is not None:
                self._remove_old_states(change, policy)
            _write_tags(change, policy, version, tags)

        try:
            self._blobs.change(policy, push)
        except NoRoom as error:
            self._remove_leftovers(policy, version)
            folder = next(parent for parent in Path(error.filename).parents if parent.name == policy)
            raise error.of(folder, len(data) + len(saved or b"")) from error

    @override
    def save_state(self, policy: str, state: TrainerState) -> None:
        """Store a trainer state durably, and remove all but the newest few states.

        A state that exists for this version is replaced.

        Raises:
            VersionNotFound: the state's version was not pushed.
            StaleAttempt: a higher attempt has pushed.
        """
        data = encode_state(state)

        def save(change: BlobChange) -> None:
            self._contents(change, policy).require(state.version)
            self._pass_fence(change, policy, state.version)
            change.write(state_path(policy, state.version), data)
            self._remove_old_states(change, policy)

        self._change(policy, save)

    @override
    def load_state(self, policy: str, ref: Ref = LATEST) -> TrainerState | None:
        """Return the version's state, or None if it has none.

        Raises:
            VersionNotFound: the reference names no stored version.
            Corrupt: the state of an explicitly named version fails verification.
        """

        def read(contents: Contents) -> TrainerState | None:
            if ref == LATEST:
                return contents.newest_resumable()
            version = contents.resolve(ref)
            try:
                return contents.state(version)
            except FileNotFoundError:
                return None

        return self._read(policy, read)

    @override
    def resume_point(self, policy: str) -> ResumePoint:
        return self._read(policy, Contents.resume_point)

    @override
    def damage(self, policy: str) -> dict[Version, str]:
        return self._read(policy, Contents.damage)

    @override
    def tag(self, policy: str, ref: Ref, *tags: str) -> None:
        for tag in tags:
            check_tag(tag)

        def name(change: BlobChange) -> None:
            _write_tags(change, policy, self._contents(change, policy).resolve(ref), tags)

        self._change(policy, name)

    @override
    def annotate(self, policy: str, version: Version, metadata: Mapping[str, Any]) -> None:
        """Add JSON values to a version's metadata. The keys of one call appear at the same time."""
        checked = check_json(metadata, "metadata")

        def note(change: BlobChange) -> None:
            contents = self._contents(change, policy)
            contents.require(version)
            notes = contents.annotations(version) | checked
            change.write(annotations_path(policy, version), encode_note(notes))

        self._change(policy, note)

    @override
    def versions(self, policy: str) -> list[VersionInfo]:
        """Return all stored versions, oldest first. Versions with a corrupt header are logged and left out."""
        return self._read(policy, Contents.infos)

    @override
    def prune(self, policy: str, *, keep_last: int) -> list[Version]:
        """Remove untagged versions except the newest ``keep_last``; return the removed ones.

        Two versions are never removed: the newest intact one, and the newest one with an intact state.

        Raises:
            ValueError: ``keep_last`` is negative.
        """
        if keep_last < 0:
            raise ValueError(f"keep_last is {keep_last}; it is a number of versions, 0 or more")
        if not self._read(policy, Contents.versions):
            return []

        def prune(change: BlobChange) -> list[Version]:
            contents = self._contents(change, policy)
            newest, _ = contents.newest_intact(None)
            kept = [each.version for each in (newest, contents.newest_resumable()) if each is not None]
            protected = {*contents.tags().values(), *kept}
            removable = choose_removable(contents.versions(), keep_last=keep_last, protected=protected)
            for version in removable:
                change.remove([version_path(policy, version), *dependent_paths(policy, version)])
            return removable

        return self._blobs.change(policy, prune)

    @override
    def policies(self) -> list[str]:
        """Return the names of the stored policies, sorted."""
        return sorted(policy for policy in self._blobs.policies() if self._read(policy, Contents.versions))

    def _change(self, policy: str, body: Callable[[BlobChange], None]) -> None:
        """Change a policy that exists: a misspelt name must not create a policy."""
        if not self._read(policy, Contents.versions):
            raise self._contents(self._blobs.view(policy), policy).unknown_policy()
        self._blobs.change(policy, body)

    def _pass_fence(self, change: BlobChange, policy: str, version: Version) -> None:
        """Refuse an attempt below the fence; raise the fence durably if the attempt is above it."""
        seen = self._contents(change, policy).highest_attempt()
        if version.attempt < seen:
            raise StaleAttempt(f"version {version} of policy {policy!r} comes too late: attempt {seen} has pushed")
        if version.attempt > seen:
            change.write(fence_path(policy), encode_note(version.attempt))

    def _remove_old_states(self, change: BlobChange, policy: str) -> None:
        older = self._contents(change, policy).states()[: -self._keep_states]
        change.remove([state_path(policy, version) for version in older])

    def _remove_leftovers(self, policy: str, version: Version) -> None:
        """Remove what an unfinished push wrote: it takes room, and until the next push nothing else removes it."""

        def remove(change: BlobChange) -> None:
            if version not in self._contents(change, policy).versions():
                change.remove(dependent_paths(policy, version))

        with contextlib.suppress(OSError):
            self._blobs.change(policy, remove)

    def _is_stored(self, change: BlobChange, policy: str, parameters: Parameters) -> bool:
        """Return whether exactly these weights are stored intact; remove leftovers of the version if it is not stored.

        Raises:
            VersionExists: the version is stored with other content.
        """
        version = parameters.version
        try:
            stored = self._contents(change, policy).parameters(version)
        except FileNotFoundError:
            change.remove(dependent_paths(policy, version))
            return False
        except Corrupt as error:
            self._report(error)
            return False
        if content_digest(stored) != content_digest(parameters):
            raise VersionExists(f"version {version} of policy {policy!r} was pushed before with other content")
        change.confirm(version_path(policy, version))
        return True

    def _contents(self, view: BlobView, policy: str) -> Contents:
        return Contents(view, policy, policies=self.policies, report=self._report)

    def _report(self, error: Corrupt) -> None:
        """Log a corrupt blob once, however often it is read."""
        text = str(error)
        if text not in self._reported:
            self._reported.add(text)
            _log.error("parameters_corrupt", error=text)

    def _read(self, policy: str, read: Callable[[Contents], _T]) -> _T:
        """Run ``read`` without a lock; repeat it on a new view if a prune removed what it had listed."""
        check_policy(policy)
        for _ in range(_MAX_READS):
            try:
                return read(self._contents(self._blobs.view(policy), policy))
            except FileNotFoundError:
                continue
        raise ParameterError(
            f"policy {policy!r}: in {_MAX_READS} attempts, versions were removed before they could be read"
        )


def choose_removable(stored: Sequence[Version], *, keep_last: int, protected: Collection[Version]) -> list[Version]:
    """Return the versions to remove, oldest first: all except the newest ``keep_last`` and the protected ones."""
    ascending = sorted(stored)
    old = ascending[: max(len(ascending) - keep_last, 0)]
    return [version for version in old if version not in protected]


def _write_tags(change: BlobChange, policy: str, version: Version, tags: Sequence[str]) -> None:
    for tag in tags:
        change.write(tag_path(policy, tag), encode_note(str(version)))
