import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlsrl.buffers.fifo import FifoBuffer
from rlsrl.data.slots import Slot, rollout_layout
from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec
from rlsrl.data.version import Version

ENV = EnvSpec(
    observation={"observation": ArraySpec(shape=(2,), dtype="float32")},
    action=ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=2),
)
STEPS = 3


def slot(credit: int, lanes: int, version: Version = Version(1, 0), *, masked: int = 0) -> Slot:
    """Return a slot whose rewards identify credit, lane and step. The first ``masked`` steps are not transitions."""
    layout = rollout_layout(ENV, num_steps=STEPS, num_lanes=lanes)
    arrays = layout.view(bytearray(layout.nbytes))
    arrays["reward"][:] = credit * 100 + np.arange(lanes)[None] * 10 + np.arange(STEPS)[:, None]
    arrays["observation"][:] = credit
    arrays["mask"][masked:] = True
    arrays["version_attempt"][:], arrays["version_step"][:] = version
    return Slot(arrays=arrays, credit=credit, num_transitions=int(arrays["mask"].sum()))


def buffer(lanes: int = 4, lag: int = 1) -> FifoBuffer:
    return FifoBuffer(layout=rollout_layout(ENV, num_steps=STEPS, num_lanes=1), batch_lanes=lanes, max_policy_lag=lag)


def credits_of(rewards: np.ndarray) -> list[int]:
    return [int(reward) // 100 for reward in rewards[0]]


def test_a_batch_is_formed_in_credit_order_whatever_the_order_of_arrival() -> None:
    fifo = buffer()
    fifo.put([slot(1, 2)], oldest_outstanding=0)
    fifo.put([slot(0, 2)], oldest_outstanding=None)
    batch = fifo.sample(timeout=0)
    assert batch is not None
    assert credits_of(batch.arrays["reward"]) == [0, 0, 1, 1]
    assert batch.arrays["reward"][:, 1].tolist() == [10, 11, 12]
    assert batch.arrays["observation"].shape == (STEPS + 1, 4, 2)
    assert batch.arrays["version_step"].shape == (STEPS, 4)


def test_a_batch_waits_for_an_older_credit_that_a_live_producer_holds_and_not_for_a_dead_one() -> None:
    fifo = buffer()
    fifo.put([slot(1, 2), slot(2, 2)], oldest_outstanding=0)
    assert fifo.sample(timeout=0) is None
    fifo.put([], oldest_outstanding=None)
    batch = fifo.sample(timeout=0)
    assert batch is not None
    assert credits_of(batch.arrays["reward"]) == [1, 1, 2, 2]


def test_a_younger_outstanding_credit_delays_no_batch() -> None:
    fifo = buffer()
    fifo.put([slot(0, 4)], oldest_outstanding=1)
    assert fifo.sample(timeout=0) is not None


def test_slots_may_be_reused_after_put() -> None:
    fifo = buffer()
    filled = slot(0, 4)
    fifo.put([filled], oldest_outstanding=None)
    filled.arrays["reward"][:] = -1
    batch = fifo.sample(timeout=0)
    assert batch is not None
    assert (batch.arrays["reward"] >= 0).all()


def test_stale_lanes_are_discarded_with_reason_and_counts() -> None:
    fifo = buffer(lag=1)
    fifo.put(
        [
            slot(0, 2, Version(1, 9), masked=1),
            slot(1, 2, Version(2, 3)),
            slot(2, 2, Version(2, 4)),
            slot(3, 1, Version(2, 5)),
        ],
        oldest_outstanding=None,
    )
    gone = fifo.discard_stale(Version(2, 5))
    assert [(discard.reason, discard.num_lanes, discard.num_transitions) for discard in gone] == [
        ("old_attempt", 2, 4),
        ("stale", 2, 6),
    ]
    assert fifo.num_transitions == 9


def test_stale_lanes_never_enter_a_batch() -> None:
    """A restarted trainer waits for its first batch, and an actor posts again a slot from before the restart."""
    fifo = buffer(lag=1)
    assert fifo.discard_stale(Version(2, 5)) == []
    batches: list[object] = []
    waiter = threading.Thread(target=lambda: batches.append(fifo.sample(timeout=60)))
    waiter.start()
    fifo.put([slot(0, 4, Version(1, 6)), slot(1, 4, Version(2, 3)), slot(2, 4, Version(2, 5))], oldest_outstanding=None)
    waiter.join(10)
    assert batches == [None], "the training thread wakes at once and must check again"
    assert [discard.reason for discard in fifo.discard_stale(Version(2, 5))] == ["old_attempt", "stale"]
    batch = fifo.sample(timeout=0)
    assert batch is not None
    assert credits_of(batch.arrays["reward"]) == [2, 2, 2, 2]


def test_the_oldest_action_decides_the_age_of_a_batch() -> None:
    fifo = buffer()
    mixed = slot(0, 4, Version(1, 7))
    mixed.arrays["version_step"][0] = 5
    fifo.put([mixed], oldest_outstanding=None)
    batch = fifo.sample(timeout=0)
    assert batch is not None
    assert batch.oldest_version == Version(1, 5)


def test_close_ends_the_wait_and_returns_untrained_lanes() -> None:
    fifo = buffer()
    fifo.put([slot(0, 2)], oldest_outstanding=None)
    results: list[object] = []
    waiter = threading.Thread(target=lambda: results.append(fifo.sample(timeout=60)))
    waiter.start()
    left = fifo.close()
    waiter.join(10)
    assert results == [None]
    assert [(discard.reason, discard.num_transitions) for discard in left] == [("end_of_run", 6)]
    assert fifo.num_transitions == 0


@given(widths=st.lists(st.integers(1, 6), min_size=1, max_size=12), seed=st.integers(0, 2**32 - 1))
def test_every_lane_is_trained_once_in_order_for_any_widths_and_arrivals(widths: list[int], seed: int) -> None:
    fifo = buffer(lanes=4, lag=10)
    arrivals = np.random.default_rng(seed).permutation(len(widths))
    missing = set(range(len(widths)))
    for credit in arrivals.tolist():
        missing.remove(credit)
        fifo.put([slot(credit, widths[credit])], oldest_outstanding=min(missing, default=None))
    trained: list[int] = []
    while (batch := fifo.sample(timeout=0)) is not None:
        assert batch.num_transitions == 4 * STEPS
        trained += [int(reward) for reward in batch.arrays["reward"][0]]
    lanes = [credit * 100 + lane * 10 for credit, width in enumerate(widths) for lane in range(width)]
    assert trained == lanes[: len(lanes) // 4 * 4]
    assert fifo.num_transitions == len(lanes) % 4 * STEPS
