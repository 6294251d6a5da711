"""Read one policy's blobs: versions, states, tags, annotations and the fence. ``database`` decides what is written.

Any read may raise FileNotFoundError if a prune removed a blob between listing and reading. A caller outside a change
then takes a new view and reads again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rlsrl.data.version import Version
from rlsrl.parameters.blobs import BlobView
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
from rlsrl.parameters.protocols import Corrupt, Parameters, Ref, ResumePoint, TrainerState, VersionInfo

_ARRAYS = ".safetensors"
_NOTE = ".json"
_T = TypeVar("_T")


class Contents:
    """One policy's content, as a view shows it."""

    def __init__(
        self, view: BlobView, policy: str, *, policies: Callable[[], list[str]], report: Callable[[Corrupt], None]
    ) -> None:
        """Read through ``view``.

        Args:
            view: the policy's blobs.
            policy: the policy's name.
            policies: returns the stored policies, for error texts.
            report: called with the error of each corrupt blob that is skipped.
        """
        self._view = view
        self._policy = policy
        self._policies = policies
        self._report = report

    def versions(self) -> list[Version]:
        """Return the stored versions, ascending, including corrupt ones."""
        return self._listed(f"{self._policy}/versions")

    def states(self) -> list[Version]:
        """Return the versions that have a state, ascending, including corrupt ones."""
        return self._listed(f"{self._policy}/states")

    def require(self, version: Version) -> None:
        """Check that the version is stored.

        Raises:
            VersionNotFound: the version is not stored; the text lists the stored ones.
        """
        stored = self.versions()
        if not stored:
            raise self.unknown_policy()
        if version not in stored:
            raise unknown_version(self._policy, version, stored)

    def unknown_policy(self) -> Exception:
        """Return the error for a policy without stored versions."""
        return unknown_policy(self._policy, self._policies())

    def highest_attempt(self) -> int:
        """Return the highest attempt that has pushed, -1 if none has."""
        recorded = self._note(fence_path(self._policy), -1)
        return max([recorded, *(version.attempt for version in self.versions())])

    def tags(self) -> dict[str, Version]:
        """Return the version that each tag names. The version may have been removed."""
        tags = {}
        for name in self._view.names(f"{self._policy}/tags"):
            text = self._note(f"{self._policy}/tags/{name}", "")
            version = as_version(text)
            if version is not None:
                tags[name.removesuffix(_NOTE)] = version
        return tags

    def annotations(self, version: Version) -> dict[str, Any]:
        """Return the metadata that was added to the version after its push."""
        return self._note(annotations_path(self._policy, version), {})

    def parameters(self, version: Version) -> Parameters:
        """Return the version's weights, complete and verified.

        Raises:
            FileNotFoundError: the version is not stored.
            Corrupt: the blob is not what was written.
        """
        path = version_path(self._policy, version)
        parameters = decode_parameters(self._view.read(path), path)
        _check_name(path, version, parameters.version)
        return parameters

    def state(self, version: Version) -> TrainerState:
        """Return the version's state, complete and verified.

        Raises:
            FileNotFoundError: the version has no state.
            Corrupt: the blob is not what was written.
        """
        path = state_path(self._policy, version)
        state = decode_state(self._view.read(path), path)
        _check_name(path, version, state.version)
        return state

    def resolve(self, ref: Ref) -> Version:
        """Return the version that a reference names.

        Raises:
            VersionNotFound: the reference names no stored version.
            Corrupt: the reference is ``latest``, and every stored version is corrupt.
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
        """Return the newest intact weights above ``newer_than``; without any, None and the newest version's error."""
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
        """Return the newest intact state whose version is intact, or None.

        Raises:
            FileNotFoundError: the states changed during the search.
        """
        listed, stored = self.states(), set(self.versions())
        for version in reversed(listed):
            if version not in stored:
                continue  # pruned since the listing, or its prune was interrupted
            try:
                state = self._resumable(version)
            except Corrupt as error:
                self._report(error)
            else:
                return state
        if self.states() != listed:
            raise FileNotFoundError(f"{self._policy}/states")
        return None

    def resume_point(self) -> ResumePoint:
        """Return where training resumes, and why it cannot resume from the newer versions.

        Raises:
            FileNotFoundError: the versions changed during the search.
        """
        states, stored = set(self.states()), set(self.versions())
        unusable: dict[Version, str] = {}
        for version in sorted(states | stored, reverse=True):
            if version not in stored:
                unusable[version] = f"{version_path(self._policy, version)} is missing"
            elif version not in states:
                unusable[version] = f"{state_path(self._policy, version)} is missing"
            else:
                try:
                    self._resumable(version)
                except Corrupt as error:
                    unusable[version] = f"{error}"
                else:
                    return ResumePoint(version=version, unusable=unusable)
        return ResumePoint(version=None, unusable=unusable if stored else {})

    def damage(self) -> dict[Version, str]:
        """Return why the weights or the state of a stored version fail verification. Reads everything.

        Raises:
            FileNotFoundError: the versions changed during the check.
        """
        damage: dict[Version, str] = {}
        states = set(self.states())
        for version in self.versions():
            try:
                self.parameters(version)
                if version in states:
                    self.state(version)
            except Corrupt as error:
                damage[version] = str(error)
        return damage

    def _resumable(self, version: Version) -> TrainerState:
        """Return the version's state; raise ``Corrupt`` or FileNotFoundError unless state and weights are intact."""
        state = self.state(version)
        self.parameters(version)
        return state

    def infos(self) -> list[VersionInfo]:
        """Return the stored versions' infos, ascending. Versions with a corrupt header are left out."""
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
        """Return the version with that tag.

        Raises:
            FileNotFoundError: the tag moved during the search.
            VersionNotFound: no stored version has the tag.
        """
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
        """Return the JSON value at the path; ``default`` if it is missing, corrupt, or of another type."""
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
        # A damaged size may be larger than any file.
        if len(data) < header_size(data) <= self._view.size(path):
            data = self._view.read(path, header_size(data))
        header = decode_header(data, path)
        _check_name(path, version, header.version)
        return header


def _check_name(path: str, version: Version, held: Version) -> None:
    if held != version:
        raise Corrupt(f"{path}: holds version {held}")


def fence_path(policy: str) -> str:
    """Return the path of the highest attempt that has pushed."""
    return f"{policy}/fence.json"


def version_path(policy: str, version: Version) -> str:
    """Return the path of the version's weights."""
    return f"{policy}/versions/{file_stem(version)}{_ARRAYS}"


def annotations_path(policy: str, version: Version) -> str:
    """Return the path of the version's annotations. The blob exists once there are any."""
    return f"{policy}/versions/{file_stem(version)}{_NOTE}"


def state_path(policy: str, version: Version) -> str:
    """Return the path of the version's state."""
    return f"{policy}/states/{file_stem(version)}{_ARRAYS}"


def tag_path(policy: str, tag: str) -> str:
    """Return the path of the tag; its blob holds the version."""
    return f"{policy}/tags/{tag}{_NOTE}"


def dependent_paths(policy: str, version: Version) -> list[str]:
    """Return the paths that are removed with a version. A later version of the same name must not inherit them."""
    return [annotations_path(policy, version), state_path(policy, version)]
