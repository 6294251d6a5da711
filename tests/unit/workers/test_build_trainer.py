"""Settings on which all ranks must agree before training."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlsrl.runtime.errors import ConfigurationError
from rlsrl.workers.build import trainer
from rlsrl.workers.gang import SoloGang


class Met(SoloGang):
    """A gang whose other rank trains on the CPU."""

    def __init__(self, *, timeout_seconds: float, on_gpus: bool) -> None:
        self.asked = (timeout_seconds, on_gpus)

    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(mine), {"device": "cpu"}]


def test_ranks_train_on_devices_of_one_kind() -> None:
    config: Any = SimpleNamespace(num_trainers=2, device="auto")
    gang = trainer.gang_of(config, torch.device("cpu"), join_ranks=Met)
    assert isinstance(gang, Met)
    assert gang.asked == (trainer.GANG_SECONDS, False)
    with pytest.raises(ConfigurationError, match=r"trainers\.device is auto.* cuda, cpu; allowed: one kind of device"):
        trainer.gang_of(config, torch.device("cuda", 0), join_ranks=Met)
