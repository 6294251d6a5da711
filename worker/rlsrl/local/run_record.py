"""What a run knows of itself over all its lives: identity, attempts, time spent. Pure; the run folder stores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of time."""

    started_at: float
    """Unix seconds."""
    ended_at: float | None = None
    """Unix seconds; None while it lasts, and for ever if its owner was killed."""

    @property
    def seconds(self) -> float:
        """Its length; 0 while it is open, or if the clock was set back."""
        return 0.0 if self.ended_at is None else max(0.0, self.ended_at - self.started_at)

    def closed(self, at: float) -> Span:
        """The same, ended at that time if it was open, and not before it began."""
        return self if self.ended_at is not None else replace(self, ended_at=max(self.started_at, at))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run: from its first start over every resumption to its end."""

    run_uid: str
    """Unique on the machine; names the run's sockets."""
    created_at: float
    """Unix seconds."""
    package_version: str
    """Of the rlsrl that created the run."""
    attempt: int = 0
    """The trainer's lives so far: its fencing token. A number is used once."""
    lives: tuple[Span, ...] = ()
    """The controller's."""
    training: tuple[Span, ...] = ()
    """The trainer's, from the start of its process to its end."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """By role, over all lives."""
    modules: str = ""
    """The folder in which the last life looked for the user's own modules first; empty before any."""

    @property
    def wall_seconds(self) -> float:
        """Time the run has run, over all lives."""
        return sum(span.seconds for span in self.lives)

    @property
    def training_seconds(self) -> float:
        """Time a trainer process was there, its start-up included."""
        return sum(span.seconds for span in self.training)

    def begin_life(self, now: float, *, last_sign: float) -> Self:
        """A controller starts.

        Args:
            last_sign: When the run last left a trace; a life that was killed counts up to there.
        """
        lives = tuple(span.closed(last_sign) for span in self.lives)
        training = tuple(span.closed(last_sign) for span in self.training)
        return replace(self, lives=(*lives, Span(started_at=now)), training=training)

    def end_life(self, now: float) -> Self:
        """The controller ends, and nothing of the run is left running."""
        lives = tuple(span.closed(now) for span in self.lives)
        return replace(self, lives=lives, training=tuple(span.closed(now) for span in self.training))

    def begin_attempt(self, now: float) -> Self:
        """A trainer is about to start."""
        return replace(self, attempt=self.attempt + 1, training=(*self.training, Span(started_at=now)))

    def end_attempt(self, now: float) -> Self:
        """The trainer has ended."""
        return replace(self, training=tuple(span.closed(now) for span in self.training))

    def count_restart(self, role: str) -> Self:
        """A process of that role is started again."""
        return replace(self, restarts={**self.restarts, role: self.restarts.get(role, 0) + 1})

    def to_json(self) -> dict[str, Any]:
        """A JSON value that ``from_json`` reads back."""
        return {
            "run_uid": self.run_uid,
            "created_at": self.created_at,
            "package_version": self.package_version,
            "attempt": self.attempt,
            "lives": [[span.started_at, span.ended_at] for span in self.lives],
            "training": [[span.started_at, span.ended_at] for span in self.training],
            "restarts": dict(self.restarts),
            "modules": self.modules,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError: the value is no record.
        """
        return cls(
            run_uid=str(value["run_uid"]),
            created_at=float(value["created_at"]),
            package_version=str(value["package_version"]),
            attempt=int(value["attempt"]),
            lives=_spans(value["lives"]),
            training=_spans(value["training"]),
            restarts={str(role): int(count) for role, count in value["restarts"].items()},
            modules=str(value["modules"]),
        )


def _spans(value: Any) -> tuple[Span, ...]:
    return tuple(
        Span(started_at=float(started_at), ended_at=None if ended_at is None else float(ended_at))
        for started_at, ended_at in value
    )
