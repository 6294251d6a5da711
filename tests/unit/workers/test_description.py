"""Waiting for a trainer's word on its policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rlsrl.parameters.protocols import ParameterSource, SourceTimeout
from rlsrl.runtime.join_session import JoinError
from rlsrl.testing.contexts import RecordingSession, make_context
from rlsrl.workers.build.common import await_description


class Silent:
    """Weights of a trainer that never speaks."""

    def description(self, timeout: float) -> dict[str, Any]:
        raise SourceTimeout(f"nothing in {timeout} s")


class Lost(RecordingSession):
    """A place in the roster that is lost at the third look."""

    looks = 0

    def check(self) -> None:
        self.looks += 1
        if self.looks == 3:
            raise JoinError("the place is another's")


def test_a_worker_whose_session_ended_stops_waiting(tmp_path: Path) -> None:
    context = make_context("policy", tmp_path, join_session=Lost())
    with pytest.raises(JoinError, match="another's"):
        await_description(cast("ParameterSource", Silent()), context, still_wanted=lambda: True)


def test_a_worker_that_is_asked_to_exit_gets_no_description(tmp_path: Path) -> None:
    wanted = iter([True, True, False])
    context = make_context("policy", tmp_path)
    assert await_description(cast("ParameterSource", Silent()), context, still_wanted=lambda: next(wanted)) is None
