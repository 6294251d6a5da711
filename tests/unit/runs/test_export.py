"""Exported policies act as the stored version does, without rlsrl, for each kind of network, observation and action."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from gymnasium import spaces
from safetensors.numpy import load_file

import rlsrl
from rlsrl.cli import main
from rlsrl.cli.init import write_project
from rlsrl.data.specs import Arrays
from rlsrl.data.version import Version
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.parameters.weights_file import decode_version
from rlsrl.runs import export
from rlsrl.runs.export import SUFFIXES, ExportRefused, export_version, random_observations
from rlsrl.runs.stored_version import load_version
from rlsrl.testing.stored_runs import make_run, push
from rlsrl.workers.build.common import torch_policy

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: exported}}
spec:
  environment: {{id: CartPole-v1}}
  algorithm: {algorithm}
  policy: {{network: {network}}}
  actors: {{environments: 8}}
  {more}
  stop: {{envSteps: 1000}}
"""
NUMBERS = spaces.Box(-np.inf, np.inf, (4,), np.float32)
MLP = "{mlp: {hiddenSizes: [16, 16]}}"
PPO, DQN, SAC, TD3 = "{ppo: {}}", "{dqn: {}}", "{sac: {}}", "{td3: {}}"
REPLAY = "pacing: {trainStepsPerEnvStep: 1}"
OF_TEMPLATE = "{custom: {factory: 'my_network:MyNetwork', kwargs: {hidden_size: 16}}}"
NORMED = """
from torch import nn


class Normed(nn.Module):
    def __init__(self, env_spec):
        super().__init__()
        self.body = nn.Linear(*env_spec.observation["observation"].shape, 16)
        self.norm = nn.LayerNorm(16)
        self.q = nn.Linear(16, env_spec.action.num_actions)

    def forward(self, observation):
        features = self.norm(self.body(observation["observation"])).relu()
        return {"q": self.q(features + features.roll(1, -1))}
"""
OF_NUMBERS = {
    "observation/mean": np.arange(4, dtype=np.float64),
    "observation/variance": np.full(4, 4.0),
}


def interface(observation: spaces.Space[Any], action: spaces.Space[Any], **more: Any) -> EnvironmentInterface:
    return EnvironmentInterface(observation_space=observation, action_space=action, **more)


