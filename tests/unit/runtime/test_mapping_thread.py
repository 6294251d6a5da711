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
    """Return a list; the end of the test ends and joins the stages in it."""
    started: list[Stage] = []
    yield started
    for stage in started:
        stage._upstream.close()
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
    assert [downstream.get() for _ in range(3)] == ["2", "4", "6"]
    with pytest.raises(PipeClosed):
        downstream.get()
    stage.join(SOON)
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
    assert [downstream.get(), downstream.get()] == [1, 3], "0 is a result, None is not"


def test_falsy_results_are_results(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(1)
    downstream: Pipe[int] = Pipe(1)
    stage = MappingThread("zero", lambda item: 0, upstream_queue=upstream, downstream_queue=downstream)
    stages.append(stage)
    stage.start()
    upstream.put(5)
    assert downstream.get() == 0


def test_a_sink_needs_no_downstream(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(1)
    seen: list[int] = []
    stage: Stage = MappingThread("sink", seen.append, upstream_queue=upstream)
    stages.append(stage)
    stage.start()
    for item in range(5):
        upstream.put(item)
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
    stage.start()
    upstream.put(0)
    assert names.get() == "rollout"


def test_a_closed_downstream_ends_the_stage(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(10)
    downstream: Pipe[int] = Pipe(1)
    downstream.put(-1)
    stage = MappingThread("full", lambda item: item, upstream_queue=upstream, downstream_queue=downstream)
    stages.append(stage)
    stage.start()
    for item in range(5):
        upstream.put(item)
    wait_for_waiter(downstream, "_not_full")
    downstream.close()
    stage.join(SOON)
    stage.check()
    assert downstream.get() == -1
    assert upstream.get() == 1, "remaining upstream items stay there"


def test_join_before_the_start_returns_at_once() -> None:
    stage: Stage = MappingThread("never", print, upstream_queue=Pipe(1))
    stage.join(SOON)


def test_join_raises_while_the_function_runs(stages: list[Stage]) -> None:
    upstream: Pipe[int] = Pipe(1)
    entered, leave = threading.Event(), threading.Event()

    def block(_: int) -> None:
        entered.set()
        leave.wait(SOON)

    stage: Stage = MappingThread("busy", block, upstream_queue=upstream)
    stages.append(stage)
    stage.start()
    upstream.put(1)
    assert entered.wait(SOON)
    with pytest.raises(TimeoutError, match="busy: the function did not return within"):
        stage.join(timeout=0)
    leave.set()


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
        downstream.get()
    with pytest.raises(PipeClosed):
        upstream.put(2)
    stage.join(SOON)
    for _ in range(2):
        with pytest.raises(StageFailed, match="stage faulty failed") as raised:
            stage.check()
        assert raised.value.__cause__ is error


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
            pipes[0].put(item)

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
