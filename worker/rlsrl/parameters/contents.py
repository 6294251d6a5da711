"""What one policy's blobs hold: versions, states, tags, annotations, the fence. Reading only; nothing is decided here
about what may be written.

Every read may meet FileNotFoundError where a prune came between listing and reading; whoever holds no exclusive right
takes a new view then and looks anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rlsrl.data.version import Version
from rlsrl.parameters.blobs import View
from rlsrl.parameters.encoding import (
    HEADER_BYTES,
    StoredHeader,
    decode_header,
    decode_note,
    decode_parameters,
    decode_state,
    header_size,
)
from rlsrl.parameters.names import (
    LATEST,
    as_version,
    file_stem,
    parse_file_stem,
    unknown_policy,
    unknown_tag,
    unknown_version,
)
from rlsrl.parameters.protocols import Corrupt, Parameters, Ref, TrainerState, VersionInfo

_ARRAYS = ".safetensors"
_NOTE = ".json"
_T = TypeVar("_T")


class Contents:
    """One policy as a view shows it."""

    def __init__(
        self, view: View, policy: str, *, policies: Callable[[], list[str]], report: Callable[[Corrupt], None]
    ) -> None:
        """``policies`` names what is stored, for errors; ``report`` takes note of what is corrupt and passed over."""
        self._view = view
        self._policy = policy
        self._policies = policies
        self._report = report

    def versions(self) -> list[Version]:
        """Versions in the store, ascending, corrupt ones included."""
        return self._listed(f"{self._policy}/versions")

    def states(self) -> list[Version]:
        """Versions with a state, ascending, corrupt ones included."""
        return self._listed(f"{self._policy}/states")

    def require(self, version: Version) -> None:
        """See that the version is stored.

        Raises:
            VersionNotFound: it is not; the text says what is.
        """
        stored = self.versions()
        if not stored:
            raise self.unknown_policy()
        if version not in stored:
            raise unknown_version(self._policy, version, stored)

    def unknown_policy(self) -> Exception:
        """The error for a policy of which nothing is stored."""
        return unknown_policy(self._policy, self._policies())

    def highest_attempt(self) -> int:
        """The highest attempt that pushed, -1 if none did."""
        recorded = self._note(fence_path(self._policy), -1)
        return max([recorded, *(version.attempt for version in self.versions())])

    def tags(self) -> dict[str, Version]:
        """Which version each tag names; the version may be gone."""
        tags = {}
        for name in self._view.names(f"{self._policy}/tags"):
            text = self._note(f"{self._policy}/tags/{name}", "")
            version = as_version(text)
            if version is not None:
                tags[name.removesuffix(_NOTE)] = version
        return tags

    def annotations(self, version: Version) -> dict[str, Any]:
        """What was added to the version's metadata after its push."""
        return self._note(annotations_path(self._policy, version), {})

    def parameters(self, version: Version) -> Parameters:
        """The version's weights, whole.

        Raises:
            FileNotFoundError: it is not stored.
            Corrupt: they do not hold what was written.
        """
        path = version_path(self._policy, version)
        parameters = decode_parameters(self._view.read(path), path)
        _check_name(path, version, parameters.version)
        return parameters

    def state(self, version: Version) -> TrainerState:
        """The version's state, whole.

        Raises:
            FileNotFoundError: none is stored.
            Corrupt: it does not hold what was written.
        """
        path = state_path(self._policy, version)
        state = decode_state(self._view.read(path), path)
        _check_name(path, version, state.version)
        return state

    def resolve(self, ref: Ref) -> Version:
        """The version that a reference names.

        Raises:
            VersionNotFound: it names nothing.
            Corrupt: it is ``latest`` and no stored version is whole.
        """
        if ref == LATEST:
            newest, corrupt = self.newest_intact(None)
            if newest is None:
                raise corrupt or self.unknown_policy()
            return newest.version
        version = ref if isinstance(ref, Version) else as_version(ref)
        if version is None:
            return self._tagged(str(ref))
        self.require(version)
        return version

    def newest_intact(self, newer_than: Version | None) -> tuple[Parameters | None, Corrupt | None]:
        """The newest whole weights above the given version; with None, why the newest stored ones are not whole."""
        first_error: Corrupt | None = None
        for version in reversed(self.versions()):
            if newer_than is not None and version <= newer_than:
                break
            try:
                return self.parameters(version), None
            except Corrupt as error:
                self._report(error)
                first_error = first_error or error
        return None, first_error

    def newest_resumable(self) -> TrainerState | None:
        """The newest whole state with whole parameters; raises FileNotFoundError if they changed under the search."""
        listed, stored = self.states(), set(self.versions())
        for version in reversed(listed):
            if version not in stored:
                continue  # pruned, in part or since the listing
            try:
                state = self.state(version)
                self.parameters(version)
            except Corrupt as error:
                self._report(error)
            else:
                return state
        if self.states() != listed:
            raise FileNotFoundError(f"{self._policy}/states")
        return None

    def described(self) -> list[VersionInfo]:
        """The stored versions, ascending; those whose header is corrupt are left out."""
        tags: dict[Version, list[str]] = {}
        for tag, version in sorted(self.tags().items()):
            tags.setdefault(version, []).append(tag)
        states = set(self.states())
        infos = []
        for version in self.versions():
            try:
                header = self._header(version)
            except Corrupt as error:
                self._report(error)
                continue
            infos.append(
                VersionInfo(
                    policy=self._policy,
                    version=version,
                    tags=tuple(tags.get(version, ())),
                    created_at=header.created_at,
                    num_parameters=header.num_parameters,
                    nbytes=self._view.size(version_path(self._policy, version)),
                    has_state=version in states,
                    metadata={**header.metadata, **self.annotations(version)},
                )
            )
        return infos

    def _tagged(self, tag: str) -> Version:
        """The version with that tag; raises FileNotFoundError if the tag moved and the version was pruned meanwhile."""
        tags = self.tags()
        stored = self.versions()
        if tags.get(tag) in stored:
            return tags[tag]
        if self.tags() != tags:
            raise FileNotFoundError(tag_path(self._policy, tag))
        if not stored:
            raise self.unknown_policy()
        if tag in tags:
            raise unknown_version(self._policy, tags[tag], stored)
        raise unknown_tag(self._policy, tag, tags, stored)

    def _listed(self, folder: str) -> list[Version]:
        stems = (name.removesuffix(_ARRAYS) for name in self._view.names(folder) if name.endswith(_ARRAYS))
        return sorted(version for stem in stems if (version := parse_file_stem(stem)) is not None)

    def _note(self, path: str, default: _T) -> _T:
        """The JSON value at the path, of the default's type; the default if there is none or it is corrupt."""
        try:
            value = decode_note(self._view.read(path), path)
            if not isinstance(value, type(default)):
                raise Corrupt(f"{path}: holds {value!r}")
        except FileNotFoundError:
            return default
        except Corrupt as error:
            self._report(error)
            return default
        return value

    def _header(self, version: Version) -> StoredHeader:
        path = version_path(self._policy, version)
        data = self._view.read(path, HEADER_BYTES)
        if header_size(data) > len(data):
            data = self._view.read(path, header_size(data))
        header = decode_header(data, path)
        _check_name(path, version, header.version)
        return header


def _check_name(path: str, version: Version, held: Version) -> None:
    if held != version:
        raise Corrupt(f"{path}: holds version {held}")


def fence_path(policy: str) -> str:
    """Where the highest attempt that pushed is noted."""
    return f"{policy}/fence.json"


def version_path(policy: str, version: Version) -> str:
    """Where the version's weights are."""
    return f"{policy}/versions/{file_stem(version)}{_ARRAYS}"


def annotations_path(policy: str, version: Version) -> str:
    """Where the version's annotations are, once there are any."""
    return f"{policy}/versions/{file_stem(version)}{_NOTE}"


def state_path(policy: str, version: Version) -> str:
    """Where the version's state is."""
    return f"{policy}/states/{file_stem(version)}{_ARRAYS}"


def tag_path(policy: str, tag: str) -> str:
    """Where the tag's version is noted."""
    return f"{policy}/tags/{tag}{_NOTE}"


def belongings(policy: str, version: Version) -> list[str]:
    """What goes with a version, and must not pass to another of the same name."""
    return [annotations_path(policy, version), state_path(policy, version)]