Case = tuple[str, str, str, EnvironmentInterface, Arrays]
"""Algorithm, network and further sections of the experiment; the environment's interface; a version's statistics."""
CASES: Mapping[str, Case] = {
    "mlp": (PPO, MLP, "", interface(NUMBERS, spaces.Discrete(3, start=2)), {}),
    "normalised": (PPO, MLP, "", interface(NUMBERS, spaces.Discrete(3)), OF_NUMBERS),
    "masked": (
        PPO,
        MLP,
        "",
        interface(spaces.Dict({"legal": spaces.MultiBinary(5), "x": NUMBERS}), spaces.Discrete(5), action_mask="legal"),
        {},
    ),
    "categories": (
        PPO, MLP, "", interface(spaces.Tuple((spaces.Discrete(7, start=3), NUMBERS)), spaces.Discrete(3)), {}
    ),
    "box": (PPO, MLP, "", interface(NUMBERS, spaces.Box(-0.01, 0.02, (2, 3), np.float64)), {}),
    "joint": (
        PPO,
        MLP,
        "",
        interface(
            NUMBERS,
            spaces.Tuple(
                (
                    spaces.MultiDiscrete([3, 2]),
                    spaces.Tuple((spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(3))),
                    spaces.Discrete(4, start=-1),
                )
            ),
        ),
        {},
    ),
    "cnn": (PPO, "{cnn: {}}", "", interface(spaces.Box(0, 255, (3, 40, 44), np.uint8), spaces.Discrete(6)), {}),
    "values": (DQN, MLP, REPLAY, interface(NUMBERS, spaces.Discrete(3)), OF_NUMBERS),
    "dueling": (
        DQN,
        "{mlp: {hiddenSizes: [16], dueling: true, quantiles: 5}}",
        REPLAY,
        interface(NUMBERS, spaces.Discrete(3)),
        {},
    ),
    "layer norm": (
        PPO, "{mlp: {hiddenSizes: [16], layerNorm: true}}", "", interface(NUMBERS, spaces.Discrete(3)), OF_NUMBERS
    ),
    "dueling cnn": (
        DQN,
        "{cnn: {hiddenSize: 32, dueling: true, quantiles: 3}}",
        REPLAY,
        interface(spaces.Box(0, 255, (3, 40, 44), np.uint8), spaces.Discrete(6)),
        {},
    ),
    "masked cnn": (
        PPO,
        "{cnn: {hiddenSize: 32}}",
        "",
        interface(
            spaces.Dict({"image": spaces.Box(0, 255, (3, 36, 36), np.uint8), "legal": spaces.MultiBinary(5)}),
            spaces.Discrete(5),
            action_mask="legal",
        ),
        {},
    ),
    "encoders": (
        PPO,
        "{mlp: {hiddenSizes: [16]}, encoders: [{key: x, mlp: {hiddenSizes: [8]}}]}",
        "",
        interface(spaces.Dict({"legal": spaces.MultiBinary(5), "x": NUMBERS}), spaces.Discrete(5), action_mask="legal"),
        {"observation/x/mean": np.arange(4.0), "observation/x/variance": np.full(4, 4.0)},
    ),
    "encoder of images": (
        PPO,
        "{mlp: {hiddenSizes: [16]}, encoders: [{key: image, cnn: {hiddenSize: 32, precision: bfloat16}}]}",
        "",
        interface(
            spaces.Dict({"image": spaces.Box(0, 255, (3, 36, 36), np.uint8), "x": NUMBERS}), spaces.Discrete(5)
        ),
        {},
    ),
    "cnn with norms": (
        PPO, "{cnn: {hiddenSize: 32, layerNorm: true}}", "",
        interface(spaces.Box(0, 255, (3, 40, 44), np.uint8), spaces.Discrete(6)), {}
    ),
    "masked values": (
        DQN,
        "{mlp: {hiddenSizes: [16], dueling: true}}",
        REPLAY,
        interface(spaces.Dict({"legal": spaces.MultiBinary(5), "x": NUMBERS}), spaces.Discrete(5), action_mask="legal"),
        {"observation/x/mean": np.arange(4.0), "observation/x/variance": np.full(4, 4.0)},
    ),
    "discrete sac": (SAC, MLP, REPLAY, interface(NUMBERS, spaces.Discrete(3, start=1)), OF_NUMBERS),
    "network of the template": (PPO, OF_TEMPLATE, "", interface(NUMBERS, spaces.Discrete(3)), OF_NUMBERS),
    "algorithm of the template": (
        "{custom: {factory: 'my_algorithm:MyAlgorithm', needs: {minibatchSize: 64}}}",
        OF_TEMPLATE,
        "",
        interface(NUMBERS, spaces.Discrete(3)),
        {},
    ),
    "network with LayerNorm": (
        DQN, "{custom: {factory: 'normed:Normed'}}", REPLAY, interface(NUMBERS, spaces.Discrete(3)), OF_NUMBERS
    ),
    "squashed": (
        SAC, MLP, REPLAY, interface(NUMBERS, spaces.Box(-2.0, 6.0, (2,), np.float32), vector_actions="squashed"), {}
    ),
    "clipped": (
        TD3, MLP, REPLAY, interface(NUMBERS, spaces.Box(-2.0, 6.0, (2,), np.float32), vector_actions="clipped"), {}
    ),
}  # fmt: skip


