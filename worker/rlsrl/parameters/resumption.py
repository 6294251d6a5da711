"""What a run loses when it resumes, or why it cannot: for ``rlsrl run``, trainers and the coordinator. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from rlsrl.data.version import Version
from rlsrl.parameters.protocols import ResumePoint

BEGIN_ANEW = "`rlsrl run --fresh`, or `kubectl rlsrl retry --fresh NAME`, begins a new run and keeps the old files"
"""The last cure of a run that cannot resume."""
ROLLBACK = "rollback"
"""The text in the coordinator's status with which trainers report a ``Rollback``."""


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """A resumption from an older version than the newest, because training could not resume from the newer ones."""

    attempt: int
    """The attempt that resumed."""
    version: str
    """The version from which it resumed."""
    newest: str
    """The newest version."""
    reason: str
    """What is wrong with that version."""
    lost_steps: int
    """Training steps between the two versions."""

    @override
    def __str__(self) -> str:
        return (
            f"attempt {self.attempt} resumed from version {self.version}, since version {self.newest} cannot be used "
            f"({self.reason}): training steps lost: {self.lost_steps}"
        )


def rollback_of(point: ResumePoint, *, attempt: int) -> Rollback | None:
    """Return what the attempt that resumes at ``point`` loses; None if it loses nothing, or no version is intact."""
    if point.version is None or not point.unusable:
        return None
    newest, reason = next(iter(point.unusable.items()))
    return Rollback(
        attempt=attempt,
        version=str(point.version),
        newest=str(newest),
        reason=reason,
        lost_steps=point.lost_steps,
    )


def resumption_text(
    version: Version, *, env_steps: float | None = None, reached: float | None, reached_env_steps: float | None
) -> str:
    """Return the version from which training resumes, and the training steps after it that are known to be lost.

    Args:
        version: The version.
        env_steps: Env steps until that version. None: not said.
        reached: Training steps that the trainer which ended had last reported; it may have gone on after that, so the
            loss is a lower bound. None: nothing is known of lost steps.
        reached_env_steps: Env steps that it had last reported.
    """
    text = f"from version {version}" + _in_parentheses("", env_steps)
    lost = (reached or 0.0) - version.step
    if lost < 1:
        return text
    to = _in_parentheses("to ", reached_env_steps)
    return f"{text}; training steps lost after it: at least {lost:,.0f}{to}"


def _in_parentheses(preposition: str, env_steps: float | None) -> str:
    return "" if env_steps is None else f" ({preposition}{env_steps:,.0f} env steps)"


def nothing_to_resume(point: ResumePoint) -> str:
    """Return why a run that has trained cannot resume, since no stored version can be used."""
    found = "".join(f": {reason}" for reason in list(point.unusable.values())[:1])
    return (
        f"the run has trained, and no stored version is intact with its state{found}; restore the parameters, or give "
        f"them up: {BEGIN_ANEW}"
    )
