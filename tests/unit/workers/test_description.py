"""Waiting for the trainer's description of its policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rlsrl.parameters.protocols import ParameterSource, SourceTimeout
from rlsrl.runtime.join_session import JoinError
from rlsrl.testing.contexts import RecordingSession, make_context
from rlsrl.workers.build.common import await_description


class SilentSource:
    """A parameter source whose trainer never answers."""

    def description(self, timeout: float) -> dict[str, Any]:
        raise SourceTimeout(f"nothing in {timeout} s")


class EndedSession(RecordingSession):
    """A join session that ends at its third check."""

    num_checks = 0

    def check(self) -> None:
        self.num_checks += 1
        if self.num_checks == 3:
            raise JoinError("another process holds the lease")


def test_a_worker_whose_session_ended_stops_waiting(tmp_path: Path) -> None:
    context = make_context("policy", tmp_path, join_session=EndedSession())
    with pytest.raises(JoinError, match="another process holds the lease"):
        await_description(cast("ParameterSource", SilentSource()), context, still_wanted=lambda: True)


def test_a_worker_that_is_asked_to_exit_gets_no_description(tmp_path: Path) -> None:
    wanted = iter([True, True, False])
    context = make_context("policy", tmp_path)
    assert (
        await_description(cast("ParameterSource", SilentSource()), context, still_wanted=lambda: next(wanted)) is None
    )