@pytest.fixture
def own_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of `rlsrl init --algorithm`, and a network with LayerNorm, can be imported."""
    write_project(tmp_path / "project", "project", has_algorithm=True)
    (tmp_path / "project" / "normed.py").write_text(NORMED)
    monkeypatch.syspath_prepend(tmp_path / "project")
    for name in ("my_network", "my_algorithm", "normed"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def stored_run(folder: Path, case: str, definition: Case | None = None) -> Path:
    """Make a run of the case with one version: the network's initial weights, ten times as large."""
    algorithm, network, more, found, statistics = definition or CASES[case]
    text = EXPERIMENT.format(algorithm=algorithm, network=network, more=more)
    run = make_run(folder / case, text)
    config = load_version_config(run)
    policy = torch_policy(config.network, found.spec, outputs=config.algorithm.chosen.outputs, seed=1)
    parameters, exported = policy.parameters(Version(1, 7)), policy.export()
    push(
        run, 7, 10 * parameters.vector, shapes=policy.layout.shapes, exported=exported, interface=found,
        statistics=statistics, tag="best",
    )  # fmt: skip
    return run


def load_version_config(run: Path) -> Any:
    from rlsrl.api.resolve import ResolvedExperiment

    return ResolvedExperiment.from_json((run / "resolved.json").read_bytes()).trainer


Act = Callable[[dict[str, Any]], Mapping[str, Any]]


def torch_program(path: Path) -> Act:
    program = torch.export.load(path).module()
    return lambda arrays: {
        name: tensor.numpy()
        for name, tensor in program({name: torch.from_numpy(array) for name, array in arrays.items()}).items()
    }


def onnx_graph(path: Path) -> Act:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda arrays: dict(zip(names, session.run(names, arrays), strict=True))


def nested(actions: Mapping[str, Any], space: spaces.Space[Any], path: str = "action") -> Any:
    """Return the action of one lane."""
    if isinstance(space, spaces.Tuple):
        return tuple(nested(actions, part, f"{path}/{place}") for place, part in enumerate(space))
    return actions[path][0]


@pytest.mark.usefixtures("own_networks")
@pytest.mark.parametrize("kind", ["torch", "onnx"])
@pytest.mark.parametrize("case", CASES)
def test_an_exported_policy_acts_as_the_loaded_one(tmp_path: Path, case: str, kind: Any) -> None:
    run, found = stored_run(tmp_path, case), CASES[case][3]
    path = tmp_path / f"policy{SUFFIXES[kind]}"
    path.write_bytes(export_version(load_version(run, "latest"), kind))
    act, policy = {"torch": torch_program, "onnx": onnx_graph}[kind](path), rlsrl.load(run)
    found.observation_space.seed(5)
    chosen = []
    for _ in range(50):
        observation = found.observation_space.sample()
        if found.action_mask is not None:
            observation[found.action_mask][2] = 1
        arrays = {name: array[np.newaxis] for name, array in found.arrays(observation).items()}
        action, expected = nested(act(arrays), found.action_space), policy.act(observation)
        assert found.action_space.contains(action)
        np.testing.assert_allclose(np.hstack(_flat(action)), np.hstack(_flat(expected)), rtol=1e-4, atol=1e-4)
        chosen.append(str(expected))
    assert len(set(chosen)) > 1, "the policy depends on the observation"


@pytest.mark.usefixtures("own_networks")
@pytest.mark.parametrize("case", CASES)
def test_exported_weights_are_those_of_the_network_by_name(tmp_path: Path, case: str) -> None:
    run, (*_, found, statistics) = stored_run(tmp_path, case), CASES[case]
    stored, path = load_version(run, "latest"), tmp_path / "weights.safetensors"
    path.write_bytes(export_version(stored, "safetensors"))
    config = stored.config
    policy = torch_policy(config.network, found.spec, outputs=config.algorithm.chosen.outputs, seed=0)
    policy.load(stored.parameters)
    expected = {name: parameter.detach().numpy() for name, parameter in policy.network.named_parameters()}
    expected |= {f"statistics/{name}": array for name, array in statistics.items()}
    tensors = load_file(path)
    assert tensors.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(tensors[name], array)


