import pytest

from rlsrl.sizing.machines import Clock, Link, Machine, Process


def run(clock: Clock) -> None:
    while clock.step():
        pass


def finish_times(cores: float, works: list[float], *, full_load_speed: float = 1.0) -> list[float]:
    """When jobs that begin together end."""
    clock = Clock()
    machine = Machine(clock, cores, full_load_speed=full_load_speed)
    ended: dict[int, float] = {}
    for number, work in enumerate(works):
        machine.compute(work, lambda number: ended.__setitem__(number, clock.now), number)
    run(clock)
    return [ended[number] for number in range(len(works))]


@pytest.mark.parametrize(
    ("cores", "works", "expected"),
    [
        (1.0, [1.0], [1.0]),
        (2.0, [1.0, 1.0], [1.0, 1.0]),
        (1.0, [1.0, 1.0], [2.0, 2.0]),
        (2.0, [1.0, 1.0, 1.0, 1.0], [2.0] * 4),
        (1.0, [1.0, 2.0, 3.0], [3.0, 5.0, 6.0]),  # the short one leaves, and the others go on faster
        (1.5, [3.0, 3.0], [4.0, 4.0]),
    ],
)
def test_jobs_share_the_cores_equally(cores: float, works: list[float], expected: list[float]) -> None:
    assert finish_times(cores, works) == pytest.approx(expected)


@pytest.mark.parametrize("num_jobs", [1, 2, 3, 7])
def test_what_jobs_get_together_sums_to_the_cores(num_jobs: int) -> None:
    clock = Clock()
    machine = Machine(clock, 3.0)
    for _ in range(num_jobs):
        machine.compute(10.0, lambda: None)

    assert machine.rate * num_jobs == pytest.approx(min(3.0, num_jobs))


def test_cores_that_are_all_busy_are_slower() -> None:
    assert finish_times(2.0, [1.0], full_load_speed=0.5) == pytest.approx([1.0])
    assert finish_times(2.0, [1.0, 1.0], full_load_speed=0.5) == pytest.approx([2.0, 2.0])


def test_who_comes_later_slows_the_others_from_then_on() -> None:
    clock = Clock()
    machine = Machine(clock, 1.0)
    ended: list[tuple[str, float]] = []
    machine.compute(2.0, lambda: ended.append(("first", clock.now)))
    clock.at(1.0, machine.compute, 0.5, lambda: ended.append(("second", clock.now)))
    run(clock)

    assert ended == [("second", pytest.approx(2.0)), ("first", pytest.approx(2.5))]


def test_a_process_does_one_thing_after_the_other_and_computes_nothing_while_it_waits() -> None:
    clock = Clock()
    machine = Machine(clock, 1.0)
    process, other = Process(clock, machine), Process(clock, machine)
    ended: list[tuple[str, float]] = []
    process.do(1.0, lambda: ended.append(("sleeper", clock.now)), wait=3.0)
    process.do(1.0, lambda: ended.append(("after it", clock.now)))
    other.do(2.0, lambda: ended.append(("other", clock.now)))
    run(clock)

    assert ended == [("other", pytest.approx(3.0)), ("sleeper", pytest.approx(5.0)), ("after it", pytest.approx(6.0))]
    assert process.is_idle
    assert process.computed == 2.0


def test_a_link_carries_messages_one_after_the_other() -> None:
    clock = Clock()
    link = Link(clock, bandwidth=100.0, latency=0.5)
    came: list[float] = []
    for nbytes in (100.0, 200.0):
        link.carry(nbytes, lambda: came.append(clock.now))
    run(clock)

    assert came == pytest.approx([1.5, 3.5])
