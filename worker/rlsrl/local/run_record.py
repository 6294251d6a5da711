"""A run's record over all its lives: identity, attempts, time spent. Pure; the run folder stores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from rlsrl.parameters.resumption import Rollback
from rlsrl.runtime.tracebacks import without_middle

MAX_FAILURE_CHARACTERS = 4000
"""Of a longer text about a failure, the middle is left out."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A period of time."""

    started_at: float
    """Unix seconds."""
    ended_at: float | None = None
    """Unix seconds; None while it lasts, and after its owner was killed."""

    @property
    def seconds(self) -> float:
        """Length in seconds; 0 while open, or if the clock was set back."""
        return 0.0 if self.ended_at is None else max(0.0, self.ended_at - self.started_at)

    def closed(self, at: float) -> Span:
        """Return the span closed at that time, at least at its start; unchanged if it is closed."""
        return self if self.ended_at is not None else replace(self, ended_at=max(self.started_at, at))


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, from its first start through every resumption to its end."""

    run_uid: str
    """Unique on the machine; names the run's sockets."""
    created_at: float
    """Unix seconds."""
    package_version: str
    """The version of rlsrl that created the run."""
    attempt: int = 0
    """The trainer's starts so far. The number is its fencing token and is used once."""
    lives: tuple[Span, ...] = ()
    """The lives of the controller."""
    training: tuple[Span, ...] = ()
    """The lives of the trainer, from the start of its process to its end."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Restarts by role, over all lives."""
    rollbacks: tuple[Rollback, ...] = ()
    """Resumptions from an older version than the newest, which was damaged, over all lives. The ledger's
    ``lost.rolled_back`` counts the transitions that any resumption lost, also from the newest version."""
    modules: str = ""
    """The folder from which the last life imported the user's modules first; empty before the first life."""
    failure: str = ""
    """Which worker's failure ended the last life, and why. Empty if none did; a new life clears it."""

    @property
    def was_killed(self) -> bool:
        """Whether the last life has no end. That is also so while it lasts: the folder's lock tells the two apart."""
        return bool(self.lives) and self.lives[-1].ended_at is None

    @property
    def wall_seconds(self) -> float:
        """Seconds of all lives together."""
        return sum(span.seconds for span in self.lives)

    @property
    def training_seconds(self) -> float:
        """Seconds with a trainer process, its start-up included."""
        return sum(span.seconds for span in self.training)

    def begin_life(self, now: float, *, last_sign: float) -> Self:
        """Return the record after the start of a controller.

        Args:
            last_sign: Time of the run's last write. A killed life counts until then.
        """
        lives = tuple(span.closed(last_sign) for span in self.lives)
        training = tuple(span.closed(last_sign) for span in self.training)
        return replace(self, lives=(*lives, Span(started_at=now)), training=training, failure="")

    def end_life(self, now: float, *, failure: str = "") -> Self:
        """Return the record after the end of the controller and all workers. See ``failure``."""
        lives = tuple(span.closed(now) for span in self.lives)
        training = tuple(span.closed(now) for span in self.training)
        return replace(self, lives=lives, training=training, failure=without_middle(failure, MAX_FAILURE_CHARACTERS))

    def begin_attempt(self, now: float) -> Self:
        """Return the record of a trainer that is about to start, with a new attempt."""
        return replace(self, attempt=self.attempt + 1, training=(*self.training, Span(started_at=now)))

    def end_attempt(self, now: float) -> Self:
        """Return the record after the end of the trainer."""
        return replace(self, training=tuple(span.closed(now) for span in self.training))

    def count_restart(self, role: str) -> Self:
        """A process of that role is started again."""
        return replace(self, restarts={**self.restarts, role: self.restarts.get(role, 0) + 1})

    def roll_back(self, rollback: Rollback) -> Self:
        """Return the record after a resumption from an older version than the newest."""
        return replace(self, rollbacks=(*self.rollbacks, rollback))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that ``from_json`` reads."""
        return {
            "run_uid": self.run_uid,
            "created_at": self.created_at,
            "package_version": self.package_version,
            "attempt": self.attempt,
            "lives": [[span.started_at, span.ended_at] for span in self.lives],
            "training": [[span.started_at, span.ended_at] for span in self.training],
            "restarts": dict(self.restarts),
            "rollbacks": [asdict(rollback) for rollback in self.rollbacks],
            "modules": self.modules,
            "failure": self.failure,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the record in a value of ``to_json``.

        Raises:
            KeyError, TypeError, ValueError: the value is not a record.
        """
        return cls(
            run_uid=str(value["run_uid"]),
            created_at=float(value["created_at"]),
            package_version=str(value["package_version"]),
            attempt=int(value["attempt"]),
            lives=_spans(value["lives"]),
            training=_spans(value["training"]),
            restarts={str(role): int(count) for role, count in value["restarts"].items()},
            # Records of earlier versions of rlsrl lack this key and the last one.
            rollbacks=tuple(Rollback(**rollback) for rollback in value.get("rollbacks", ())),
            modules=str(value["modules"]),
            failure=str(value.get("failure", "")),
        )


def _spans(value: Any) -> tuple[Span, ...]:
    return tuple(
        Span(started_at=float(started_at), ended_at=None if ended_at is None else float(ended_at))
        for started_at, ended_at in value
    )