def _flat(action: Any) -> list[Any]:
    return [leaf for part in action for leaf in _flat(part)] if isinstance(action, tuple) else [np.ravel(action)]


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("statistics", [{}, OF_NUMBERS], ids=["raw", "normalised"])
def test_an_export_is_checked_on_numbers_that_occur(tmp_path: Path, statistics: Arrays) -> None:
    """A space with the largest float as its bound has no bound. For such a number a network's outputs are infinite."""
    found = interface(spaces.Box(-LARGEST, LARGEST, (4,), np.float32), spaces.Discrete(3))
    relu = "{mlp: {hiddenSizes: [16], activation: relu}}"
    run = stored_run(tmp_path, "wide", (PPO, relu, "", found, statistics))
    assert export_version(load_version(run, "latest"), "torch")
    observations = random_observations(found, statistics, 1000)["observation"]
    assert found.observation_space.contains(observations[0])
    assert np.abs(observations).max() < 20
    mean, deviation = (np.arange(4), 2.0) if statistics else (np.zeros(4), 1.0)
    np.testing.assert_allclose(observations[::2].mean(axis=0), mean, atol=0.5)
    np.testing.assert_allclose(observations[::2].std(axis=0), deviation, atol=0.3)


def test_a_network_in_bfloat16_is_exported_in_float32(tmp_path: Path) -> None:
    run = stored_run(tmp_path, "cnn")
    stored = load_version(run, "latest")
    cnn = stored.config.network.cnn
    assert cnn is not None
    lower = stored.config.network.model_copy(update={"cnn": cnn.model_copy(update={"precision": "bfloat16"})})
    path, images = tmp_path / "policy.onnx", np.zeros((2, 3, 40, 44), np.uint8)
    path.write_bytes(export_version(stored, "onnx"))
    expected = onnx_graph(path)({"observation": images})
    in_bfloat16 = replace(stored, config=stored.config.model_copy(update={"network": lower}))
    path.write_bytes(export_version(in_bfloat16, "onnx"))
    np.testing.assert_array_equal(onnx_graph(path)({"observation": images})["policy"], expected["policy"])


def test_a_network_that_onnx_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = load_version(stored_run(tmp_path, "mlp"), "latest")

    def lacks(*_: object, **__: object) -> None:
        raise RuntimeError("no operator erfcx\nand more")

    monkeypatch.setattr(torch.onnx, "export", lacks)
    with pytest.raises(ExportRefused, match=r"cannot be an ONNX graph: no operator erfcx\. The format torch"):
        export_version(stored, "onnx")


def test_weights_are_exported_by_the_names_of_the_networks_parameters(tmp_path: Path) -> None:
    run = stored_run(tmp_path, "normalised")
    path = tmp_path / "weights.safetensors"
    path.write_bytes(export_version(load_version(run, "latest"), "safetensors"))
    tensors = load_file(path)
    assert tensors["actor.0.weight"].shape == (16, 4)
    assert tensors["statistics/observation/mean"].tolist() == [0, 1, 2, 3]
    named = tmp_path / "named.safetensors"
    called = CliRunner().invoke(main, ["params", "export", str(run), "-o", str(named)])
    assert called.exit_code == 0, called.output
    for name, array in load_file(named).items():  # the order of the header's texts is not fixed
        np.testing.assert_array_equal(array, tensors[name])
    assert decode_version(named.read_bytes(), "a")[1] == decode_version(path.read_bytes(), "b")[1]


