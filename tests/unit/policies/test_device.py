"""The choice of devices, and arrays on the CPU that are not copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlsrl.policies.device import CPU, assign, device_for, to_device, to_host
from rlsrl.runtime.errors import ConfigurationError


def see(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the machine has that many GPUs."""
    for name in ("deterministic", "allow_tf32"):  # put back afterwards
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("wanted", "gpus", "places", "expected"),
    [
        ("auto", 0, 1, ["cpu"]),
        ("auto", 1, 1, ["cuda:0"]),
        ("auto", 1, 2, ["cpu", "cpu"]),
        ("auto", 3, 2, ["cuda:0", "cuda:1"]),
        ("cuda", 2, 2, ["cuda:0", "cuda:1"]),
        ("cpu", 2, 2, ["cpu", "cpu"]),
    ],
)
def test_each_process_has_a_gpu_of_its_own_or_none_has(
    wanted: str, gpus: int, places: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    see(gpus, monkeypatch)
    found = [device_for(wanted, field="f", place=place, places=places) for place in range(places)]  # type: ignore[arg-type]
    assert [str(each) for each in found] == expected


def test_a_small_network_is_on_a_gpu_only_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    see(1, monkeypatch)
    assert device_for("auto", field="f", is_small=True) == CPU
    assert device_for("cuda", field="f", is_small=True) == torch.device("cuda", 0)


@pytest.mark.parametrize(("gpus", "places"), [(0, 1), (1, 2)])
def test_too_few_gpus_are_told_with_the_field(gpus: int, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    see(gpus, monkeypatch)
    told = rf"trainers\.device is cuda.* needs {places} GPUs .*sees {gpus}; use auto"
    with pytest.raises(ConfigurationError, match=told):
        device_for("cuda", field="trainers.device", places=places)


def test_on_the_cpu_nothing_is_copied() -> None:
    array = np.zeros(3, np.float32)
    tensor = to_device(array, CPU)
    tensor[1] = 2.0
    assert array.tolist() == to_host(tensor).tolist() == [0.0, 2.0, 0.0]
    to_host(tensor)[0] = 1.0
    assert array.tolist() == [1.0, 2.0, 0.0]


def test_values_are_taken_over_from_what_cannot_be_written() -> None:
    tensor, array = torch.zeros(2), np.array([1.0, 2.0], np.float32)
    array.flags.writeable = False
    assign(tensor, array)
    assert tensor.tolist() == [1.0, 2.0]
    array.flags.writeable = True
    array[:] = 0.0
    assert tensor.tolist() == [1.0, 2.0]
