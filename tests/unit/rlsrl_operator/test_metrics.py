"""The operator's metrics, over real HTTP and with a real queue."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from rlsrl.api.status import ExperimentStatus
from rlsrl_operator.keyed_queue import KeyedQueue
from rlsrl_operator.metrics import OperatorMetrics, serving

DEADLINE_SECONDS = 20


@pytest.fixture
def metrics() -> OperatorMetrics:
    return OperatorMetrics(CollectorRegistry())


def value(metrics: OperatorMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_every_metric_has_the_prefix_and_a_sentence(metrics: OperatorMetrics) -> None:
    families = [each for each in metrics.registry.collect() if not each.name.startswith("process_")]
    assert len(families) == 9
    for family in families:
        assert family.name.startswith(("rlsrl_operator_", "rlsrl_experiment_"))
        assert family.documentation.endswith(".")


def test_passes_are_counted_by_outcome(metrics: OperatorMetrics) -> None:
    async def look(key: str) -> float | None:
        if key == "bad":
            raise RuntimeError("no")
        return 3.0

    async def test() -> None:
        measured = metrics.measured(look)
        assert value(metrics, "rlsrl_operator_reconciles_total", outcome="failed") == 0
        with pytest.raises(RuntimeError):
            await measured("bad")
        assert value(metrics, "rlsrl_operator_last_success_timestamp_seconds") == 0
        assert await measured("good") == 3.0

    asyncio.run(test())
    assert value(metrics, "rlsrl_operator_reconciles_total", outcome="failed") == 1
    assert value(metrics, "rlsrl_operator_reconciles_total", outcome="succeeded") == 1
    assert value(metrics, "rlsrl_operator_reconcile_seconds_count") == 2
    assert (value(metrics, "rlsrl_operator_last_success_timestamp_seconds") or 0) > 1_700_000_000


def test_the_queue_is_shown_as_it_is(metrics: OperatorMetrics) -> None:
    gate, begun, failing = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work(key: str) -> float | None:
        begun.set()
        await gate.wait()
        if key == "a":
            failing.set()
            raise RuntimeError("no")
        return None

    def shown() -> tuple[float | None, float | None, bool]:
        age = value(metrics, "rlsrl_operator_oldest_key_seconds") or 0.0
        length, bad = (value(metrics, f"rlsrl_operator_{name}") for name in ("queue_length", "failing_experiments"))
        return length, bad, age > 0

    async def test() -> None:
        queue = KeyedQueue(work, num_workers=1)
        metrics.watch(queue)
        assert shown() == (0, 0, False)
        for key in ("a", "b", "c"):
            queue.add(key)
        assert shown() == (3, 0, True)
        task = asyncio.create_task(queue.run())
        await begun.wait()
        assert shown() == (2, 0, True)
        gate.set()
        await failing.wait()
        while queue.length or queue.oldest_seconds:
            await asyncio.sleep(0)
        assert shown() == (0, 1, False), "a waits for its next try, and no worker has it until then"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(test(), DEADLINE_SECONDS))


def test_an_experiment_is_in_one_phase_until_it_is_gone(metrics: OperatorMetrics) -> None:
    def phases() -> dict[tuple[str, str, str], float]:
        family = next(each for each in metrics.registry.collect() if each.name == "rlsrl_experiment_phase")
        return {tuple(each.labels.values()): each.value for each in family.samples}  # type: ignore[misc]

    assert phases() == {}
    metrics.experiments.set_status("lab", "a", ExperimentStatus())
    metrics.experiments.set_status("lab", "b", ExperimentStatus(phase="Starting"))
    metrics.experiments.set_status("lab", "b", ExperimentStatus(phase="Running", restarts=2))
    assert phases() == {("lab", "a", "Pending"): 1, ("lab", "b", "Running"): 1}
    assert value(metrics, "rlsrl_experiment_gang_restarts_total", namespace="lab", experiment="b") == 2
    metrics.experiments.set_status("lab", "a", None)
    metrics.experiments.set_status("lab", "a", None)
    assert phases() == {("lab", "b", "Running"): 1}


def test_metrics_are_served_over_http(metrics: OperatorMetrics) -> None:
    async def test() -> str:
        metrics.count_write("Deployment", "apply")
        async with serving(metrics.registry, host="127.0.0.1", port=0) as port, aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/") as answer:
                assert answer.status == 404
            async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                assert answer.status == 200
                assert answer.headers["Content-Type"].startswith("text/plain")
                return await answer.text()

    families = {each.name: each for each in text_string_to_metric_families(asyncio.run(test()))}
    written = next(each for each in families["rlsrl_operator_api_writes"].samples if each.name.endswith("_total"))
    assert (written.labels, written.value) == ({"kind": "Deployment", "verb": "apply"}, 1)
    assert "process_resident_memory_bytes" in families
