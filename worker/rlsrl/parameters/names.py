"""Names in a parameter store: which are allowed, and what a missing one is answered with.

Policies and tags become file names and object keys, so only what is safe in both is taken.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence

from rlsrl.data.version import Version
from rlsrl.parameters.protocols import VersionNotFound
from rlsrl.runtime.errors import did_you_mean

LATEST = "latest"
"""The reference to the newest version; no tag may have that name."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_RULE = "allowed are 1 to 63 of the characters A-Z a-z 0-9 _ . - with a letter or digit first"
_FILE = re.compile(r"([0-9]{6,})-([0-9]{12,})")


def check_policy(policy: str) -> str:
    """The name itself.

    Raises:
        ValueError: it cannot name a policy.
    """
    if not _NAME.fullmatch(policy):
        raise ValueError(f"policy name {policy!r}: {_RULE}")
    return policy


def check_tag(tag: str) -> str:
    """The name itself.

    Raises:
        ValueError: it cannot name a tag, because of its characters or because it already means a version.
    """
    if not _NAME.fullmatch(tag):
        raise ValueError(f"tag {tag!r}: {_RULE}")
    if tag == LATEST or as_version(tag) is not None:
        raise ValueError(f"tag {tag!r}: {LATEST!r} and texts like '2.1500' already name versions")
    return tag


def as_version(text: str) -> Version | None:
    """The version that the text spells, None if it spells none."""
    with contextlib.suppress(ValueError):
        return Version.parse(text)
    return None


def check_version(version: Version) -> Version:
    """The version itself.

    Raises:
        ValueError: attempt or step is negative.
    """
    if version.attempt < 0 or version.step < 0:
        raise ValueError(f"version {version}: attempt and step are 0 or more")
    return version


def file_stem(version: Version) -> str:
    """The version as a file name without suffix; sorts as the version does."""
    return f"{version.attempt:06d}-{version.step:012d}"


def parse_file_stem(stem: str) -> Version | None:
    """Read what ``file_stem`` wrote, None for anything else."""
    match = _FILE.fullmatch(stem)
    return Version(int(match[1]), int(match[2])) if match else None


def unknown_policy(policy: str, stored: Iterable[str]) -> VersionNotFound:
    """The error for a policy without versions."""
    names = sorted(stored)
    there = ", ".join(names) if names else "none"
    return VersionNotFound(f"no versions of policy {policy!r}; stored policies: {there}{did_you_mean(policy, names)}")


def unknown_version(policy: str, version: Version, stored: Sequence[Version]) -> VersionNotFound:
    """The error for a version that is not among the ``stored``, which ascend and are not empty."""
    nearest = min(stored, key=lambda there: (abs(there.attempt - version.attempt), abs(there.step - version.step)))
    return VersionNotFound(
        f"policy {policy!r} has no version {version}; stored: {_span(stored)} (nearest: {nearest})",
    )


def unknown_tag(policy: str, tag: str, tags: Iterable[str], stored: Sequence[Version]) -> VersionNotFound:
    """The error for a reference that is neither a version, nor ``latest``, nor one of the ``tags``."""
    names = sorted(tags)
    there = ", ".join(names) if names else "none"
    return VersionNotFound(
        f"policy {policy!r} has no version or tag {tag!r}; tags: {there}; versions: {_span(stored)}"
        f"{did_you_mean(tag, [*names, LATEST])}",
    )


def _span(stored: Sequence[Version]) -> str:
    if len(stored) <= 3:
        return ", ".join(map(str, stored))
    return f"{stored[0]} to {stored[-1]} ({len(stored)} versions)"
