"""Writes a stored version of a policy for programs without rlsrl: as a torch program, an ONNX graph or named tensors.

Programs and graphs are read back and compared with the policy on ``CHECKED`` observations before they are written.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlsrl.api.spec import KeyEncoder, Network
from rlsrl.data.inference import RolloutRequest
from rlsrl.data.slots import state_field
from rlsrl.data.specs import Arrays, ArraySpec
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.parameters.weights_file import encode_weights
from rlsrl.policies.exported import MASKED_LOGIT
from rlsrl.policies.normalization import mean_of, variance_of
from rlsrl.policies.sampling import sampler_for
from rlsrl.runs.stored_version import StoredVersion
from rlsrl.runtime.extras import pip_install
from rlsrl.workers.build.common import environment_interface_of, torch_policy

if TYPE_CHECKING:
    from rlsrl.policies.standalone import StandalonePolicy
    from rlsrl.policies.torch_policy import TorchPolicy

ExportFormat = Literal["torch", "onnx", "safetensors"]
SUFFIXES: Mapping[ExportFormat, str] = {"torch": ".pt2", "onnx": ".onnx", "safetensors": ".safetensors"}
CHECKED = 1000
"""Random observations on which an exported policy is compared."""
TOLERANCE = 1e-4
"""Allowed difference of outputs, and of actions that are floats, as a share of the largest."""
LARGEST_DRAWN = 1e6
"""Larger floats of a random observation are drawn anew: bounds such as the largest float say that there is no bound,
and a network's outputs for such numbers are infinite."""
ABOUT = "rlsrl.json"
"""Name of the text in a torch program that says which version it is."""

ExportedFunction = Callable[[Arrays], Arrays]
"""Evaluates what was exported: observation arrays by path, [N, ...], to actions and the acting head by name."""


class ExportRefused(Exception):
    """The policy cannot be exported; the text says why."""


def format_of(path: Path) -> ExportFormat:
    """Return the format of files with the suffix of ``path``.

    Raises:
        ValueError: no format has this suffix.
    """
    for kind, suffix in SUFFIXES.items():
        if path.suffix == suffix:
            return kind
    raise ValueError(f"{path} has the suffix {path.suffix!r}; allowed: {', '.join(SUFFIXES.values())}")


def export_version(stored: StoredVersion, kind: ExportFormat) -> bytes:
    """Return the bytes of a file with the version's policy.

    Raises:
        ExportRefused: the network cannot be traced, a package is missing, or the outputs differ from the policy's.
        ConfigurationError: the network cannot be made.
        LayoutMismatch: the weights belong to another network.
        CodecError: the version does not say of which spaces it is.
    """
    if kind == "safetensors":
        return _named_weights(stored)
    interface = environment_interface_of(stored.metadata)
    policy = _policy(stored, interface)
    from rlsrl.policies.standalone import StandalonePolicy

    module = StandalonePolicy(policy.network, interface, stored.parameters.statistics).eval()
    observations = random_observations(interface, stored.parameters.statistics, CHECKED)
    observations |= random_states(policy.state, CHECKED)
    data, evaluate = {"torch": _torch_program, "onnx": _onnx_graph}[kind](module, observations, about(stored))
    check(evaluate, policy, interface, observations)
    return data


def about(stored: StoredVersion) -> dict[str, str]:
    """Return what a file says of its version, as texts."""
    config = stored.config
    kept = {name: value for name, value in stored.metadata.items() if isinstance(value, int | float | str)}
    return {
        "rlsrl.version": str(stored.parameters.version),
        "rlsrl.environment": str(config.environment.id or config.environment.factory or "http"),
        "rlsrl.metadata": json.dumps(kept),
    }


