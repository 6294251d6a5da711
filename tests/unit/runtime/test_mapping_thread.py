import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlsrl.runtime.mapping_thread import MappingThread, StageFailed
from rlsrl.runtime.pipe import Pipe, PipeClosed

SOON = 10.0
Stage = MappingThread[Any, Any]


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    """Return a list; the end of the test stops and joins the stages in it."""
    started: list[Stage] = []
    yield started
    for stage in started:
        stage.stop()
        stage.join(SOON)


def test_maps_in_order_until_upstream_is_closed(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(10)
    downstream: Pipe[str] = Pipe(10)
    stage = MappingThread("double", lambda item: str(2 * item), upstream_queue=upstream, downstream_queue=downstream)
    stages.append(stage)
    for item in (1, 2, 3):
        upstream.put(item)
    upstream.close()
    stage.start()
    assert [downstream.get(SOON) for _ in range(3)] == ["2", "4", "6"]
    with pytest.raises(PipeClosed):
        downstream.get(SOON)
    stage.join(SOON)
    assert not stage.is_alive()
    stage.check()


def test_a_result_of_none_is_not_passed_on(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(10)
    downstream: Pipe[int] = Pipe(10)
    stage = MappingThread(
        "odd", lambda item: item if item % 2 else None, upstream_queue=upstream, downstream_queue=downstream
    )
    stages.append(stage)
    stage.start()
    for item in (0, 1, 2, 3):
        upstream.put(item)
    assert [downstream.get(SOON), downstream.get(SOON)] == [1, 3], "0 is a result, None is not"


def test_falsy_results_are_results(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(1)
    downstream: Pipe[int] = Pipe(1)
    stage = MappingThread("zero", lambda item: 0, upstream_queue=upstream, downstream_queue=downstream)
    stages.append(stage)
    stage.start()
    upstream.put(5)
    assert downstream.get(SOON) == 0


def test_a_sink_needs_no_downstream(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(1)
    seen: list[int] = []
    stage: Stage = MappingThread("sink", seen.append, upstream_queue=upstream)
    stages.append(stage)
    stage.start()
    for item in range(5):
        upstream.put(item, SOON)
    upstream.close()
    stage.join(SOON)
    assert seen == [0, 1, 2, 3, 4]


def test_the_thread_has_its_name(stages: list[Stage]) -> None:
    names: Pipe[str] = Pipe(1)
    upstream: Pipe[int] = Pipe(1)
    stage = MappingThread(
        "rollout", lambda _: threading.current_thread().name, upstream_queue=upstream, downstream_queue=names
    )
    stages.append(stage)
    assert not stage.is_alive()
    stage.start()
    assert stage.is_alive()
    upstream.put(0)
    assert names.get(SOON) == "rollout" == stage.name


def test_initializer_runs_once_in_the_thread_before_the_first_item(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(2)
    local = threading.local()
    calls: list[str] = []

    def initialize() -> None:
        local.device = "cuda:1"
        calls.append(threading.current_thread().name)

    downstream: Pipe[str] = Pipe(2)
    stage = MappingThread(
        "gpu",
        lambda _: str(local.device),
        upstream_queue=upstream,
        downstream_queue=downstream,
        initializer=initialize,
    )
    stages.append(stage)
    stage.start()
    upstream.put(0)
    upstream.put(0)
    assert [downstream.get(SOON), downstream.get(SOON)] == ["cuda:1", "cuda:1"]
    assert calls == ["gpu"]


def test_stop_interrupts_a_wait_for_an_item(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(1)
    stage: Stage = MappingThread("idle", print, upstream_queue=upstream)
    stages.append(stage)
    stage.start()
    wait_for_waiter(upstream, "_not_empty")
    stage.stop()
    stage.join(SOON)
    stage.check()


def test_stop_interrupts_a_wait_for_capacity(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(10)
    downstream: Pipe[int] = Pipe(1)
    downstream.put(-1)
    stage = MappingThread("full", lambda item: item, upstream_queue=upstream, downstream_queue=downstream)
    stages.append(stage)
    stage.start()
    for item in range(5):
        upstream.put(item)
    wait_for_waiter(downstream, "_not_full")
    stage.stop()
    stage.join(SOON)
    stage.check()
    assert downstream.get() == -1
    assert upstream.get() == 1, "what was still upstream stays there"


def test_stop_before_start_maps_nothing(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(1)
    upstream.put(1)
    seen: list[int] = []
    stage: Stage = MappingThread("never", seen.append, upstream_queue=upstream)
    stage.stop()
    stage.join(SOON)
    stage.start()
    stages.append(stage)
    stage.join(SOON)
    assert seen == []


def test_stop_does_not_pass_on_the_result_of_a_running_call(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(1)
    downstream: Pipe[int] = Pipe(1)
    entered, leave = threading.Event(), threading.Event()

    def block(item: int) -> int:
        entered.set()
        leave.wait(SOON)
        return item

    stage = MappingThread("busy", block, upstream_queue=upstream, downstream_queue=downstream)
    stages.append(stage)
    stage.start()
    upstream.put(1)
    assert entered.wait(SOON)
    stage.stop()
    with pytest.raises(TimeoutError, match="busy: the function did not return within"):
        stage.join(timeout=0)
    leave.set()
    stage.join(SOON)
    with pytest.raises(PipeClosed):
        downstream.get()


def raise_(error: BaseException) -> Callable[[Any], Any]:
    def raising(_: Any) -> Any:
        raise error

    return raising


@pytest.mark.parametrize(
    "error",
    [ValueError("bad batch"), queue.Empty(), PipeClosed("of another pipe"), TimeoutError("slow"), SystemExit(3)],
    ids=lambda error: type(error).__name__,
)
def test_the_functions_own_error_is_never_swallowed(stages: list[Stage], error: BaseException) -> None:
    upstream: Pipe[int] = Pipe(1)
    downstream: Pipe[int] = Pipe(1)
    stage = MappingThread("faulty", raise_(error), upstream_queue=upstream, downstream_queue=downstream)
    stages.append(stage)
    stage.start()
    stage.check()
    upstream.put(1)
    with pytest.raises(PipeClosed):
        downstream.get(SOON)
    with pytest.raises(PipeClosed):
        upstream.put(2, SOON)
    stage.join(SOON)
    for _ in range(2):
        with pytest.raises(StageFailed, match="stage faulty failed") as raised:
            stage.check()
        assert raised.value.__cause__ is error


def test_the_initializers_error_is_raised_by_check(stages: list[Stage]) -> None:
    def fail() -> None:
        raise RuntimeError("no such device")

    stage: Stage = MappingThread("gpu", print, upstream_queue=Pipe(1), initializer=fail)
    stages.append(stage)
    stage.start()
    stage.join(SOON)
    with pytest.raises(StageFailed) as raised:
        stage.check()
    assert str(raised.value.__cause__) == "no such device"


def test_one_failure_ends_the_whole_pipeline(stages: list[Stage]) -> None:
    pipes: list[Pipe[Any]] = [Pipe(1) for _ in range(4)]
    names = ("first", "second", "third")
    functions: list[Callable[[Any], Any]] = [lambda item: item, raise_(ValueError("here")), lambda item: item]
    for name, function, upstream, downstream in zip(names, functions, pipes, pipes[1:], strict=False):
        stages.append(MappingThread(name, function, upstream_queue=upstream, downstream_queue=downstream))
    for stage in stages:
        stage.start()

    def feed() -> None:
        for item in range(10):
            pipes[0].put(item, SOON)

    with pytest.raises(PipeClosed):
        feed()
    for stage in stages:
        stage.join(SOON)
    stages[0].check()
    stages[2].check()
    with pytest.raises(StageFailed, match="second"):
        stages[1].check()


def test_runtime_stages_import_no_torch() -> None:
    code = "import rlsrl.runtime.mapping_thread, rlsrl.runtime.worker, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def wait_for_waiter(pipe: Pipe[Any], condition: str) -> None:
    """Spin without sleeping until a thread waits on the condition."""
    watched = getattr(pipe, condition)
    while True:
        with watched:
            if watched._waiters:
                return
