"""The parameter database: its rules, over any place that keeps bytes.

Under ``<policy>/``: ``versions/<attempt>-<step>.safetensors`` (weights, never changed) with a ``.json`` beside it once
something was annotated, ``states/<attempt>-<step>.safetensors``, ``tags/<tag>.json`` and ``fence.json`` (the
highest attempt that pushed). Each change is one blob that appears, is replaced or goes, and the order of several is
such that a kill between any two leaves a consistent store: the fence rises before the version that raised it; the
metadata of a push travel inside the version, and its state is there before it; a version goes before what belongs to
it, and whatever is left of it is removed before a version of that name can come again. Readers take no lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import structlog

from rlsrl.data.version import Version
from rlsrl.parameters.blobs import Blobs, Change, View
from rlsrl.parameters.contents import (
    Contents,
    annotations_path,
    belongings,
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
    ParameterError,
    Parameters,
    Ref,
    StaleAttempt,
    TrainerState,
    VersionExists,
    VersionInfo,
)
from rlsrl.runtime.clock import Clock

RECHECK_SECONDS = 0.25
"""How often ``watch`` looks again: other processes' pushes make no event that reaches every kind of volume."""

_RACES = 1000
"""How often a reader starts over because what it had listed was pruned before it was read."""

_T = TypeVar("_T")

_log = structlog.stdlib.get_logger(__name__)


