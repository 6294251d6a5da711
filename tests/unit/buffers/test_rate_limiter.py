import pytest

from rlsrl.buffers.limiter import RateLimiter


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_on_policy_grants_the_lag_first_and_then_one_batch_a_step(lag: int) -> None:
    limiter = RateLimiter(batch_lanes=8, max_policy_lag=lag)
    assert limiter.take() == 8 * (1 + lag)
    assert limiter.take() == 0
    for _ in range(3):
        limiter.sampled(8)
        assert limiter.take() == 8


def test_discarded_lanes_are_granted_again() -> None:
    limiter = RateLimiter(batch_lanes=8, max_policy_lag=0)
    limiter.take()
    limiter.discarded(3)
    assert limiter.take() == 3


def test_a_resumed_run_grants_the_lag_again() -> None:
    limiter = RateLimiter(batch_lanes=8, max_policy_lag=1)
    limiter.take()
    limiter.sampled(8)
    limiter.take()
    resumed = RateLimiter(batch_lanes=8, max_policy_lag=1)
    resumed.load_state_dict(limiter.state_dict())
    assert resumed.take() == 16


def test_at_the_end_of_a_run_only_what_can_be_trained_is_granted() -> None:
    limiter = RateLimiter(batch_lanes=8, max_policy_lag=3)
    limiter.expect(2 * 8)
    assert (limiter.take(), limiter.room, limiter.is_complete) == (16, 16, True)
    limiter.sampled(8)
    limiter.expect(8)
    assert (limiter.take(), limiter.room, limiter.is_complete) == (0, 24, True)
    limiter.discarded(5)
    assert not limiter.is_complete
    assert (limiter.take(), limiter.room) == (5, 24)
    limiter.expect(None)
    assert (limiter.take(), limiter.room, limiter.is_complete) == (24, 0, False)


def test_a_resumed_run_may_be_at_its_end() -> None:
    limiter = RateLimiter(batch_lanes=8, max_policy_lag=1)
    limiter.load_state_dict({"sampled": 80})
    limiter.expect(8)
    assert limiter.take() == 8
    assert limiter.take() == 0
