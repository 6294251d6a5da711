"""Versioned weights: what acting needs, what resuming needs, and who keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version


class ParameterError(Exception):
    """Something about stored parameters failed."""


class VersionNotFound(ParameterError, LookupError):
    """No such policy, version or tag; the text names what there is."""


class VersionExists(ParameterError):
    """Versions are immutable: this one was pushed before with other content."""


class StaleAttempt(ParameterError):
    """The push comes from a trainer gang that has been succeeded: a higher attempt has pushed."""


class NonFinite(ParameterError, ValueError):
    """A weight or statistic is NaN or infinite; such a version is never published."""


class Corrupt(ParameterError):
    """A stored file does not hold what was written; the text names the file."""


class SourceTimeout(ParameterError, TimeoutError):
    """The deadline passed; the call can be made again."""


class SourceClosed(ParameterError):
    """This end was closed; raised by calls that were waiting and by later ones."""


class SourceRefused(ParameterError):
    """The publisher answered and said no; the text says why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parameters:
    """What acting needs of one version of a policy."""

    version: Version
    vector: NDArray[np.float32]
    """All weights, flat [P]; read-only."""
    layout: str
    """Digest of the weights' names, shapes and order: equal layouts read the vector alike."""
    statistics: Arrays = field(default_factory=dict)
    """Normaliser statistics by path, for example ``observation/mean``; empty without normalisation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerState:
    """What resuming needs beside the parameters of the same version."""

    version: Version
    arrays: Arrays
    """Optimizer moments, generator states and other arrays, by path."""
    values: Mapping[str, Any]
    """JSON values: counters, limiter, dedupe marks, ledger."""


@dataclass(frozen=True, kw_only=True)
class VersionInfo:
    """One stored version, without its weights."""

    policy: str
    version: Version
    tags: tuple[str, ...]
    created_at: float
    """Unix seconds."""
    num_parameters: int
    nbytes: int
    has_state: bool
    """Whether a TrainerState of this version is kept, so that training can resume from it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: what was known at the push (env_steps, return_mean) and what was added (evaluations)."""


Ref = Version | Literal["latest"] | str
"""A version, ``"latest"``, a tag, or a version's text (``"2.1500"``)."""


class ParameterReader(Protocol):
    """Gets weights. Any number of readers may read while a writer writes."""

    def get(self, policy: str, ref: Ref = "latest", newer_than: Version | None = None) -> Parameters | None:
        """The named weights, whole and verified; None if ``newer_than`` is given and nothing newer is there.

        ``latest`` skips a corrupt version and takes the one before it.

        Raises:
            VersionNotFound: nothing stored under that name.
            Corrupt: an explicitly named version fails verification.
        """

    def watch(self, policy: str, timeout: float) -> Iterator[Version]:
        """Versions as they appear, newest only; ends when none came for ``timeout`` seconds."""


class ParameterSource(Protocol):
    """The newest weights as a trainer publishes them, whatever carries them. One thread uses it, except ``close``.

    It finds the next publisher by itself when one dies. Versions never move back.
    """

    def description(self, timeout: float) -> dict[str, Any]:
        """What the publisher says of itself. Waits for a publisher up to ``timeout`` seconds; ended by ``close``.

        Raises:
            SourceTimeout, SourceClosed, SourceRefused: see each.
        """

    def get(self, newer_than: Version | None = None) -> Parameters | None:
        """The latest parameters; None if there are none, or none newer. Never waits for a publisher to make some.

        Raises:
            SourceClosed, SourceRefused: see each.
            Corrupt: what arrived is not what was published.
        """

    def wait(self, min_version: Version, timeout: float) -> Parameters:
        """The latest parameters as soon as they are of ``min_version`` or newer.

        Woken by a publication, by ``close``, or by the timeout in seconds.

        Raises:
            SourceTimeout, SourceClosed, SourceRefused: see each.
            Corrupt: what arrived is not what was published.
        """

    def close(self) -> None:
        """Wake whoever waits and let go of everything. Idempotent."""


class ParameterPublisher(Protocol):
    """The trainer's end of what a ``ParameterSource`` reads from. One thread publishes."""

    def publish(self, parameters: Parameters) -> None:
        """Make these the newest parameters; their arrays must not change afterwards. Never waits for a reader.

        Raises:
            NonFinite: a weight or statistic is NaN or infinite; the version before stays the newest.
            ValueError: the version is not newer than the one before.
            StaleAttempt: this gang has been succeeded.
            ParameterError: it is closed, or nobody can be reached this way any more.
        """

    def close(self) -> None:
        """Stop publishing. Idempotent."""


class ParameterDB(ParameterReader, Protocol):
    """Keeps immutable versions. Safe against any single kill: a version is there whole and for good, or not at all."""

    def push(
        self,
        policy: str,
        parameters: Parameters,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        state: TrainerState | None = None,
    ) -> None:
        """Store a version durably; returns when a power loss could no longer take it. Repeating the same push is fine.

        With its ``state``, as ``save_state`` stores it, there is no moment at which the version is there and training
        could not go on from it.

        Raises:
            ValueError: the state is of another version.
            NonFinite, VersionExists, StaleAttempt: see each.
            OSError: the store failed (disk full, I/O error); what was there before is untouched.
        """

    def save_state(self, policy: str, state: TrainerState) -> None:
        """Store durably what resuming at ``state.version`` needs; older states beyond the last few are removed."""

    def load_state(self, policy: str, ref: Ref = "latest") -> TrainerState | None:
        """The state of that version; for ``latest`` the newest that is intact and whose parameters are too."""

    def tag(self, policy: str, ref: Ref, *tags: str) -> None:
        """Name a version for good: a tagged version is never pruned. A tag given again moves."""

    def annotate(self, policy: str, version: Version, metadata: Mapping[str, Any]) -> None:
        """Add JSON values to a version's metadata; a key given again is replaced."""

    def versions(self, policy: str) -> list[VersionInfo]:
        """All stored versions, oldest first."""

    def query(self, policy: str, where: Mapping[str, Any]) -> list[VersionInfo]:
        """The versions whose metadata hold every given key with that value, oldest first."""

    def prune(self, policy: str, *, keep_last: int) -> list[Version]:
        """Remove untagged versions but the newest ``keep_last``; returns what went. ``latest`` never goes."""

    def policies(self) -> list[str]:
        """Names of the stored policies."""
