from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from rlsrl.data.version import Version
from rlsrl.runtime.ledger import LedgerError, PageRecord
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.contexts import RecordingSession, make_context


def test_waiting_is_counted_and_reported_meanwhile_even_if_it_fails(tmp_path: Path) -> None:
    clock, join_session = ManualClock(), RecordingSession()
    context = make_context("actor", tmp_path, join_session=join_session, clock=clock)
    with context.waiting("credit"):
        assert join_session.turns == ["credit"]
        clock.advance(2.0)
    assert join_session.turns == ["credit", "working"]
    with pytest.raises(ValueError, match="does not go back"), context.waiting("credit"):
        clock.advance(-1.0)
    assert join_session.turns[-1] == "working"
    assert b'rlsrl_waiting_seconds_total{reason="credit"} 2.0' in generate_latest(context.metrics.registry)


def test_a_version_is_reported_and_shown(tmp_path: Path) -> None:
    join_session = RecordingSession()
    context = make_context("trainer", tmp_path, join_session=join_session)
    context.report_version(Version(3, 14))
    assert join_session.reported("version") == [Version(3, 14)]
    shown = generate_latest(context.metrics.registry)
    assert b"rlsrl_version_attempt 3.0" in shown
    assert b"rlsrl_version_step 14.0" in shown


def test_the_ledger_page_is_this_workers_own_and_is_reported(tmp_path: Path) -> None:
    context = make_context("actor", tmp_path / "ledger", index=2)
    with context.open_ledger_page() as page:
        page.update(produced=7)
        assert [path.name for path in (tmp_path / "ledger").iterdir()] == ["actor-2.page"]
        assert b'rlsrl_ledger_transitions{term="produced"} 7.0' in generate_latest(context.metrics.registry)
        with pytest.raises(LedgerError, match="another process writes"):
            make_context("actor", tmp_path / "ledger", index=2).open_ledger_page()


def test_a_lost_page_begins_on_the_copy(tmp_path: Path) -> None:
    copy = PageRecord(role="actor", index=2, incarnation=4, lives=5).count(produced=9)
    join_session = RecordingSession(ledger_copy=copy.encode())
    context = make_context("actor", tmp_path, index=2, incarnation=5, join_session=join_session)
    with context.open_ledger_page() as page:
        assert page.record == replace(copy, restored=True)
        assert join_session.page is page
