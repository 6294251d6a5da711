"""When the coordinator frees an index. The test moves the clock."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from prometheus_client import CollectorRegistry

from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.coordination import WorkerState
from rlsrl.runtime.identity import own_process
from rlsrl.runtime.ledger import PageRecord
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.clock import ManualClock
from rlsrl.workers.coordinator_service import SWEEP_SECONDS, CoordinatorService
from rlsrl.workers.coordinator_state import CoordinatorState
from rlsrl.workers.documents import DocumentFile
from rlsrl.workers.event_file import count_scalar_events
from rlsrl.workers.kept_logs import KeptLogs
from rlsrl.workers.kept_videos import KeptVideos
from rlsrl.workers.learning_curve import TENSORBOARD_FOLDER, LearningCurve
from rlsrl.workers.leases import Claim, Lease, Leases
from rlsrl.workers.ledger_copies import LedgerCopies
from rlsrl.workers.run_progress import JUDGE_SECONDS
from rlsrl.workers.stalls import STALL_SECONDS
from rlsrl.workers.status import SERVER_WAITS, ExperimentInfo, MemberReport
from rlsrl.workers.worker_messages import report_of

LEASE_SECONDS = 10.0

Check = Callable[[CoordinatorService, Leases, ManualClock], None]


@pytest.fixture
def watch(tmp_path: Path) -> Callable[[Check, str], None]:
    """Return a function that runs a check on a service with one actor, held by the named process."""

    async def run(check: Check, process: str) -> None:
        log, clock = structlog.stdlib.get_logger(), ManualClock()
        roster = Leases(lease_seconds=LEASE_SECONDS, capacity={"actor": 1, "trainer": 1})
        roster.lease(Claim(role="actor", instance="a", process=process), clock.monotonic())
        curve, metrics = LearningCurve(tmp_path, now=clock.time(), log=log), Metrics(CollectorRegistry())
        service = CoordinatorService(
            experiment=ExperimentInfo(
                name="e", run_uid="u", heartbeat_seconds=1.0, metrics_seconds=60.0, endpoints={}, done=False
            ),
            state=CoordinatorState(
                leases=roster,
                leases_document=DocumentFile(tmp_path / "roster.json"),
                copies=LedgerCopies(roster.capacity),
                copies_document=DocumentFile(tmp_path / "ledger.json"),
                log=log,
            ),
            curve=curve,
            logs=KeptLogs(tmp_path / "logs", log=log),
            videos=KeptVideos(tmp_path / "videos", curve, limit=None, metrics=metrics, log=log),
            settings={},
            pauses=lambda role, index: False,
            metrics=metrics,
            clock=clock,
            log=log,
        )
        check(service, roster, clock)
        curve.close()

    return lambda check, process: asyncio.run(run(check, process))


def sweep_for(seconds: float, service: CoordinatorService, clock: ManualClock) -> None:
    """Advance the clock, and sweep as often as ``run_sweeps`` does."""
    for _ in range(round(seconds / SWEEP_SECONDS)):
        clock.advance(SWEEP_SECONDS)
        service.sweep()


def test_silence_ends_a_lease(watch: Callable[[Check, str], None]) -> None:
    def check(service: CoordinatorService, roster: Leases, clock: ManualClock) -> None:
        sweep_for(LEASE_SECONDS, service, clock)
        assert roster.holder("a") is not None
        sweep_for(SWEEP_SECONDS, service, clock)
        assert roster.holder("a") is None

    watch(check, own_process())


def test_metrics_show_present_and_configured_workers(watch: Callable[[Check, str], None]) -> None:
    def check(service: CoordinatorService, roster: Leases, clock: ManualClock) -> None:
        def shown(name: str) -> float | None:
            return service._metrics.registry.get_sample_value(f"rlsrl_{name}", {"worker_role": "actor"})

        sweep_for(SWEEP_SECONDS, service, clock)
        assert (shown("workers"), shown("workers_wanted")) == (1, 1)
        assert shown("heartbeat_age_seconds") == SWEEP_SECONDS
        sweep_for(LEASE_SECONDS + SWEEP_SECONDS, service, clock)
        assert (shown("workers"), shown("workers_wanted")) == (0, 1)

    watch(check, own_process())


def test_an_edit_to_fewer_workers_counts_what_the_others_keep_as_evicted(watch: Callable[[Check, str], None]) -> None:
    def check(service: CoordinatorService, roster: Leases, clock: ManualClock) -> None:
        copies = service._state.copies
        kept = PageRecord(role="trainer", index=0, lives=1, keeps=True).count(in_buffer=7, produced=7)
        copies.put(kept)
        assert copies.ledger(["actor"])["in_buffer"] == 7
        with pytest.raises(StopIteration):  # it never waits
            service.adopt({}, {"actor": 1}, lambda role, index: False).send(None)
        ledger = copies.ledger(["actor"])
        assert (ledger["in_buffer"], ledger["dropped"]["evicted"]) == (0, 7)

    watch(check, own_process())


def test_a_run_that_stands_still_shows_in_the_metric_and_on_the_page(watch: Callable[[Check, str], None]) -> None:
    def check(service: CoordinatorService, roster: Leases, clock: ManualClock) -> None:
        def shown() -> float | None:
            return service._metrics.registry.get_sample_value("rlsrl_stalled_seconds")

        claim = Claim(role="trainer", instance="t", index=0)
        lease = roster.lease(claim, clock.monotonic())
        assert isinstance(lease, Lease)
        service._register(pb.Hello(role="trainer", instance="t"), claim, lease)
        sweep_for(STALL_SECONDS, service, clock)
        assert shown() == 0.0
        sweep_for(JUDGE_SECONDS + 2 * SWEEP_SECONDS, service, clock)
        assert (shown() or 0.0) > STALL_SECONDS
        now, copies = clock.monotonic(), service._state.copies
        page = service._progress.status(service._experiment, copies, now, capacity=roster.capacity)
        assert page["stall"]["reasons"] == [f"trainer-0 has not answered for {now:.0f} s"]

    watch(check, own_process())


def join_as_actor(service: CoordinatorService, roster: Leases, clock: ManualClock) -> Claim:
    """Register actor 0, as a process named a; return its claim."""
    claim = Claim(role="actor", instance="a", index=0)
    lease = roster.lease(claim, clock.monotonic())
    assert isinstance(lease, Lease)
    service._register(pb.Hello(role="actor", instance="a"), claim, lease)
    return claim


def test_a_pause_shows_in_the_metric_while_its_workers_are_there(
    watch: Callable[[Check, str], None],
) -> None:
    def check(service: CoordinatorService, roster: Leases, clock: ManualClock) -> None:
        def shown() -> float | None:
            return service._metrics.registry.get_sample_value("rlsrl_paused")

        claim = join_as_actor(service, roster, clock)
        for state in (WorkerState.RUNNING, WorkerState.PAUSED, WorkerState.RUNNING, WorkerState.PAUSED):
            roster.heartbeat("a", clock.monotonic())
            service._members.update(claim, MemberReport(state=state), clock.monotonic())
            sweep_for(JUDGE_SECONDS + SWEEP_SECONDS, service, clock)
            assert shown() == (state is WorkerState.PAUSED)
        sweep_for(LEASE_SECONDS + JUDGE_SECONDS, service, clock)
        assert shown() == 0.0

    watch(check, own_process())


def test_environments_that_wait_for_their_server_show_in_the_metric_while_their_worker_is_there(
    watch: Callable[[Check, str], None],
) -> None:
    def check(service: CoordinatorService, roster: Leases, clock: ManualClock) -> None:
        def shown() -> float | None:
            return service._metrics.registry.get_sample_value("rlsrl_environment_server_waits")

        claim = join_as_actor(service, roster, clock)
        for waits in (3.0, 0.0, 2.0):
            roster.heartbeat("a", clock.monotonic())
            service._members.update(claim, MemberReport(stats={SERVER_WAITS: waits}), clock.monotonic())
            sweep_for(JUDGE_SECONDS + SWEEP_SECONDS, service, clock)
            assert shown() == waits
        sweep_for(LEASE_SECONDS + JUDGE_SECONDS, service, clock)
        assert shown() == 0.0

    watch(check, own_process())


def test_a_frozen_coordinator_ends_no_lease(
    watch: Callable[[Check, str], None],
) -> None:
    def check(service: CoordinatorService, roster: Leases, clock: ManualClock) -> None:
        sweep_for(LEASE_SECONDS / 2, service, clock)
        clock.advance(100 * LEASE_SECONDS)
        service.sweep()
        sweep_for(LEASE_SECONDS, service, clock)
        assert roster.holder("a") is not None
        sweep_for(SWEEP_SECONDS, service, clock)
        assert roster.holder("a") is None

    watch(check, own_process())


def test_the_index_of_a_dead_process_is_free_at_once(watch: Callable[[Check, str], None]) -> None:
    def check(service: CoordinatorService, roster: Leases, clock: ManualClock) -> None:
        service.sweep()
        assert roster.holder("a") is None

    watch(check, own_process() + "0")


@pytest.mark.parametrize("disk", ["works", "is full"])
def test_the_workers_metrics_go_to_every_tracker_or_are_lost_and_counted(
    watch: Callable[[Check, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    def check(service: CoordinatorService, roster: Leases, clock: ManualClock) -> None:
        if disk == "is full":
            monkeypatch.setattr(service._curve._events, "_file", full)
        service._worker_metrics.put("actor", 0, {"speed": 2.0})
        sweep_for(60.0 - SWEEP_SECONDS, service, clock)
        assert not service.metrics_rows
        sweep_for(2 * SWEEP_SECONDS, service, clock)
        (row,) = service.metrics_rows
        assert (row.step, row.scalars) == (0, {"workers/actor/0/speed": 2.0})
        lost = service._metrics.registry.get_sample_value("rlsrl_worker_metrics_lost_total", {"tracker": "tensorboard"})
        assert lost == (1.0 if disk == "is full" else None)
        assert count_scalar_events(tmp_path / TENSORBOARD_FOLDER, but_for="other") == (0 if disk == "is full" else 1)
        monkeypatch.undo()

    with Path("/dev/full").open("wb", buffering=0) as full:
        watch(check, own_process())


def test_only_shares_of_an_activity_are_accepted() -> None:
    heartbeat = pb.Heartbeat(activity={"working": 0.5, "credit": float("nan"), "batch": 7.0, "samples": -0.1})
    assert report_of(heartbeat).activity == {"working": 0.5}


def test_long_texts_are_shortened() -> None:
    texts = report_of(pb.Heartbeat(texts={"a": "short", "b": "x" * 10_000})).texts
    assert texts["a"] == "short"
    assert len(texts["b"]) < 1024