def random_observations(interface: EnvironmentInterface, statistics: Arrays, number: int) -> dict[str, NDArray[Any]]:
    """Return random observations as arrays by path, [number, *shape]. At least one action is legal.

    They are samples of the space. Of floats that a version's ``statistics`` normalise, every other observation is drawn
    by these: samples of a wide space would all be clipped to the range of the network's input.
    """
    space, rng = interface.observation_space, np.random.default_rng(0)
    space.seed(0)
    found = [interface.arrays(space.sample()) for _ in range(number)]
    arrays = {path: np.stack([each[path] for each in found]) for path in interface.spec.observation}
    for path, array in arrays.items():
        if array.dtype.kind == "f":
            drawn = rng.standard_normal(array.shape)
            np.copyto(array, drawn, casting="same_kind", where=np.abs(array) > LARGEST_DRAWN)
            if (mean := statistics.get(mean_of(path))) is not None:
                array[::2] = mean + np.sqrt(statistics[variance_of(path)]) * drawn[::2]
    if (mask := interface.spec.action.mask) is not None:
        is_closed = ~arrays[mask].reshape(number, -1).any(axis=1)
        arrays[mask].reshape(number, -1)[is_closed, 0] = 1
    return arrays


def random_states(specs: Mapping[str, ArraySpec], number: int) -> dict[str, NDArray[Any]]:
    """Return random recurrent states by their fields, [number, *shape]; none for a policy without memory."""
    rng = np.random.default_rng(1)
    return {
        state_field(name): rng.uniform(-1.0, 1.0, (number, *spec.shape)).astype(spec.dtype)
        for name, spec in specs.items()
    }


def check(
    evaluate: ExportedFunction, policy: TorchPolicy, interface: EnvironmentInterface, observations: Arrays
) -> None:
    """Compare what was exported with the policy: the acting head's outputs, the actions that follow from them, and the
    next states.

    Raises:
        ExportRefused: they differ.
    """
    from rlsrl.policies.networks import ACTION_VALUES_HEAD, POLICY_HEAD
    from rlsrl.policies.standalone import next_state_field

    found = dict(evaluate(observations))
    seen = {path: observations[path] for path in interface.spec.observation}
    state = {name: observations[state_field(name)] for name in policy.state}
    expected, following = policy.network_output([RolloutRequest(observation=seen, state=state)])
    for name, array in following.items():
        if not np.allclose(found[next_state_field(name)], array, rtol=TOLERANCE, atol=TOLERANCE):
            raise ExportRefused(f"the exported next state {name!r} differs from the policy's")
    (head,) = found.keys() & {POLICY_HEAD, ACTION_VALUES_HEAD}
    outputs = found.pop(head)
    is_legal = expected != MASKED_LOGIT
    largest = float(np.abs(expected[is_legal]).max(initial=0.0))
    difference = float(np.abs(np.where(is_legal, outputs - expected, 0.0)).max())
    if not difference <= TOLERANCE * largest or not np.array_equal(outputs[~is_legal], expected[~is_legal]):
        raise ExportRefused(
            f"the exported outputs differ from the policy's by up to {difference:.3g}; the largest is {largest:.3g}"
        )
    for path, actions in _actions_of(outputs, interface).items():
        tolerance = TOLERANCE if actions.dtype.kind == "f" else 0.0
        if not np.allclose(found[path], actions, rtol=tolerance, atol=tolerance * float(np.abs(actions).max())):
            raise ExportRefused(f"the exported {path} differs from the policy's")


def _actions_of(outputs: NDArray[np.float32], interface: EnvironmentInterface) -> dict[str, NDArray[Any]]:
    """Return the most probable actions for the acting head's outputs, by path, [N, ...]."""
    spec = interface.spec.action
    sampler = sampler_for(spec, num_steps=1, num_lanes=len(outputs), rng=np.random.default_rng(0), greedy=True)
    sampler.parameters[0, : outputs.shape[1]] = outputs.T
    chosen = np.zeros((len(outputs), *spec.array.shape), spec.array.dtype)
    sampler.begin()
    sampler.choose(0, chosen)
    return _stacked("action", interface.actions(chosen))


def _stacked(path: str, actions: Any) -> dict[str, NDArray[Any]]:
    if not isinstance(actions[0], tuple):
        return {path: np.stack([np.asarray(action) for action in actions])}
    parts = enumerate(zip(*actions, strict=True))
    return {leaf: found for place, part in parts for leaf, found in _stacked(f"{path}/{place}", part).items()}


