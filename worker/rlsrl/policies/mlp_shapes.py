"""The parameters of the built-in multi-layer perceptron, without torch: workers that act with ``mlp`` may lack it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rlsrl.api.spec import NetworkOutputs
from rlsrl.data.specs import EnvSpec


def mlp_shapes(
    env_spec: EnvSpec,
    hidden_sizes: Sequence[int],
    *,
    outputs: NetworkOutputs = "policyAndValue",
    layer_norm: bool = False,
    dueling: bool = False,
    quantiles: int = 1,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the ``mlp`` network with these outputs by name, in order: those of its ``FlatLayout``."""
    action = env_spec.action
    num_features = sum(spec.num_features for spec in env_spec.unmasked.observation.values())
    num_deviations = action.num_constant_deviations
    shapes: dict[str, tuple[int, ...]] = {"log_std": (num_deviations,)} if num_deviations else {}
    has_values = outputs == "actionValues"
    towers = [("q", action.num_outputs * quantiles) if has_values else ("actor", action.num_layer_outputs)]
    if outputs == "policyAndValue":
        towers.append(("critic", 1))
    if dueling:
        towers.append(("value", quantiles))
    stride = 3 if layer_norm else 2  # an activation stands between two layers, and maybe a normalisation
    for tower, num_outputs in towers:
        for number, (num_inputs, num_units) in enumerate(pairwise([num_features, *hidden_sizes, num_outputs])):
            layer, norm = (f"{tower}.{stride * number + place}" for place in (0, 1))
            shapes |= {f"{layer}.weight": (num_units, num_inputs), f"{layer}.bias": (num_units,)}
            if layer_norm and number < len(hidden_sizes):
                shapes |= {f"{norm}.weight": (num_units,), f"{norm}.bias": (num_units,)}
    return shapes if action.mask is None else {f"network.{name}": shape for name, shape in shapes.items()}
