"""The discounted return so far of each environment: what rewards are scaled by, where they are."""

from __future__ import annotations

import numpy as np

from rlsrl.data.slots import DISCOUNTED_RETURN
from rlsrl.data.specs import Arrays


class DiscountedReturns:
    """Keeps ``G_t = r_t + discount * G_{t-1}`` of each lane over slots; it begins anew with each episode.

    As OpenAI Baselines' VecNormalize does. (Gymnasium's NormalizeReward forgets one step earlier, before an episode's
    last reward, and not at all where an episode is truncated.)
    """

    def __init__(self, *, discount: float, num_lanes: int) -> None:
        self._discount = np.float32(discount)
        self._so_far = np.zeros(num_lanes, np.float32)

    def write(self, arrays: Arrays) -> None:
        """Write the field of a slot whose rewards and ends are all there. Slots come in the order they were filled."""
        returns, so_far = arrays[DISCOUNTED_RETURN], self._so_far
        over = arrays["terminated"] | arrays["truncated"] | ~arrays["mask"]
        for t, reward in enumerate(arrays["reward"]):
            np.add(reward, so_far, out=returns[t])
            np.multiply(returns[t], self._discount, out=so_far)
            so_far[over[t]] = 0.0