def _policy(stored: StoredVersion, interface: EnvironmentInterface) -> TorchPolicy:
    """Return the version's policy. It computes in float32, since few runtimes have all operations in bfloat16."""
    config, network = stored.config, stored.config.network
    encoders = tuple(each.model_copy(update=_in_float32(each)) for each in network.encoders)
    network = network.model_copy(update={**_in_float32(network), "encoders": encoders})
    outputs = config.algorithm.chosen.outputs
    policy = torch_policy(network, interface.spec, outputs=outputs, seed=config.seed)
    policy.load(stored.parameters)
    return policy


def _in_float32(layers: Network | KeyEncoder) -> dict[str, Any]:
    """Return the convolutional members of ``layers``, in float32."""
    blocks = {name: getattr(layers, name) for name in ("cnn", "impala_cnn")}
    return {name: block.model_copy(update={"precision": "float32"}) for name, block in blocks.items() if block}


def _torch_program(
    module: StandalonePolicy, observations: Arrays, texts: Mapping[str, str]
) -> tuple[bytes, ExportedFunction]:
    import torch

    program, buffer = _traced(module, observations), io.BytesIO()
    torch.export.save(program, buffer, extra_files={ABOUT: json.dumps(texts)})
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()

    def evaluate(arrays: Arrays) -> Arrays:
        with torch.inference_mode():
            found = loaded({path: torch.from_numpy(array) for path, array in arrays.items()})
        return {name: tensor.numpy() for name, tensor in found.items()}

    return buffer.getvalue(), evaluate


def _onnx_graph(
    module: StandalonePolicy, observations: Arrays, texts: Mapping[str, str]
) -> tuple[bytes, ExportedFunction]:
    import torch

    try:
        import onnx
        import onnxruntime  # type: ignore[import-untyped]
        import onnxscript  # noqa: F401 - torch's exporter uses it
    except ImportError as error:
        raise ExportRefused(f"the format onnx needs more packages: {pip_install('onnx')} ({error})") from error
    program = _traced(module, observations)
    with torch.inference_mode():
        names = list(module({path: torch.from_numpy(array[:2]) for path, array in observations.items()}))
    inputs = list(observations)
    try:
        with _without_remarks():
            graph = torch.onnx.export(
                program, dynamo=True, input_names=inputs, output_names=names, verbose=False, external_data=False
            )
        assert graph is not None, "without a file the graph is returned"
        proto = graph.model_proto
        onnx.helper.set_model_props(proto, dict(texts))
        data = proto.SerializeToString()
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    except Exception as error:  # whatever operation of the user's own network ONNX or onnxruntime lacks
        reason = str(error).splitlines()[0].rstrip(".")
        raise ExportRefused(
            f"the network cannot be an ONNX graph: {reason}. The format torch has no such limit"
        ) from error

    def evaluate(arrays: Arrays) -> Arrays:
        return dict(zip(names, session.run(names, dict(arrays)), strict=True))

    return data, evaluate


@contextlib.contextmanager
def _without_remarks() -> Iterator[None]:
    """Silence torch's exporter: it logs that torchvision is not installed, and warns of deprecated code of its own."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            yield
    finally:
        logger.setLevel(before)


def _traced(module: StandalonePolicy, observations: Arrays) -> Any:
    """Return the module as a torch program for any number of observations."""
    import torch

    example = {path: torch.from_numpy(array[:2]) for path, array in observations.items()}
    lanes = torch.export.Dim("lanes", min=1)
    shapes = {path: {0: lanes} for path in observations}
    try:
        return torch.export.export(module, (example,), dynamic_shapes=(shapes,))
    except Exception as error:  # whatever the user's own network does that torch cannot trace
        reason = str(error).splitlines()[0].rstrip(".")
        raise ExportRefused(
            f"torch cannot trace the network: {reason}. In forward(), write x.shape[0] for len(x), and decide nothing "
            "by the values of tensors"
        ) from error


def _named_weights(stored: StoredVersion) -> bytes:
    """Return a file with each parameter by its name in the network, and the statistics by theirs."""
    try:
        return encode_weights(stored.parameters, created_at=stored.created_at, metadata=stored.metadata)
    except ValueError as error:
        raise ExportRefused(str(error)) from error
