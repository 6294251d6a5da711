"""Versioned weights: the records that acting and resuming need, and the protocols for carrying and storing them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version


class ParameterError(Exception):
    """A stored or received version is missing, damaged or refused. The text says which, and why."""


class VersionNotFound(ParameterError, LookupError):
    """The policy, version or tag does not exist; the text lists the existing ones."""


class VersionExists(ParameterError):
    """Versions are immutable, and this version was pushed before with other content."""


class StaleAttempt(ParameterError):
    """The push comes from a trainer gang that was replaced: a gang with a higher attempt has pushed."""


class NonFinite(ParameterError, ValueError):
    """A weight or statistic is NaN or infinite. Such a version is never published."""


class Corrupt(ParameterError):
    """Stored or received bytes differ from what was written; the text names the file or version."""


class SourceTimeout(ParameterError, TimeoutError):
    """The deadline passed. The call can be repeated."""


class SourceClosed(ParameterError):
    """``close`` was called. Waiting and later calls raise this."""


class SourceRefused(ParameterError):
    """The publisher or coordinator refused the reader; the text gives the reason."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parameters:
    """One version of a policy, as acting needs it."""

    version: Version
    vector: NDArray[np.float32]
    """All weights, flat, shape [P]; read-only."""
    layout: str
    """Digest of the weights' names, shapes and order. Programs of equal layout split the vector in the same way."""
    statistics: Arrays = field(default_factory=dict)
    """What actors need beside the weights, by path: statistics of the normaliser, such as ``observation/mean``, and
    scalars of the algorithm, such as ``acting/epsilon``. Empty if they need nothing."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerState:
    """The trainer's state at one version. Resuming needs it and the parameters of the same version."""

    version: Version
    arrays: Arrays
    """Optimizer moments, generator states and other arrays, by path."""
    values: Mapping[str, Any]
    """JSON values: counters, rate limiter, deduplication marks, ledger."""


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
    """True if a TrainerState of this version is stored, so that training can resume from it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: those of the push (env_steps, return_mean) and those added later (evaluations)."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """Where training resumes."""

    version: Version | None
    """The newest version whose weights and state are intact, or None."""
    unusable: Mapping[Version, str]
    """Why training cannot resume from each newer version, the newest first."""

    @property
    def lost_steps(self) -> int:
        """Training steps between this version and the newest one."""
        if not self.unusable:
            return 0
        newest = next(iter(self.unusable))
        return max(0, newest.step - (0 if self.version is None else self.version.step))


Ref = Version | Literal["latest"] | str
"""A version, ``"latest"``, a tag, or a version's text (``"2.1500"``)."""


class ParameterSource(Protocol):
    """An actor's end of live weights: the newest version, whatever transport carries it.

    One thread uses it; any thread may call ``close``. It reconnects when the publisher restarts. Versions never move
    back.
    """

    def description(self, timeout: float) -> dict[str, Any]:
        """Return the publisher's description. Wait for a publisher up to ``timeout`` seconds; ``close`` ends the wait.

        Raises:
            SourceTimeout, SourceClosed, SourceRefused: see each.
        """

    def get(self, newer_than: Version | None = None) -> Parameters | None:
        """Return the newest parameters; None if there are none yet, or none newer than ``newer_than``. Never waits.

        Raises:
            SourceClosed, SourceRefused: see each.
            Corrupt: the received bytes are not those that were published.
        """

    def wait(self, min_version: Version, timeout: float) -> Parameters:
        """Wait for ``min_version`` or a newer version, up to ``timeout`` seconds; return the newest parameters.

        Woken by a new version, by ``close``, or by the timeout.

        Raises:
            SourceTimeout, SourceClosed, SourceRefused: see each.
            Corrupt: the received bytes are not those that were published.
        """

    def close(self) -> None:
        """Wake waiting calls and release all resources. Idempotent."""


class ParameterPublisher(Protocol):
    """The trainer's end of live weights; a ``ParameterSource`` is the other end. One thread publishes."""

    def publish(self, parameters: Parameters) -> None:
        """Make these the newest parameters. Never waits for a reader. The arrays must not change afterwards.

        Raises:
            NonFinite: a weight or statistic is NaN or infinite. The previous version stays the newest.
            ValueError: the version is not newer than the previous one.
            StaleAttempt: a gang with a higher attempt has replaced this one.
            SourceClosed: ``close`` was called.
            ParameterError: publishing has failed for good; the cause says why.
        """

    def close(self) -> None:
        """Stop publishing. Idempotent."""


class ParameterDB(Protocol):
    """Stores immutable versions. Any number of readers may read while a writer writes.

    A kill at any point leaves each version either stored, completely and durably, or absent.
    """

    def get(self, policy: str, ref: Ref = "latest", newer_than: Version | None = None) -> Parameters | None:
        """Return the named weights, complete and verified; None if ``newer_than`` is given and no version is newer.

        ``latest`` skips corrupt versions: it means the newest intact version.

        Raises:
            VersionNotFound: the reference names no stored version.
            Corrupt: an explicitly named version fails verification.
        """

    def push(
        self,
        policy: str,
        parameters: Parameters,
        *,
        tags: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        state: TrainerState | None = None,
    ) -> None:
        """Store a version durably: after the return it survives a loss of power. The same push may be repeated.

        ``state`` is stored as by ``save_state``, but before the version appears: from the version's first moment,
        training can resume from it.

        Raises:
            ValueError: the state belongs to another version.
            NonFinite, VersionExists, StaleAttempt: see each.
            OSError: the store failed (disk full, I/O error). What was stored before is unchanged.
        """

    def save_state(self, policy: str, state: TrainerState) -> None:
        """Store a trainer state durably, and remove all but the newest few states."""

    def load_state(self, policy: str, ref: Ref = "latest") -> TrainerState | None:
        """Return the version's state, or None if it has none.

        ``latest`` means the newest intact state whose version is intact, too.
        """

    def resume_point(self, policy: str) -> ResumePoint:
        """Return where training resumes, and why it cannot resume from newer versions. A policy may be missing."""

    def damage(self, policy: str) -> Mapping[Version, str]:
        """Return why stored versions, or their states, fail verification. Reads everything that the policy stores."""

    def tag(self, policy: str, ref: Ref, *tags: str) -> None:
        """Tag a version. Tagged versions are never pruned. A tag that exists moves to this version."""

    def annotate(self, policy: str, version: Version, metadata: Mapping[str, Any]) -> None:
        """Add JSON values to a version's metadata. Existing keys are replaced."""

    def versions(self, policy: str) -> list[VersionInfo]:
        """Return all stored versions, oldest first."""

    def prune(self, policy: str, *, keep_last: int) -> list[Version]:
        """Remove untagged versions except the newest ``keep_last``; return the removed ones.

        The versions that ``latest`` means for weights and for states are never removed.
        """

    def policies(self) -> list[str]:
        """Return the names of the stored policies."""

    def expect_end(self, seconds: float) -> None:
        """Prepare for the end of this process: a call to an absent service fails ``seconds`` from now at the latest.

        It has no effect on a store that this process reaches without a service.
        """
        del seconds
