"""The parameter database: its rules, over any place that keeps bytes.

Under ``<policy>/``: ``versions/<attempt>-<step>.safetensors`` (weights, never changed) with a ``.json`` beside it once
something was annotated, ``states/<attempt>-<step>.safetensors``, ``tags/<tag>.json`` and ``fence.json`` (the
highest attempt that pushed). Each change is one blob that appears, is replaced or goes, and the order of several is
such that a kill between any two leaves a consistent store: the fence rises before the version that raised it; the
metadata of a push travel inside the version; a version goes before what belongs to it, and whatever is left of it is
removed before a version of that name can come again. Readers take no lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import structlog

from rlsrl.data.version import Version
from rlsrl.parameters.blobs import Blobs
from rlsrl.parameters.encoding import (
    HEADER_BYTES,
    StoredHeader,
    check_json,
    check_parameters,
    content_digest,
    decode_header,
    decode_note,
    decode_parameters,
    decode_state,
    encode_note,
    encode_parameters,
    encode_state,
    header_size,
)
from rlsrl.parameters.names import (
    LATEST,
    as_version,
    check_policy,
    check_tag,
    file_stem,
    parse_file_stem,
    unknown_policy,
    unknown_tag,
    unknown_version,
)
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

_ARRAYS = ".safetensors"
_NOTE = ".json"
_T = TypeVar("_T")

_log = structlog.stdlib.get_logger(__name__)


class BlobParameterDB:
    """A ``ParameterDB`` over ``Blobs``. Any thread may call anything."""

    def __init__(self, blobs: Blobs, *, clock: Clock, keep_states: int) -> None:
        """``clock`` dates the versions, ``keep_states`` is how many of the newest states are kept (1 or more)."""
        if keep_states < 1:
            raise ValueError(f"keep_states is {keep_states}; resuming needs at least 1")
        self._blobs = blobs
        self._clock = clock
        self._keep_states = keep_states
        self._pushed = threading.Condition()
        self._num_pushes = 0
        self._reported: set[str] = set()

    def get(self, policy: str, ref: Ref = LATEST, newer_than: Version | None = None) -> Parameters | None:
        """See ``ParameterReader.get``. With ``newer_than`` a policy of which nothing is stored yet gives None."""
        check_policy(policy)
        if ref == LATEST:
            newest, corrupt = self._retry(lambda: self._newest_intact(policy, newer_than))
            if newest is not None or newer_than is not None:
                return newest
            raise corrupt or unknown_policy(policy, self.policies())
        return self._retry(lambda: self._named(policy, ref, newer_than))

    def watch(self, policy: str, timeout: float) -> Iterator[Version]:
        """See ``ParameterReader.watch``. The newest stored version comes first, at once.

        Waiting is ended by a push through this object, by the next look every ``RECHECK_SECONDS``, or by the timeout.
        """
        check_policy(policy)
        seen: Version | None = None
        deadline = time.monotonic() + timeout
        while True:
            num_pushes = self._num_pushes
            newest = max(self._stored(policy), default=None)
            if newest is not None and (seen is None or newest > seen):
                seen = newest
                yield newest
                deadline = time.monotonic() + timeout
            elif (remaining := deadline - time.monotonic()) > 0:
                self._await_push(num_pushes, min(remaining, RECHECK_SECONDS))
            else:
                return

    def push(
        self,
        policy: str,
        parameters: Parameters,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """See ``ParameterDB.push``. Of a repeated push only the tags count; the first one's metadata stay."""
        check_policy(policy)
        check_parameters(parameters)
        for tag in tags:
            check_tag(tag)
        checked = check_json(metadata or {}, "metadata")
        version = parameters.version
        with self._blobs.exclusive(policy):
            self._pass_fence(policy, version)
            if not self._holds_already(policy, parameters):
                data = encode_parameters(parameters, created_at=self._clock.time(), metadata=checked)
                self._blobs.write(_version_path(policy, version), data)
            self._write_tags(policy, version, tags)
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
        with self._exclusive(policy):
            self._require(policy, state.version)
            self._pass_fence(policy, state.version)
            self._blobs.write(_state_path(policy, state.version), data)
            older = self._states(policy)[: -self._keep_states]
            self._blobs.remove([_state_path(policy, version) for version in older])

    def load_state(self, policy: str, ref: Ref = LATEST) -> TrainerState | None:
        """See ``ParameterDB.load_state``. None if no state of that version is kept.

        Raises:
            VersionNotFound: the reference names nothing.
            Corrupt: the state of an explicitly named version fails verification.
        """
        check_policy(policy)
        if ref == LATEST:
            return self._retry(lambda: self._newest_resumable(policy))
        version = self._resolve(policy, ref)
        try:
            return self._read_state(policy, version)
        except FileNotFoundError:
            return None

    def tag(self, policy: str, ref: Ref, *tags: str) -> None:
        """See ``ParameterDB.tag``."""
        for tag in tags:
            check_tag(tag)
        with self._exclusive(policy):
            self._write_tags(policy, self._resolve(policy, ref), tags)

    def annotate(self, policy: str, version: Version, metadata: Mapping[str, Any]) -> None:
        """See ``ParameterDB.annotate``. All keys of one call appear together."""
        checked = check_json(metadata, "metadata")
        with self._exclusive(policy):
            self._require(policy, version)
            notes = self._annotations(policy, version) | checked
            self._blobs.write(_annotations_path(policy, version), encode_note(notes))

    def versions(self, policy: str) -> list[VersionInfo]:
        """See ``ParameterDB.versions``. A version whose header fails verification is left out, with a log event."""
        check_policy(policy)
        return self._retry(lambda: self._described(policy))

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
        check_policy(policy)
        if keep_last < 0:
            raise ValueError(f"keep_last is {keep_last}; it is a number of versions, 0 or more")
        if not self._stored(policy):
            return []
        with self._blobs.exclusive(policy):
            protected = set(self._tags(policy).values())
            newest, _ = self._newest_intact(policy, None)
            resumable = self._newest_resumable(policy)
            protected |= {kept.version for kept in (newest, resumable) if kept is not None}
            expendable = choose_expendable(self._stored(policy), keep_last=keep_last, protected=protected)
            for version in expendable:
                self._blobs.remove([_version_path(policy, version), *_belongings(policy, version)])
        return expendable

    def policies(self) -> list[str]:
        """See ``ParameterDB.policies``; sorted."""
        return sorted(policy for policy in self._blobs.policies() if self._stored(policy))

    def _exclusive(self, policy: str) -> AbstractContextManager[None]:
        """``Blobs.exclusive`` for a policy that is there: a misspelt name must not create one."""
        check_policy(policy)
        if not self._stored(policy):
            raise unknown_policy(policy, self.policies())
        return self._blobs.exclusive(policy)

    def _await_push(self, num_pushes: int, timeout: float) -> None:
        with self._pushed:
            self._pushed.wait_for(lambda: self._num_pushes != num_pushes, timeout)

    def _pass_fence(self, policy: str, version: Version) -> None:
        """Refuse an attempt below the highest seen; remember it durably if it is a higher one."""
        seen = self._highest_attempt(policy)
        if version.attempt < seen:
            raise StaleAttempt(f"version {version} of policy {policy!r} comes too late: attempt {seen} has pushed")
        if version.attempt > seen:
            self._blobs.write(_fence_path(policy), encode_note(version.attempt))

    def _highest_attempt(self, policy: str) -> int:
        recorded = self._note(_fence_path(policy), -1)
        return max([recorded, *(version.attempt for version in self._stored(policy))])

    def _holds_already(self, policy: str, parameters: Parameters) -> bool:
        """Whether these very weights are stored whole; makes room for them if not."""
        version = parameters.version
        path = _version_path(policy, version)
        try:
            there = self._read(policy, version)
        except FileNotFoundError:
            self._blobs.remove(_belongings(policy, version))
            return False
        except Corrupt as error:
            self._report(error)
            return False
        if content_digest(there) != content_digest(parameters):
            raise VersionExists(f"version {version} of policy {policy!r} was pushed before with other content")
        self._blobs.confirm(path)
        return True

    def _write_tags(self, policy: str, version: Version, tags: Sequence[str]) -> None:
        for tag in tags:
            self._blobs.write(_tag_path(policy, tag), encode_note(str(version)))

    def _stored(self, policy: str) -> list[Version]:
        """Versions in the store, ascending, corrupt ones included."""
        return self._listed(f"{policy}/versions")

    def _states(self, policy: str) -> list[Version]:
        """Versions with a state, ascending."""
        return self._listed(f"{policy}/states")

    def _listed(self, folder: str) -> list[Version]:
        stems = (name.removesuffix(_ARRAYS) for name in self._blobs.names(folder) if name.endswith(_ARRAYS))
        return sorted(version for stem in stems if (version := parse_file_stem(stem)) is not None)

    def _read(self, policy: str, version: Version) -> Parameters:
        path = _version_path(policy, version)
        parameters = decode_parameters(self._blobs.read(path), path)
        _check_name(path, version, parameters.version)
        return parameters

    def _read_state(self, policy: str, version: Version) -> TrainerState:
        path = _state_path(policy, version)
        state = decode_state(self._blobs.read(path), path)
        _check_name(path, version, state.version)
        return state

    def _newest_intact(self, policy: str, newer_than: Version | None) -> tuple[Parameters | None, Corrupt | None]:
        """The newest whole weights above the given version; with None, why the newest stored ones are not whole."""
        first_error: Corrupt | None = None
        for version in reversed(self._stored(policy)):
            if newer_than is not None and version <= newer_than:
                break
            try:
                return self._read(policy, version), None
            except Corrupt as error:
                self._report(error)
                first_error = first_error or error
        return None, first_error

    def _newest_resumable(self, policy: str) -> TrainerState | None:
        """The newest whole state with whole parameters; raises FileNotFoundError if they changed under the search."""
        listed = self._states(policy)
        for version in reversed(listed):
            try:
                state = self._read_state(policy, version)
                self._read(policy, version)
            except Corrupt as error:
                self._report(error)
            except FileNotFoundError:
                continue  # pruned, in part or since the listing
            else:
                return state
        if self._states(policy) != listed:
            raise FileNotFoundError(f"{policy}/states")
        return None

    def _named(self, policy: str, ref: Version | str, newer_than: Version | None) -> Parameters | None:
        version = self._resolve(policy, ref)
        if newer_than is not None and version <= newer_than:
            return None
        return self._read(policy, version)

    def _resolve(self, policy: str, ref: Ref) -> Version:
        """The version that a reference names; it was stored a moment ago."""
        if ref == LATEST:
            newest, corrupt = self._retry(lambda: self._newest_intact(policy, None))
            if newest is None:
                raise corrupt or unknown_policy(policy, self.policies())
            return newest.version
        version = ref if isinstance(ref, Version) else as_version(ref)
        if version is None:
            return self._retry(lambda: self._tagged(policy, str(ref)))
        self._require(policy, version)
        return version

    def _tagged(self, policy: str, tag: str) -> Version:
        """The version with that tag; raises FileNotFoundError if the tag moved and the version was pruned meanwhile."""
        tags = self._tags(policy)
        stored = self._stored(policy)
        if tags.get(tag) in stored:
            return tags[tag]
        if self._tags(policy) != tags:
            raise FileNotFoundError(_tag_path(policy, tag))
        if not stored:
            raise unknown_policy(policy, self.policies())
        raise unknown_version(policy, tags[tag], stored) if tag in tags else unknown_tag(policy, tag, tags, stored)

    def _require(self, policy: str, version: Version) -> None:
        stored = self._stored(policy)
        if not stored:
            raise unknown_policy(policy, self.policies())
        if version not in stored:
            raise unknown_version(policy, version, stored)

    def _tags(self, policy: str) -> dict[str, Version]:
        tags = {}
        for name in self._blobs.names(f"{policy}/tags"):
            text = self._note(f"{policy}/tags/{name}", "")
            version = as_version(text)
            if version is not None:
                tags[name.removesuffix(_NOTE)] = version
        return tags

    def _annotations(self, policy: str, version: Version) -> dict[str, Any]:
        return self._note(_annotations_path(policy, version), {})

    def _note(self, path: str, default: _T) -> _T:
        """The JSON value at the path, of the default's type; the default if there is none or it is corrupt."""
        try:
            value = decode_note(self._blobs.read(path), path)
            if not isinstance(value, type(default)):
                raise Corrupt(f"{path}: holds {value!r}")
        except FileNotFoundError:
            return default
        except Corrupt as error:
            self._report(error)
            return default
        return value

    def _described(self, policy: str) -> list[VersionInfo]:
        tags: dict[Version, list[str]] = {}
        for tag, version in sorted(self._tags(policy).items()):
            tags.setdefault(version, []).append(tag)
        states = set(self._states(policy))
        infos = []
        for version in self._stored(policy):
            try:
                header = self._header(policy, version)
            except Corrupt as error:
                self._report(error)
                continue
            infos.append(
                VersionInfo(
                    policy=policy,
                    version=version,
                    tags=tuple(tags.get(version, ())),
                    created_at=header.created_at,
                    num_parameters=header.num_parameters,
                    nbytes=self._blobs.size(_version_path(policy, version)),
                    has_state=version in states,
                    metadata={**header.metadata, **self._annotations(policy, version)},
                )
            )
        return infos

    def _header(self, policy: str, version: Version) -> StoredHeader:
        path = _version_path(policy, version)
        data = self._blobs.read(path, HEADER_BYTES)
        if header_size(data) > len(data):
            data = self._blobs.read(path, header_size(data))
        header = decode_header(data, path)
        _check_name(path, version, header.version)
        return header

    def _report(self, error: Corrupt) -> None:
        """One log event for each thing that is corrupt, however often it is met."""
        text = str(error)
        if text not in self._reported:
            self._reported.add(text)
            _log.error("parameters_corrupt", error=text)

    def _retry(self, read: Callable[[], _T]) -> _T:
        """Read without a lock beside a writer: what a prune took between listing and reading is looked for anew."""
        for _ in range(_RACES):
            try:
                return read()
            except FileNotFoundError:
                continue
        raise ParameterError(f"versions went faster than they could be read, {_RACES} times in a row")


def choose_expendable(stored: Sequence[Version], *, keep_last: int, protected: Collection[Version]) -> list[Version]:
    """What retention takes, oldest first: all but the newest ``keep_last`` and the protected ones."""
    ascending = sorted(stored)
    old = ascending[: max(len(ascending) - keep_last, 0)]
    return [version for version in old if version not in protected]


def _check_name(path: str, version: Version, held: Version) -> None:
    if held != version:
        raise Corrupt(f"{path}: holds version {held}")


def _fence_path(policy: str) -> str:
    return f"{policy}/fence.json"


def _version_path(policy: str, version: Version) -> str:
    return f"{policy}/versions/{file_stem(version)}{_ARRAYS}"


def _annotations_path(policy: str, version: Version) -> str:
    return f"{policy}/versions/{file_stem(version)}{_NOTE}"


def _state_path(policy: str, version: Version) -> str:
    return f"{policy}/states/{file_stem(version)}{_ARRAYS}"


def _tag_path(policy: str, tag: str) -> str:
    return f"{policy}/tags/{tag}{_NOTE}"


def _belongings(policy: str, version: Version) -> list[str]:
    """What goes with a version, and must not pass to another of the same name."""
    return [_annotations_path(policy, version), _state_path(policy, version)]
