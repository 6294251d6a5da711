"""Evaluates a network on a GPU by replaying recorded operations (CUDA graphs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlsrl.data.inference import RolloutRequest
from rlsrl.policies.networks import acting_output
from rlsrl.policies.normalization import Standardization

FEWEST_LANES, MOST_LANES = 8, 2048
"""Numbers of lanes that are recorded: these and the powers of two between them. Fewer lanes are padded."""
WARM_UP_EVALUATIONS = 3
"""Evaluations before a recording, in which libraries choose their algorithms and allocate their memory."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One recorded evaluation. A replay reads ``observation`` and writes ``distribution``, in page-locked memory."""

    graph: torch.cuda.CUDAGraph
    observation: Mapping[str, Tensor]
    """Observation arrays by path, [lanes, *shape]."""
    distribution: Tensor
    """Distribution parameters, [lanes, A]."""


class RecordedEvaluation:
    """Evaluates a network, one recording for each number of lanes. One thread uses it.

    An evaluation that starts each operation by itself gives up the interpreter's lock for each, and threads that send
    and receive take it. A replay starts all of them at once, copies to and from the GPU included. It reads the
    network's parameters where they are, so that new weights need no new recording.
    """

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        """Evaluate the network on that GPU, which holds its parameters."""
        self._network = network
        self._device = device
        self._recordings: dict[tuple[object, ...], Recording] = {}
        self._fails = False

    def evaluate(
        self, requests: Sequence[RolloutRequest], by_path: Mapping[str, Standardization]
    ) -> NDArray[np.float32] | None:
        """Return the distribution parameters of the requests' lanes, [sum of N, A]; None if they cannot be recorded.

        ``by_path`` standardises the observations.
        """
        num_lanes = sum(request.num_lanes for request in requests)
        recording = None if self._fails or num_lanes > MOST_LANES else self._recording(num_lanes, requests[0], by_path)
        if recording is None:
            return None
        staged = {path: tensor.numpy() for path, tensor in recording.observation.items()}
        start = 0
        for request in requests:
            end = start + request.num_lanes
            for path, array in staged.items():
                if path in by_path:
                    by_path[path].apply(request.observation[path], out=array[start:end])
                else:
                    np.copyto(array[start:end], request.observation[path])
            start = end
        recording.graph.replay()
        torch.cuda.current_stream(self._device).synchronize()
        distribution: NDArray[np.float32] = recording.distribution[:num_lanes].numpy().copy()
        return distribution

    def _recording(
        self, num_lanes: int, request: RolloutRequest, by_path: Mapping[str, Standardization]
    ) -> Recording | None:
        """Return the recording of the next number of lanes, or None if the network cannot be recorded."""
        lanes = max(FEWEST_LANES, 1 << (num_lanes - 1).bit_length())
        key = (lanes, *by_path)
        if key not in self._recordings:
            try:
                self._recordings[key] = self._record(lanes, request, by_path)
            except RuntimeError as error:
                # The network waits for the GPU, for example, to decide by a value.
                self._fails = True
                _log.warning("evaluations_not_recorded", reason=str(error).partition("\n")[0])
        return self._recordings.get(key)

    def _record(self, lanes: int, request: RolloutRequest, by_path: Mapping[str, Standardization]) -> Recording:
        observation = {
            path: torch.zeros((lanes, *array.shape[1:]), dtype=_dtype(array, path in by_path), pin_memory=True)
            for path, array in request.observation.items()
        }
        with torch.no_grad(), torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_EVALUATIONS):
                    result = self._evaluate(observation)
            torch.cuda.current_stream().wait_stream(stream)
            distribution = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                distribution.copy_(self._evaluate(observation), non_blocking=True)
        return Recording(graph=graph, observation=observation, distribution=distribution)

    def _evaluate(self, observation: Mapping[str, Tensor]) -> Tensor:
        on_gpu = {path: tensor.to(self._device, non_blocking=True) for path, tensor in observation.items()}
        return acting_output(self._network(on_gpu))


def _dtype(array: NDArray[Any], is_standardized: bool) -> torch.dtype:
    dtype: torch.dtype = torch.float32 if is_standardized else getattr(torch, array.dtype.name)
    return dtype
