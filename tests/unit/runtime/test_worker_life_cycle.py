import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import structlog
from structlog.testing import capture_logs

from rlsrl.runtime.frequency import FrequencyControl
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.testing.clock import ManualClock

SOON = 10.0


class Scripted(Worker[str]):
    """Calls ``on_poll`` with itself at each poll and records its life-cycle events."""

    def __init__(
        self,
        on_poll: Callable[["Scripted"], PollResult | None] = lambda _: None,
        *,
        polls: int | None = None,
        clock: ManualClock | None = None,
        report: Callable[[Mapping[str, float]], None] | None = None,
        frequency: FrequencyControl | None = None,
        shutdown_error: BaseException | None = None,
    ) -> None:
        self.clock = clock or ManualClock()
        super().__init__(report=report, frequency=frequency, clock=self.clock)
        self.on_poll = on_poll
        self.polls = polls
        self.events: list[str] = []
        self.shutdown_error = shutdown_error

    @property
    def num_polls(self) -> int:
        return self.events.count("poll")

    def _configure(self, config: str) -> None:
        self.events.append(f"configure {config}")
        if config == "bad":
            raise ValueError("a bad config")

    def _poll(self) -> PollResult:
        self.events.append("poll")
        result = self.on_poll(self)
        if self.polls is not None and self.num_polls >= self.polls:
            self.exit()
        return result or PollResult()

    def _shutdown(self) -> None:
        self.events.append("shutdown")
        if self.shutdown_error is not None:
            raise self.shutdown_error

    def _stats(self) -> Mapping[str, float]:
        return {"polls": float(self.num_polls)}


def run_in_thread(worker: Worker[str]) -> "Future[None]":
    """Configure and run the worker in a new thread, like the main thread of a process."""

    def main() -> None:
        worker.configure("good")
        worker.run()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(main)
    pool.shutdown(wait=False)
    return future


def test_the_order_of_the_life_cycle() -> None:
    worker = Scripted(polls=3)
    assert (worker.is_running, worker.exiting) == (False, False)
    worker.configure("good")
    assert (worker.is_running, worker.exiting) == (False, False)
    worker.start()
    assert (worker.is_running, worker.exiting) == (True, False)
    worker.run()
    assert worker.events == ["configure good", "poll", "poll", "poll", "shutdown"]
    assert worker.exiting


def test_a_worker_that_is_not_started_waits() -> None:
    configured, polled = threading.Event(), threading.Event()

    class Announcing(Scripted):
        def _configure(self, config: str) -> None:
            super()._configure(config)
            configured.set()

    worker = Announcing(lambda _: polled.set(), polls=1)
    future = run_in_thread(worker)
    assert configured.wait(SOON)
    assert not polled.is_set()
    worker.start()
    future.result(SOON)
    assert polled.is_set()


def test_pause_is_obeyed_after_the_present_poll_and_start_ends_it() -> None:
    paused = threading.Event()

    def pause_once(worker: Scripted) -> None:
        if worker.num_polls == 2:
            worker.pause()
            paused.set()

    worker = Scripted(pause_once, polls=4)
    worker.start()
    future = run_in_thread(worker)
    assert paused.wait(SOON)
    assert not worker.is_running
    assert worker.num_polls == 2
    worker.start()
    future.result(SOON)
    assert worker.num_polls == 4


def test_exit_wakes_a_paused_worker() -> None:
    worker = Scripted()
    worker.pause()
    future = run_in_thread(worker)
    wait_until_blocked(worker)
    worker.exit()
    future.result(SOON)
    assert worker.events == ["configure good", "shutdown"]


def test_a_paused_worker_rests_until_it_goes_on() -> None:
    class Resting(Scripted):
        """Needs three rests until it has come to rest."""

        def _rest(self) -> bool:
            self.events.append("rest")
            num_rests = self.events.count("rest")
            if num_rests == 4:
                self.start()
            return num_rests >= 3

        def _adopt(self, config: str) -> None:
            self.events.append(f"adopt {config}")

    worker = Resting(lambda worker: worker.pause() if worker.num_polls == 1 else None, polls=2)
    worker.configure("good")
    worker.start()
    worker.adopt("new")
    worker.run(on_rest=lambda rests: worker.events.append(f"on_rest {rests}"))
    resting = ["rest", "rest", "rest", "on_rest True", "rest", "on_rest False"]
    assert worker.events == ["configure good", "adopt new", "poll", *resting, "poll", "shutdown"]


