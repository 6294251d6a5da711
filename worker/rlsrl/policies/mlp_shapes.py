"""The parameters of the built-in multi-layer perceptron, without torch: workers that act with ``mlp`` may lack it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rlsrl.api.spec import KeyEncoder, Network, NetworkOutputs, Recurrent
from rlsrl.data.specs import EnvSpec
from rlsrl.policies.exported import NUM_GATES
from rlsrl.policies.observation_parts import parts_of


def mlp_shapes(
    env_spec: EnvSpec, network: Network, *, outputs: NetworkOutputs = "policyAndValue"
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a network's parameters by name, in order: those of its ``FlatLayout``.

    ``network`` is one with ``acts_without_torch``.
    """
    mlp, recurrent = network.mlp, network.recurrent
    assert mlp is not None, "such a network's"
    hidden_sizes, layer_norm, quantiles = mlp.hidden_sizes, mlp.layer_norm, mlp.quantiles
    action = env_spec.action
    num_deviations = action.num_constant_deviations
    deviations: dict[str, tuple[int, ...]] = {"log_std": (num_deviations,)} if num_deviations else {}
    has_values = outputs == "actionValues"
    towers = [("q", action.num_outputs * quantiles) if has_values else ("actor", action.num_layer_outputs)]
    if outputs == "policyAndValue":
        towers.append(("critic", 1))
    if mlp.dueling:
        towers.append(("value", quantiles))
    if network.encoders or recurrent is not None or mlp.share_layers:
        shapes, num_features = _encoder_shapes("encoder.parts", env_spec, network.encoders)
        shapes |= _dense_shapes("encoder.layers", [num_features, *hidden_sizes], norms=layer_norm)
        size = hidden_sizes[-1]
        if recurrent is not None:
            shapes |= _recurrent_shapes("recurrent", recurrent, size)
            size = recurrent.size
        shapes |= {f"outputs.{name}": shape for name, shape in deviations.items()}
        for head, num_outputs in towers:
            shapes |= {f"outputs.{head}.weight": (num_outputs, size), f"outputs.{head}.bias": (num_outputs,)}
    else:
        num_features = sum(spec.num_features for spec in env_spec.unmasked.observation.values())
        shapes = dict(deviations)
        for tower, num_outputs in towers:
            shapes |= _dense_shapes(tower, [num_features, *hidden_sizes], norms=layer_norm, num_outputs=num_outputs)
    return shapes if action.mask is None else {f"network.{name}": shape for name, shape in shapes.items()}


def _encoder_shapes(
    name: str, env_spec: EnvSpec, encoders: Sequence[KeyEncoder]
) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the shapes of encoders, and how many numbers they and the arrays without one give."""
    shapes: dict[str, tuple[int, ...]] = {}
    number = 0
    for place, part in enumerate(parts_of(env_spec.unmasked.observation, [each.key for each in encoders])):
        num_features = sum(spec.num_features for spec in part.arrays.values())
        layers = None if part.encoder is None else encoders[part.encoder].mlp
        if layers is not None:
            sizes = [num_features, *layers.hidden_sizes]
            shapes |= _dense_shapes(f"{name}.{place}.layers", sizes, norms=layers.layer_norm)
            num_features = sizes[-1]
        number += num_features
    return shapes, number


def _dense_shapes(
    tower: str, sizes: Sequence[int], *, norms: bool, num_outputs: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of hidden layers, and of a last one with ``num_outputs``."""
    shapes: dict[str, tuple[int, ...]] = {}
    stride = 3 if norms else 2  # an activation stands between two layers, and maybe a normalisation
    last = [] if num_outputs is None else [num_outputs]
    for number, (num_inputs, num_units) in enumerate(pairwise([*sizes, *last])):
        layer, norm = (f"{tower}.{stride * number + place}" for place in (0, 1))
        shapes |= {f"{layer}.weight": (num_units, num_inputs), f"{layer}.bias": (num_units,)}
        if norms and number < len(sizes) - 1:
            shapes |= {f"{norm}.weight": (num_units,), f"{norm}.bias": (num_units,)}
    return shapes


def _recurrent_shapes(name: str, recurrent: Recurrent, num_inputs: int) -> dict[str, tuple[int, ...]]:
    rows = NUM_GATES[recurrent.kind] * recurrent.size
    return {
        f"{name}.weight_ih": (rows, num_inputs),
        f"{name}.weight_hh": (rows, recurrent.size),
        f"{name}.bias_ih": (rows,),
        f"{name}.bias_hh": (rows,),
    }
