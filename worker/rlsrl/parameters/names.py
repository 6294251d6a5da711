"""Names in a parameter store: the allowed ones, and the errors about missing ones.

Names of policies and tags become file names and object keys, so only characters that are safe in both are allowed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence

from rlsrl.data.version import Version
from rlsrl.parameters.protocols import VersionNotFound
from rlsrl.runtime.errors import did_you_mean

LATEST = "latest"
"""The reference to the newest version. No tag may have this name."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_RULE = "allowed are 1 to 63 of the characters A-Z a-z 0-9 _ . - with a letter or digit first"
_FILE = re.compile(r"([0-9]{6,})-([0-9]{12,})")


def check_policy(policy: str) -> str:
    """Return the policy's name, after a check.

    Raises:
        ValueError: the name is invalid; the text gives the rule.
    """
    if not _NAME.fullmatch(policy):
        raise ValueError(f"policy name {policy!r}: {_RULE}")
    return policy


def check_tag(tag: str) -> str:
    """Return the tag, after a check.

    Raises:
        ValueError: the tag contains a character that is not allowed, or means a version already.
    """
    if not _NAME.fullmatch(tag):
        raise ValueError(f"tag {tag!r}: {_RULE}")
    if tag == LATEST or as_version(tag) is not None:
        raise ValueError(f"tag {tag!r}: {LATEST!r} and texts like '2.1500' already name versions")
    return tag


def as_version(text: str) -> Version | None:
    """Return the version that the text spells, such as ``2.1500``; None for any other text."""
    with contextlib.suppress(ValueError):
        return Version.parse(text)
    return None


def check_version(version: Version) -> Version:
    """Return the version, after a check.

    Raises:
        ValueError: attempt or step is negative.
    """
    if version.attempt < 0 or version.step < 0:
        raise ValueError(f"version {version}: attempt and step are 0 or more")
    return version


def file_stem(version: Version) -> str:
    """Return the version as a file name without suffix. File names sort in the order of their versions."""
    return f"{version.attempt:06d}-{version.step:012d}"


def parse_file_stem(stem: str) -> Version | None:
    """Return the version that ``file_stem`` wrote; None for any other text."""
    match = _FILE.fullmatch(stem)
    return Version(int(match[1]), int(match[2])) if match else None


def unknown_policy(policy: str, stored: Iterable[str]) -> VersionNotFound:
    """Return the error for a policy without versions."""
    names = sorted(stored)
    listed = ", ".join(names) if names else "none"
    return VersionNotFound(f"no versions of policy {policy!r}; stored policies: {listed}{did_you_mean(policy, names)}")


def unknown_version(policy: str, version: Version, stored: Sequence[Version]) -> VersionNotFound:
    """Return the error for a version that is not stored. ``stored`` ascends and is not empty."""
    nearest = min(stored, key=lambda each: (abs(each.attempt - version.attempt), abs(each.step - version.step)))
    return VersionNotFound(
        f"policy {policy!r} has no version {version}; stored: {_span(stored)} (nearest: {nearest})",
    )


def unknown_tag(policy: str, tag: str, tags: Iterable[str], stored: Sequence[Version]) -> VersionNotFound:
    """Return the error for a reference that is not a version, not ``latest`` and none of the ``tags``."""
    names = sorted(tags)
    listed = ", ".join(names) if names else "none"
    return VersionNotFound(
        f"policy {policy!r} has no version or tag {tag!r}; tags: {listed}; versions: {_span(stored)}"
        f"{did_you_mean(tag, [*names, LATEST])}",
    )


def _span(stored: Sequence[Version]) -> str:
    if len(stored) <= 3:
        return ", ".join(map(str, stored))
    return f"{stored[0]} to {stored[-1]} ({len(stored)} versions)"