def test_a_paused_worker_takes_new_settings() -> None:
    adopted = threading.Event()

    class Adopting(Scripted):
        def _adopt(self, config: str) -> None:
            adopted.set()

    worker = Adopting()
    worker.pause()
    future = run_in_thread(worker)
    worker.adopt("new")
    try:
        assert adopted.wait(SOON)
    finally:
        worker.exit()
    future.result(SOON)


def test_commands_before_run_are_recorded() -> None:
    worker = Scripted()
    worker.start()
    worker.configure("good")
    worker.exit()
    worker.run()
    assert worker.events == ["configure good", "shutdown"]


def test_the_last_of_start_and_pause_counts() -> None:
    worker = Scripted()
    for command in (worker.start, worker.pause, worker.start, worker.pause):
        command()
    assert not worker.is_running
    worker.start()
    assert worker.is_running


def test_exit_before_configure_builds_nothing() -> None:
    worker = Scripted()
    worker.exit()
    worker.configure("good")
    worker.run()
    assert worker.events == []


def test_exit_is_for_good() -> None:
    worker = Scripted()
    worker.configure("good")
    worker.exit()
    worker.start()
    worker.run()
    assert worker.exiting
    assert worker.num_polls == 0


def test_exit_during_configure_is_obeyed() -> None:
    class Finished(Scripted):
        def _configure(self, config: str) -> None:
            super()._configure(config)
            self.exit()

    worker = Finished()
    worker.start()
    worker.configure("good")
    worker.run()
    assert worker.events == ["configure good", "shutdown"]


def test_a_failed_configure_is_not_shut_down() -> None:
    worker = Scripted()
    with pytest.raises(ValueError, match="a bad config"):
        worker.configure("bad")
    with pytest.raises(RuntimeError, match="not configured"):
        worker.run()
    assert worker.events == ["configure bad"]


def test_running_unconfigured_or_configuring_twice_is_an_error() -> None:
    worker = Scripted()
    with pytest.raises(RuntimeError, match="Scripted is not configured"):
        worker.run()
    worker.configure("good")
    with pytest.raises(RuntimeError, match="already configured"):
        worker.configure("good")


