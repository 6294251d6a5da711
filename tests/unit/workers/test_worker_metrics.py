"""The workers' metrics become rows of scalars, a bounded number of them."""

from __future__ import annotations

from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.runtime.interval_metrics import MAX_INTERVAL_METRICS, MAX_NAME_LENGTH
from rlsrl.workers.worker_messages import metrics_of
from rlsrl.workers.worker_metrics import MAX_SHOWN_WORKERS, WorkerMetrics, WorkerMetricsRow, worker_scalars


def test_each_worker_of_a_small_role_has_series_of_its_own() -> None:
    metrics = {("actor", 0): {"speed": 1.0}, ("actor", 1): {"speed": 3.0}, ("trainer", 0): {"lag/x": 2.0}}
    assert worker_scalars(metrics, {"actor": MAX_SHOWN_WORKERS, "trainer": 1}) == {
        "workers/actor/0/speed": 1.0,
        "workers/actor/1/speed": 3.0,
        "workers/trainer/0/lag/x": 2.0,
    }


def test_a_role_of_many_workers_has_mean_min_and_max() -> None:
    metrics = {("actor", index): {"speed": float(index), "files": 1.0} for index in range(MAX_SHOWN_WORKERS + 1)}
    metrics["actor", 0] = {"speed": 17.0}
    metrics["trainer", 0] = {"speed": 5.0}
    assert worker_scalars(metrics, {"actor": MAX_SHOWN_WORKERS + 1, "trainer": 1}) == {
        "workers/actor/mean/speed": 9.0,
        "workers/actor/min/speed": 1.0,
        "workers/actor/max/speed": 17.0,
        "workers/actor/mean/files": 1.0,
        "workers/actor/min/files": 1.0,
        "workers/actor/max/files": 1.0,
        "workers/trainer/0/speed": 5.0,
    }


def test_the_names_of_a_large_role_stay_while_most_of_it_is_absent_or_superfluous() -> None:
    many = {("actor", index): {"speed": 2.0} for index in range(MAX_SHOWN_WORKERS + 1)}
    expected = {f"workers/actor/{kind}/speed": 2.0 for kind in ("mean", "min", "max")}
    assert worker_scalars({("actor", 0): {"speed": 2.0}}, {"actor": 1000}) == expected
    assert worker_scalars(many, {"actor": 1}) == expected


def test_a_row_has_the_newest_metrics_since_the_row_before() -> None:
    metrics = WorkerMetrics(seconds=60.0, now=100.0)
    metrics.put("actor", 0, {"speed": 1.0})
    metrics.put("actor", 0, {"speed": 2.0})
    metrics.put("actor", 1, {"speed": 5.0})
    assert metrics.due(159.5, {}) == {}
    assert metrics.due(160.0, {}) == {"workers/actor/0/speed": 2.0, "workers/actor/1/speed": 5.0}
    metrics.put("actor", 1, {"speed": 6.0})
    assert metrics.due(219.5, {}) == {}
    assert metrics.due(220.0, {}) == {"workers/actor/1/speed": 6.0}, "the silent worker has no value"
    assert metrics.due(280.0, {}) == {}


def test_no_row_is_ever_due_if_the_metrics_are_off() -> None:
    metrics = WorkerMetrics(seconds=0.0, now=0.0)
    metrics.put("actor", 0, {"speed": 1.0})
    assert metrics.due(1e6, {}) == {}


def test_a_row_is_one_line() -> None:
    row = WorkerMetricsRow(step=3, wall=1.5, scalars={"workers/actor/0/a\nb": 0.5})
    line = row.to_line()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert WorkerMetricsRow.from_line(line) == row


def test_what_no_worker_of_ours_sends_is_left_out() -> None:
    sent = {"a": 1.0, "nan": float("nan"), "inf": float("inf"), "x" * (MAX_NAME_LENGTH + 1): 1.0}
    assert metrics_of(pb.Heartbeat(metrics=sent)) == {"a": 1.0}
    flood = {str(number): 1.0 for number in range(2 * MAX_INTERVAL_METRICS)}
    assert len(metrics_of(pb.Heartbeat(metrics=flood))) == MAX_INTERVAL_METRICS