def test_the_command_writes_a_file_that_a_program_without_rlsrl_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    run = stored_run(tmp_path, "mlp")
    monkeypatch.chdir(tmp_path)
    called = CliRunner().invoke(main, ["export", str(run), "--format", "onnx", "--tag", "best"])
    assert called.exit_code == 0, called.output
    assert called.output.startswith("1.7: mlp-1.7.onnx (")
    assert called.output.endswith("bytes), equal to the policy on 1000 observations\n")
    program = (
        "import numpy, onnxruntime, sys\nsession = onnxruntime.InferenceSession('mlp-1.7.onnx')\n"
        "action, logits = session.run(None, {'observation': numpy.zeros((1, 4), numpy.float32)})\n"
        "print(action)\nsys.exit(any(name.startswith(('rlsrl', 'torch')) for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout in ("[2]\n", "[3]\n", "[4]\n")
    again = CliRunner().invoke(main, ["export", str(run), "--format", "onnx"])
    assert again.exit_code == 2
    assert "mlp-1.7.onnx exists; --force replaces it" in again.output
    forced = CliRunner().invoke(main, ["export", str(run), "--format", "safetensors", "-o", "no/where"])
    assert "the folder no does not exist" in forced.output


def test_exported_weights_become_a_graph_with_their_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run(tmp_path, "normalised")
    monkeypatch.chdir(tmp_path)
    algorithm, network, more, _, _ = CASES["normalised"]
    Path("experiment.yaml").write_text(EXPERIMENT.format(algorithm=algorithm, network=network, more=more))
    for arguments in (
        ["params", "export", str(run), "-o", "weights.safetensors"],
        ["export", "weights.safetensors", "--experiment", "experiment.yaml", "--format", "onnx"],
        ["export", str(run), "--format", "onnx"],
    ):
        called = CliRunner().invoke(main, arguments)
        assert called.exit_code == 0, called.output
    observations = {"observation": np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)}
    of_file, of_run = (onnx_graph(Path(name))(observations) for name in ("weights-1.7.onnx", "normalised-1.7.onnx"))
    np.testing.assert_array_equal(of_file["policy"], of_run["policy"])
    for more_arguments, says in (
        ([], "weights.safetensors is a file: name the experiment file that it belongs to"),
        (["--experiment", "experiment.yaml", "--tag", "best"], "contains one version: omit version and tag"),
        (["--experiment", "absent.yaml"], "absent.yaml"),
    ):
        called = CliRunner().invoke(main, ["export", "weights.safetensors", "--format", "torch", *more_arguments])
        assert called.exit_code == 2
        assert says in called.output


def test_a_program_exports_by_the_suffix(tmp_path: Path) -> None:
    policy, target = rlsrl.load(stored_run(tmp_path, "squashed")), tmp_path / "policy.pt2"
    for _ in range(2):
        policy.export(target)
    assert torch_program(target)({"observation": np.zeros((3, 4), np.float32)})["action"].shape == (3, 2)
    with pytest.raises(ValueError, match=r"has the suffix '\.pt'; allowed: \.pt2, \.onnx, \.safetensors"):
        policy.export(tmp_path / "policy.pt")


def test_a_network_that_cannot_be_traced_is_refused_with_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = load_version(stored_run(tmp_path, "mlp"), "latest")

    def forward(self: torch.nn.Module, observation: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features = observation["observation"]
        policy = self.actor(features if features.sum() > 0 else -features)
        return {"policy": policy, "value": self.critic(features).squeeze(-1)}

    monkeypatch.setattr("rlsrl.policies.networks.MlpActorCritic.forward", forward)
    with pytest.raises(ExportRefused, match=r"torch cannot trace the network: .* decide nothing by the values"):
        export_version(stored, "torch")


def test_an_exported_policy_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = load_version(stored_run(tmp_path, "mlp"), "latest")
    monkeypatch.setattr("rlsrl.policies.standalone.most_probable", lambda parts, outputs: [outputs.argmin(1)[:, None]])
    with pytest.raises(ExportRefused, match="the exported action differs from the policy's"):
        export_version(stored, "torch")
    monkeypatch.undo()
    monkeypatch.setattr(export, "TOLERANCE", -1.0)
    with pytest.raises(ExportRefused, match="the exported outputs differ from the policy's by up to"):
        export_version(stored, "torch")