def test_a_failed_poll_is_raised_with_its_cause_after_shutdown() -> None:
    def fail(_: Scripted) -> None:
        raise ValueError("bad sample") from KeyError("reward")

    worker = Scripted(fail)
    worker.start()
    worker.configure("good")
    with pytest.raises(ValueError, match="bad sample") as raised:
        worker.run()
    assert isinstance(raised.value.__cause__, KeyError)
    assert worker.events == ["configure good", "poll", "shutdown"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_is_announced_between_the_last_poll_and_the_shutdown(fails: bool) -> None:
    def poll(_: Scripted) -> None:
        if fails:
            raise ValueError("bad sample")

    worker = Scripted(poll, polls=1)
    worker.start()
    worker.configure("good")
    with pytest.raises(ValueError, match="bad sample") if fails else nullcontext():
        worker.run(on_last_poll=lambda: worker.events.append("announced"))
    assert worker.events == ["configure good", "poll", "announced", "shutdown"]


def test_a_worker_runs_only_once() -> None:
    def fail(_: Scripted) -> None:
        raise ValueError("bad sample")

    for worker, end in ((Scripted(polls=1), None), (Scripted(fail), RuntimeError)):
        worker.start()
        worker.configure("good")
        with nullcontext() if end is None else pytest.raises(ValueError, match="bad sample"):
            worker.run()
        with nullcontext() if end is None else pytest.raises(end, match="not configured"):
            worker.run()
        assert worker.events == ["configure good", "poll", "shutdown"]


def test_the_first_failure_wins_and_notes_the_second() -> None:
    def fail(_: Scripted) -> None:
        raise ValueError("first")

    worker = Scripted(fail, shutdown_error=OSError("second"))
    worker.start()
    worker.configure("good")
    with capture_logs() as logs, pytest.raises(ValueError, match="first") as raised:
        worker.run()
    assert raised.value.__notes__ == ["shutting down failed as well: OSError('second')"]
    assert [entry["event"] for entry in logs] == ["shutdown_failed"]


def test_a_failed_shutdown_alone_is_raised() -> None:
    worker = Scripted(polls=1, shutdown_error=OSError("disk"))
    worker.start()
    worker.configure("good")
    with pytest.raises(OSError, match="disk"):
        worker.run()
    assert worker.events.count("shutdown") == 1


def test_a_failing_report_shuts_down_too() -> None:
    def refuse(_: Mapping[str, float]) -> None:
        raise ConnectionError("no coordinator")

    worker = Scripted(report=refuse, polls=1)
    worker.start()
    worker.configure("good")
    with pytest.raises(ConnectionError):
        worker.run()
    assert worker.events[-1] == "shutdown"


def test_statistics_come_at_their_frequency_and_at_the_end() -> None:
    clock = ManualClock()
    reports: list[Mapping[str, float]] = []

    def two_seconds(worker: Scripted) -> PollResult:
        clock.advance(2.0)
        return PollResult(num_samples=100, num_batches=1)

    worker = Scripted(
        two_seconds, polls=5, clock=clock, report=reports.append, frequency=FrequencyControl(steps=2, clock=clock)
    )
    worker.start()
    worker.configure("good")
    with capture_logs() as logs:
        worker.run()
    assert reports == [
        {"samples_per_second": 50.0, "batches_per_second": 0.5, "poll_seconds": 2.0, "polls": polls}
        for polls in (2.0, 4.0, 5.0)
    ]
    assert [entry for entry in logs if entry["event"] == "statistics"] == [
        {"event": "statistics", "log_level": "info", **report} for report in reports
    ]


def test_no_step_is_reported_twice_and_no_report_is_empty() -> None:
    reports: list[Mapping[str, float]] = []
    clock = ManualClock()
    frequency = FrequencyControl(steps=2, clock=clock)
    worker = Scripted(polls=2, clock=clock, report=reports.append, frequency=frequency)
    worker.start()
    worker.configure("good")
    worker.run()
    assert len(reports) == 1
    idle = Scripted(report=reports.append)
    idle.configure("good")
    idle.exit()
    idle.run()
    assert len(reports) == 1


def test_rates_exclude_paused_time() -> None:
    clock = ManualClock()
    reports: list[Mapping[str, float]] = []
    paused = threading.Event()

    def poll(worker: Scripted) -> PollResult:
        clock.advance(1.0)
        if worker.num_polls == 1:
            worker.pause()
            paused.set()
        return PollResult(num_samples=10, num_batches=1)

    worker = Scripted(poll, polls=2, clock=clock, report=reports.append, frequency=FrequencyControl(clock=clock))
    worker.start()
    future = run_in_thread(worker)
    assert paused.wait(SOON)
    wait_until_blocked(worker)
    clock.advance(1000.0)
    worker.start()
    future.result(SOON)
    assert reports == [{"samples_per_second": 10.0, "batches_per_second": 1.0, "poll_seconds": 1.0, "polls": 2.0}]


def test_rates_over_no_time_are_zero() -> None:
    reports: list[Mapping[str, float]] = []
    worker = Scripted(lambda _: PollResult(num_samples=5), polls=1, report=reports.append)
    worker.start()
    worker.configure("good")
    worker.run()
    assert reports[0]["samples_per_second"] == 0.0


def test_handles_may_be_overridden_to_wake_the_poll() -> None:
    woken = threading.Event()
    entered = threading.Event()

    class Waiting(Scripted):
        def exit(self) -> None:
            super().exit()
            woken.set()

    def wait(_: Scripted) -> None:
        entered.set()
        assert woken.wait(SOON)

    worker = Waiting(wait)
    worker.start()
    future = run_in_thread(worker)
    assert entered.wait(SOON)
    worker.exit()
    future.result(SOON)


def test_a_bound_logger_is_used() -> None:
    class Plain(Worker[str]):
        def _configure(self, config: str) -> None: ...

        def _poll(self) -> PollResult:
            self.exit()
            return PollResult()

    with capture_logs() as logs:
        worker = Plain(log=structlog.stdlib.get_logger().bind(role="actor", index=3))
        worker.start()
        worker.configure("good")
        worker.run()
    assert (logs[0]["role"], logs[0]["index"]) == ("actor", 3)


SIGNALLED = """
import signal
from rlsrl.runtime.worker import PollResult, Worker

class Quiet(Worker[str]):
    def _configure(self, config): print("configured", flush=True)
    def _poll(self): return PollResult()
    def _shutdown(self): print("shutdown", flush=True)

worker = Quiet()
signal.signal(signal.SIGTERM, lambda *_: worker.exit())
worker.configure("good")
worker.run()
"""


def test_a_signal_handler_may_call_exit_while_the_same_thread_is_paused() -> None:
    process = subprocess.Popen([sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "configured\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=SOON)
    assert (output, process.returncode) == ("shutdown\n", 0)


def wait_until_blocked(worker: Worker[str]) -> None:
    """Spin until a paused ``run`` has taken every command and waits for the next."""
    while not worker._commands.empty():
        pass
