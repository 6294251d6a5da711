from __future__ import annotations

import numpy as np

from rlsrl.data.random_slots import fill_ends
from rlsrl.data.slots import DISCOUNTED_RETURN, Slot, rollout_layout
from rlsrl.envs.returns import DiscountedReturns
from rlsrl.testing.rollouts import discrete_env_spec

NUM_STEPS, NUM_LANES, DISCOUNT = 9, 5, 0.9


def slot() -> Slot:
    layout = rollout_layout(discrete_env_spec(), num_steps=NUM_STEPS, num_lanes=NUM_LANES, discounted_return=True)
    return Slot(arrays=layout.view(bytearray(layout.nbytes)))


def by_definition(arrays: dict[str, np.ndarray], t: int, lane: int) -> float:
    """Return the sum over the episode's steps up to t, by definition."""
    total, weight = 0.0, 1.0
    for s in range(t, -1, -1):
        before = s < t and (arrays["terminated"][s, lane] or arrays["truncated"][s, lane])
        if before or not arrays["mask"][s, lane]:
            break
        total += weight * float(arrays["reward"][s, lane])
        weight *= DISCOUNT
    return total


def test_returns_continue_over_slots_and_restart_with_each_episode() -> None:
    rng, returns = np.random.default_rng(0), DiscountedReturns(discount=DISCOUNT, num_lanes=NUM_LANES)
    whole = rollout_layout(discrete_env_spec(), num_steps=4 * NUM_STEPS, num_lanes=NUM_LANES, discounted_return=True)
    long = Slot(arrays=whole.view(bytearray(whole.nbytes)))
    fill_ends(long, rng=rng, end_probability=0.15)
    long.arrays["reward"][...] = np.where(long.arrays["mask"], rng.standard_normal(long.arrays["mask"].shape), 0.0)
    assert long.arrays["terminated"].any()
    assert long.arrays["truncated"].any()
    for part in range(4):
        piece, steps = slot(), slice(part * NUM_STEPS, (part + 1) * NUM_STEPS)
        for name in ("reward", "terminated", "truncated", "mask"):
            piece.arrays[name][...] = long.arrays[name][steps]
        returns.write(piece.arrays)
        long.arrays[DISCOUNTED_RETURN][steps] = piece.arrays[DISCOUNTED_RETURN]
    for t, lane in np.argwhere(long.arrays["mask"]):
        expected = by_definition(long.arrays, int(t), int(lane))
        np.testing.assert_allclose(long.arrays[DISCOUNTED_RETURN][t, lane], expected, rtol=1e-5, atol=1e-6)


def test_a_reward_that_is_no_number_does_not_outlive_its_episode() -> None:
    returns, piece = DiscountedReturns(discount=DISCOUNT, num_lanes=NUM_LANES), slot()
    piece.arrays["mask"][...] = True
    piece.arrays["reward"][...] = 1.0
    piece.arrays["reward"][2, 0] = np.nan
    piece.arrays["terminated"][4, 0] = True
    piece.arrays["mask"][5, 0] = False
    piece.arrays["reward"][5, 0] = 0.0
    returns.write(piece.arrays)
    assert np.isnan(piece.arrays[DISCOUNTED_RETURN][2:5, 0]).all()
    np.testing.assert_allclose(piece.arrays[DISCOUNTED_RETURN][6:8, 0], [1.0, 1.9], rtol=1e-6)
    assert np.isfinite(piece.arrays[DISCOUNTED_RETURN][:, 1:]).all()


def test_slots_have_the_field_only_where_it_is_asked_for() -> None:
    sizes = {"num_steps": NUM_STEPS, "num_lanes": NUM_LANES}
    plain, scaled = (rollout_layout(discrete_env_spec(), **sizes, discounted_return=asked) for asked in (False, True))
    assert DISCOUNTED_RETURN not in plain.fields
    assert scaled.shape(DISCOUNTED_RETURN) == (NUM_STEPS, NUM_LANES)
    assert plain.step_digest != scaled.step_digest, "ends that differ in it refuse each other"
