"""Run folders with stored versions, without a training process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.data.specs import Arrays, ArraySpec
from rlsrl.data.version import Version
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.layout import NETWORK_KEY, Shapes, layout_digest
from rlsrl.parameters.protocols import Parameters
from rlsrl.policies.exported import CategoricalHead, DenseLayer, ExportedActor
from rlsrl.workers.build.common import EXPORTED_ACTOR_KEY, INTERFACE_KEY

CARTPOLE = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: balance}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  actors: {environments: 8}
  stop: {envSteps: 1000}
"""
LINEAR_SHAPES = {"actor.weight": (2, 4), "actor.bias": (2,)}
LINEAR = ExportedActor(
    layout=layout_digest(LINEAR_SHAPES),
    num_parameters=10,
    observation={"observation": ArraySpec(shape=(4,), dtype="float32")},
    layers=(DenseLayer(name="actor", weight_offset=0, bias_offset=8, in_size=4, out_size=2, activation="identity"),),
    head=CategoricalHead(num_actions=2),
)
"""A policy for CartPole of one layer."""
BALANCES = (0, 0, 0, 0, 0.1, 0.5, 3, 1, 0, 0)
"""Its weights that balance the pole: always 500 steps."""
LETS_FALL = (0, 0, 0, 0, 0, 0, 0, 0, 1, 0)
"""Its weights that prefer to push left, with probability 0.73: about ten steps."""


def make_run(folder: Path, experiment: str) -> Path:
    """Make the folder of a run of the experiment (YAML), without versions, and return it."""
    resolved = resolve(load_text(experiment), local_placement(run_uid="test", run_folder=folder.absolute()))
    folder.mkdir()
    (folder / "resolved.json").write_text(resolved.to_json())
    return folder


def push(
    run: Path,
    step: int,
    weights: Sequence[float] | np.ndarray[tuple[int], np.dtype[np.float32]],
    *,
    exported: ExportedActor | None,
    shapes: Shapes = LINEAR_SHAPES,
    interface: EnvironmentInterface | None = None,
    statistics: Arrays | None = None,
    tag: str = "",
) -> None:
    """Store version 1.``step`` in a run folder; without ``interface`` it does not say of which spaces it is."""
    parameters = Parameters(
        version=Version(1, step),
        vector=np.array(weights, np.float32),
        layout=layout_digest(shapes),
        statistics=statistics or {},
    )
    metadata: dict[str, Any] = {
        EXPORTED_ACTOR_KEY: None if exported is None else exported.to_json(),
        NETWORK_KEY: {name: list(shape) for name, shape in shapes.items()},
    }
    if interface is not None:
        metadata[INTERFACE_KEY] = interface.to_json()
    tags = [tag] if tag else []
    FilesystemParameterDB(run / "parameters").push(POLICY_NAME, parameters, tags=tags, metadata=metadata)
