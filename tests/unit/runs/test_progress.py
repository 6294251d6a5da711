"""What a program that follows a run gets, and how the rows that it logs reach the coordinator."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

import rlsrl
from rlsrl.api.spec import Stop
from rlsrl.local.view import RunView
from rlsrl.runs.progress import MAX_ROWS_A_MESSAGE, RunWatch
from rlsrl.runtime.coordination import CoordinatorClient, CoordinatorUnavailable, ProgramRow


class Client:
    """A coordinator that takes rows while ``is_there``."""

    def __init__(self) -> None:
        self.is_there = True
        self.messages: list[list[int]] = []
        self.instances: set[str] = set()

    def add_rows(self, instance: str, rows: Sequence[ProgramRow], timeout: float) -> None:
        if not self.is_there:
            raise CoordinatorUnavailable("gone")
        self.instances.add(instance)
        self.messages.append([row.sequence for row in rows])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "resolved.json").write_text("{}")
    return tmp_path


def view(at: float = 12.0, **totals: Any) -> RunView:
    return RunView(
        name="toy",
        stop=Stop(env_steps=100, return_mean=475.0),
        elapsed_seconds=at,
        processes=(),
        status={"totals": totals},
        status_age_seconds=0.0,
    )


def looks(watch: RunWatch, client: Client, *views: RunView) -> list[bool]:
    return [watch.look(each, cast("CoordinatorClient", client)) for each in views]


def test_the_function_gets_each_new_status_with_numbers(folder: Path) -> None:
    seen: list[rlsrl.TrainingProgress] = []
    watch = RunWatch(folder, seen.append)
    first = view(env_steps=20.0, train_steps=2.0, env_steps_per_second=8.0, version="1.2")
    soon, later = (
        view(12.5, env_steps=30.0),
        view(13.0, env_steps=40.0, train_steps=4.0, return_mean=9.5, env_steps_per_second=None),
    )
    assert looks(watch, Client(), view(env_steps=None), first, first, soon, later) == [False] * 5
    assert [(each.env_steps, each.train_steps, each.return_mean) for each in seen] == [(20, 2, None), (40, 4, 9.5)]
    assert [(each.seconds, each.seconds_left) for each in seen] == [(12.0, 10.0), (13.0, None)]
    assert [each.version for each in seen] == ["1.2", None]
    assert seen[0].run.path == folder


def test_rows_are_sent_again_until_the_coordinator_has_stored_them(folder: Path) -> None:
    def log_many(progress: rlsrl.TrainingProgress) -> None:
        for _ in range(MAX_ROWS_A_MESSAGE):
            progress.log({"score": 1})

    watch, client = RunWatch(folder, log_many), Client()
    client.is_there = False
    looks(watch, client, view(env_steps=1))
    looks(watch, client, view(13.0, env_steps=2))
    assert watch.num_unsent == 2 * MAX_ROWS_A_MESSAGE
    client.is_there = True
    looks(watch, client, view(env_steps=None))
    assert [(message[0], message[-1]) for message in client.messages] == [(0, 255), (256, 511)]
    assert len(client.instances) == 1
    assert not watch.num_unsent


def log(metrics: dict[Any, Any]) -> Callable[[rlsrl.TrainingProgress], object]:
    return lambda progress: progress.log(metrics)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"": 1.0}, "the name of a metric has 1 to 196 characters, not 0: ''"),
        ({"x" * 197: 1.0}, "the name of a metric has 1 to 196 characters, not 197"),
        ({"\ud800": 1.0}, "'utf-8' codec can't encode"),
        ({"score": "5"}, "the value of the metric 'score' is '5'; it must be a number"),
        ({"score": None}, "float() argument must be"),
        ({5: 1.0}, "object of type 'int' has no len()"),
    ],
)
def test_metrics_that_are_none_end_the_run_with_their_error(folder: Path, metrics: dict[Any, Any], reason: str) -> None:
    watch = RunWatch(folder, log(metrics))
    assert looks(watch, Client(), view(env_steps=1)) == [True]
    assert isinstance(watch.error, ValueError | TypeError)
    assert str(watch.error).startswith(reason)
    assert not watch.num_unsent


def test_after_the_function_has_returned_nothing_is_taken(folder: Path) -> None:
    kept: list[rlsrl.TrainingProgress] = []
    looks(RunWatch(folder, kept.append), Client(), view(env_steps=1))
    for late in (lambda: kept[0].log({"score": 1.0}), kept[0].stop):
        with pytest.raises(RuntimeError, match="on_progress has returned"):
            late()


def test_ctrl_c_interrupts_the_function(folder: Path) -> None:
    def wait(_: rlsrl.TrainingProgress) -> None:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it is interrupted before")

    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        watch = RunWatch(folder, wait)
        assert looks(watch, Client(), view(env_steps=1)) == [True]
        assert isinstance(watch.error, KeyboardInterrupt)
        signal.raise_signal(signal.SIGINT)  # the handler is back
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_exit_of_the_program_ends_the_run_cleanly_first(folder: Path) -> None:
    def leave(_: rlsrl.TrainingProgress) -> None:
        raise SystemExit(3)

    watch = RunWatch(folder, leave)
    assert looks(watch, Client(), view(env_steps=1)) == [True]
    assert isinstance(watch.error, SystemExit)
