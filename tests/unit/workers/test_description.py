"""What workers learn before they work: the trainer's description of its policy, and the spaces of the environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rlsrl.api.spec import WorkerEnvironment
from rlsrl.parameters.protocols import ParameterSource, SourceTimeout
from rlsrl.runtime.errors import EnvironmentFailed
from rlsrl.runtime.join_session import JoinError
from rlsrl.testing.contexts import RecordingSession, make_context
from rlsrl.workers.build.common import await_description, spec_of_environments


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


def exits() -> None:
    raise SystemExit


@pytest.mark.parametrize("fails", [False, True])
def test_a_worker_waits_for_the_environment_whose_spaces_it_needs(tmp_path: Path, fails: bool) -> None:
    """If it hangs, the run stands still, and the wait says why."""
    session = RecordingSession()
    context = make_context("trainer", tmp_path, join_session=session)
    if fails:
        with pytest.raises(EnvironmentFailed, match="cannot be made: it raised SystemExit"):
            spec_of_environments(WorkerEnvironment(factory=f"{__name__}:exits"), context)
    else:
        assert spec_of_environments(WorkerEnvironment(id="CartPole-v1"), context).observation["observation"].shape == (
            4,
        )
    assert session.turns == ["environment", "working"]
