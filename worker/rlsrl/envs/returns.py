"""The discounted return so far of each lane. Where the experiment scales rewards, it scales them by its deviation."""

from __future__ import annotations

import numpy as np

from rlsrl.data.slots import DISCOUNTED_RETURN
from rlsrl.data.specs import Arrays


class DiscountedReturns:
    """Computes ``G_t = r_t + discount * G_{t-1}`` of each lane across slots. It restarts at 0 with each episode.

    OpenAI Baselines' VecNormalize computes the same. (Gymnasium's NormalizeReward restarts one step earlier, before an
    episode's last reward, and not at all where an episode is truncated.)
    """

    def __init__(self, *, discount: float, num_lanes: int) -> None:
        self._discount = np.float32(discount)
        self._so_far = np.zeros(num_lanes, np.float32)

    def write(self, arrays: Arrays) -> None:
        """Write ``discounted_return`` of a slot whose rewards and ends are written. Slots come in order."""
        returns, so_far = arrays[DISCOUNTED_RETURN], self._so_far
        ended = arrays["terminated"] | arrays["truncated"] | ~arrays["mask"]
        for t, reward in enumerate(arrays["reward"]):
            np.add(reward, so_far, out=returns[t])
            np.multiply(returns[t], self._discount, out=so_far)
            so_far[ended[t]] = 0.0