class BlobParameterDB:
    """A ``ParameterDB`` over ``Blobs``. Any thread may call anything."""

    def __init__(
        self, blobs: Blobs, *, clock: Clock, keep_states: int, recheck_seconds: float = RECHECK_SECONDS
    ) -> None:
        """``clock`` dates the versions, ``keep_states`` is how many of the newest states are kept (1 or more);
        ``watch`` looks again every ``recheck_seconds``.
        """
        if keep_states < 1:
            raise ValueError(f"keep_states is {keep_states}; resuming needs at least 1")
        self._blobs = blobs
        self._clock = clock
        self._keep_states = keep_states
        self._recheck_seconds = recheck_seconds
        self._pushed = threading.Condition()
        self._num_pushes = 0
        self._reported: set[str] = set()

    def get(self, policy: str, ref: Ref = LATEST, newer_than: Version | None = None) -> Parameters | None:
        """See ``ParameterReader.get``. With ``newer_than`` a policy of which nothing is stored yet gives None."""

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

        return self._look(policy, read)

    def watch(self, policy: str, timeout: float) -> Iterator[Version]:
        """See ``ParameterReader.watch``. The newest stored version comes first, at once.

        Waiting is ended by a push through this object, by the next look after ``recheck_seconds``, or by the timeout.
        """
        seen: Version | None = None
        deadline = time.monotonic() + timeout
        while True:
            num_pushes = self._num_pushes
            newest = max(self._look(policy, Contents.versions), default=None)
            if newest is not None and (seen is None or newest > seen):
                seen = newest
                yield newest
                deadline = time.monotonic() + timeout
            elif (remaining := deadline - time.monotonic()) > 0:
                self._await_push(num_pushes, min(remaining, self._recheck_seconds))
            else:
                return

    def push(
        self,
        policy: str,
        parameters: Parameters,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        state: TrainerState | None = None,
    ) -> None:
        """See ``ParameterDB.push``. Of a repeated push only tags and state count; the first one's metadata stay."""
        check_policy(policy)
        check_parameters(parameters)
        for tag in tags:
            check_tag(tag)
        checked = check_json(metadata or {}, "metadata")
        version = parameters.version
        data = encode_parameters(parameters, created_at=self._clock.time(), metadata=checked)
        saved = None if state is None else encode_state(check_state_of(state, version))

        def push(change: Change) -> None:
            self._pass_fence(change, policy, version)
            held = self._holds_already(change, policy, parameters)
            if saved is not None:
                change.write(state_path(policy, version), saved)
            if not held:
                change.write(version_path(policy, version), data)
            if saved is not None:
                self._remove_old_states(change, policy)
            _write_tags(change, policy, version, tags)

        self._blobs.change(policy, push)
        with self._pushed:
            self._num_pushes += 1
            self._pushed.notify_all()

    def save_state(self, policy: str, state: TrainerState) -> None:
        """See ``ParameterDB.save_state``. A state saved again for the same version is replaced.

        Raises:
            VersionNotFound: the version was not pushed before its state.
            StaleAttempt: a higher attempt has pushed.
        """
        data = encode_state(state)

        def save(change: Change) -> None:
            self._contents(change, policy).require(state.version)
            self._pass_fence(change, policy, state.version)
            change.write(state_path(policy, state.version), data)
            self._remove_old_states(change, policy)

        self._change(policy, save)

    def load_state(self, policy: str, ref: Ref = LATEST) -> TrainerState | None:
        """See ``ParameterDB.load_state``. None if no state of that version is kept.

        Raises:
            VersionNotFound: the reference names nothing.
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

        return self._look(policy, read)

    def tag(self, policy: str, ref: Ref, *tags: str) -> None:
        """See ``ParameterDB.tag``."""
        for tag in tags:
            check_tag(tag)

        def name(change: Change) -> None:
            _write_tags(change, policy, self._contents(change, policy).resolve(ref), tags)

        self._change(policy, name)

    def annotate(self, policy: str, version: Version, metadata: Mapping[str, Any]) -> None:
        """See ``ParameterDB.annotate``. All keys of one call appear together."""
        checked = check_json(metadata, "metadata")

        def note(change: Change) -> None:
            contents = self._contents(change, policy)
            contents.require(version)
            notes = contents.annotations(version) | checked
            change.write(annotations_path(policy, version), encode_note(notes))

        self._change(policy, note)

    def versions(self, policy: str) -> list[VersionInfo]:
        """See ``ParameterDB.versions``. A version whose header fails verification is left out, with a log event."""
        return self._look(policy, Contents.described)

    def query(self, policy: str, where: Mapping[str, Any]) -> list[VersionInfo]:
        """See ``ParameterDB.query``."""
        wanted = check_json(where, "where")
        return [
            info
            for info in self.versions(policy)
            if all(key in info.metadata and info.metadata[key] == value for key, value in wanted.items())
        ]

    def prune(self, policy: str, *, keep_last: int) -> list[Version]:
        """See ``ParameterDB.prune``. What ``latest`` and resuming would take stays: the newest intact version and the
        newest with an intact state.

        Raises:
            ValueError: ``keep_last`` is negative.
        """
        if keep_last < 0:
            raise ValueError(f"keep_last is {keep_last}; it is a number of versions, 0 or more")
        if not self._look(policy, Contents.versions):
            return []

        def prune(change: Change) -> list[Version]:
            contents = self._contents(change, policy)
            newest, _ = contents.newest_intact(None)
            kept = [each.version for each in (newest, contents.newest_resumable()) if each is not None]
            protected = {*contents.tags().values(), *kept}
            expendable = choose_expendable(contents.versions(), keep_last=keep_last, protected=protected)
            for version in expendable:
                change.remove([version_path(policy, version), *belongings(policy, version)])
            return expendable

        return self._blobs.change(policy, prune)

    def policies(self) -> list[str]:
        """See ``ParameterDB.policies``; sorted."""
        return sorted(policy for policy in self._blobs.policies() if self._look(policy, Contents.versions))

    def _change(self, policy: str, body: Callable[[Change], None]) -> None:
        """``Blobs.change`` for a policy that is there: a misspelt name must not create one."""
        if not self._look(policy, Contents.versions):
            raise self._contents(self._blobs.view(policy), policy).unknown_policy()
        self._blobs.change(policy, body)

    def _await_push(self, num_pushes: int, timeout: float) -> None:
        with self._pushed:
            self._pushed.wait_for(lambda: self._num_pushes != num_pushes, timeout)

    def _pass_fence(self, change: Change, policy: str, version: Version) -> None:
        """Refuse an attempt below the highest seen; remember it durably if it is a higher one."""
        seen = self._contents(change, policy).highest_attempt()
        if version.attempt < seen:
            raise StaleAttempt(f"version {version} of policy {policy!r} comes too late: attempt {seen} has pushed")
        if version.attempt > seen:
            change.write(fence_path(policy), encode_note(version.attempt))

    def _remove_old_states(self, change: Change, policy: str) -> None:
        older = self._contents(change, policy).states()[: -self._keep_states]
        change.remove([state_path(policy, version) for version in older])

    def _holds_already(self, change: Change, policy: str, parameters: Parameters) -> bool:
        """Whether these very weights are stored whole; makes room for them if not."""
        version = parameters.version
        try:
            there = self._contents(change, policy).parameters(version)
        except FileNotFoundError:
            change.remove(belongings(policy, version))
            return False
        except Corrupt as error:
            self._report(error)
            return False
        if content_digest(there) != content_digest(parameters):
            raise VersionExists(f"version {version} of policy {policy!r} was pushed before with other content")
        change.confirm(version_path(policy, version))
        return True

    def _contents(self, view: View, policy: str) -> Contents:
        return Contents(view, policy, policies=self.policies, report=self._report)

    def _report(self, error: Corrupt) -> None:
        """One log event for each thing that is corrupt, however often it is met."""
        text = str(error)
        if text not in self._reported:
            self._reported.add(text)
            _log.error("parameters_corrupt", error=text)

    def _look(self, policy: str, read: Callable[[Contents], _T]) -> _T:
        """Read without a lock beside a writer: what a prune took between listing and reading is looked for anew."""
        check_policy(policy)
        for _ in range(_RACES):
            try:
                return read(self._contents(self._blobs.view(policy), policy))
            except FileNotFoundError:
                continue
        raise ParameterError(f"versions went faster than they could be read, {_RACES} times in a row")


def choose_expendable(stored: Sequence[Version], *, keep_last: int, protected: Collection[Version]) -> list[Version]:
    """What retention takes, oldest first: all but the newest ``keep_last`` and the protected ones."""
    ascending = sorted(stored)
    old = ascending[: max(len(ascending) - keep_last, 0)]
    return [version for version in old if version not in protected]


def _write_tags(change: Change, policy: str, version: Version, tags: Sequence[str]) -> None:
    for tag in tags:
        change.write(tag_path(policy, tag), encode_note(str(version)))
