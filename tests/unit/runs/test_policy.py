"""Policies for Python programs: they act as the stored version does, and need torch only for networks that do."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import rlsrl
from rlsrl.api.load import load_text
from rlsrl.data.version import Version
from rlsrl.envs.codec import CodecError
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.local.run_folder import RunFolderError
from rlsrl.parameters.protocols import ParameterError
from rlsrl.policies.exported import CategoricalHead, ExportedActor, SquashedHead
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.stored_runs import BALANCES, CARTPOLE, LETS_FALL, LINEAR, make_run, push
from rlsrl.workers.build.common import torch_policy

(LAYER,) = LINEAR.layers
NUMBERS = LINEAR.observation["observation"]
OF_CARTPOLE = EnvironmentInterface(
    observation_space=spaces.Box(-np.inf, np.inf, (4,), np.float32), action_space=spaces.Discrete(2)
)


@pytest.fixture
def balance(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "balance", CARTPOLE)
    push(run, 10, LETS_FALL, exported=LINEAR, interface=OF_CARTPOLE, tag="first")
    push(run, 20, BALANCES, exported=LINEAR, interface=OF_CARTPOLE)
    return run


def length_of_an_episode(policy: rlsrl.TrainedPolicy) -> int:
    env = gymnasium.make("CartPole-v1")
    observation, _ = env.reset(seed=0)
    for step in range(1, 501):
        observation, _, terminated, truncated, _ = env.step(policy.act(observation))
        if terminated or truncated:
            return step
    raise AssertionError("an episode of CartPole has 500 steps at most")


def test_a_loaded_policy_plays_an_environment_of_the_users_own(balance: Path) -> None:
    newest = rlsrl.load(balance)
    assert newest.version == "1.20"
    assert newest.action_space == spaces.Discrete(2)
    assert newest.observation_space.shape == (4,)
    assert length_of_an_episode(newest) == 500
    for first in (rlsrl.load(str(balance), tag="first"), rlsrl.load(balance, version="1.10")):
        assert first.version == "1.10"
        assert length_of_an_episode(first) < 12


def test_sampled_actions_have_the_policys_probabilities_and_repeat_by_seed(balance: Path) -> None:
    def drawn(seed: int) -> list[int]:
        policy = rlsrl.load(balance, tag="first", seed=seed)
        return [int(policy.act(np.zeros(4), deterministic=False)) for _ in range(2000)]

    assert drawn(0) == drawn(0) != drawn(1)
    assert np.mean(drawn(0)) == pytest.approx(1 / (1 + np.e), abs=0.04)
    assert {int(rlsrl.load(balance, tag="first").act(np.zeros(4))) for _ in range(20)} == {0}


def test_a_network_without_exported_form_acts_as_its_exported_one(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", CARTPOLE)
    network = load_text(CARTPOLE).spec.policy.network
    policy = torch_policy(network, OF_CARTPOLE.spec, outputs="policyAndValue", seed=0)
    parameters, exported = policy.parameters(Version(1, 1)), policy.export()
    assert exported is not None
    for step, form in ((1, None), (2, exported)):
        push(run, step, parameters.vector, shapes=policy.layout.shapes, exported=form, interface=OF_CARTPOLE)
    by_network, by_numpy = rlsrl.load(run, version="1.1"), rlsrl.load(run, version="1.2")
    rng = np.random.default_rng(0)
    chosen = [(by_network.act(each), by_numpy.act(each)) for each in rng.standard_normal((200, 4))]
    assert all(left == right for left, right in chosen)
    assert len({int(left) for left, _ in chosen}) == 2


def test_masked_actions_are_never_chosen(tmp_path: Path) -> None:
    interface = EnvironmentInterface(
        observation_space=spaces.Dict({"legal": spaces.MultiBinary(2), "numbers": spaces.Box(-1, 1, (4,), np.float32)}),
        action_space=spaces.Discrete(2),
        action_mask="legal",
    )
    exported = ExportedActor(
        layout=LINEAR.layout,
        num_parameters=10,
        observation={"observation/numbers": NUMBERS},
        layers=(LAYER,),
        head=CategoricalHead(num_actions=2, mask="observation/legal"),
    )
    run = make_run(tmp_path / "run", CARTPOLE)
    push(run, 1, LETS_FALL, exported=exported, interface=interface)
    policy = rlsrl.load(run)
    for legal in ([1, 0], [0, 1]):
        observation = {"legal": np.array(legal, np.int8), "numbers": np.zeros(4, np.float32)}
        for deterministic in (True, False):
            chosen = [policy.act(observation, deterministic=deterministic) for _ in range(50)]
            assert {int(each) for each in chosen} == {legal.index(1)}


def test_actions_within_bounds_are_those_of_the_environment(tmp_path: Path) -> None:
    interface = EnvironmentInterface(
        observation_space=spaces.Box(-1, 1, (4,), np.float32),
        action_space=spaces.Box(-2.0, 6.0, (1,), np.float32),
        vector_actions="squashed",
    )
    exported = ExportedActor(
        layout=LINEAR.layout,
        num_parameters=10,
        observation={"observation": NUMBERS},
        layers=(LAYER,),
        head=SquashedHead(num_dimensions=1),
    )
    run = make_run(tmp_path / "run", CARTPOLE)
    push(run, 1, [1, 0, 0, 0, 0, 0, 0, 0, 0, -1], exported=exported, interface=interface)
    policy = rlsrl.load(run)
    for mean in (-0.5, 0.0, 0.9):
        action = policy.act(np.array([mean, 0, 0, 0], np.float32))
        np.testing.assert_allclose(action, [2 + 4 * np.tanh(mean)], rtol=1e-5)
        assert policy.action_space.contains(action)


def test_an_exported_policy_acts_without_torch(balance: Path) -> None:
    program = (
        f"import rlsrl, sys\npolicy = rlsrl.load({str(balance)!r})\nprint(policy.act([0.0, 0.0, 0.1, 0.0]))\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"


def test_importing_rlsrl_imports_nothing_else() -> None:
    program = "import rlsrl, sys; sys.exit(any(name.startswith(('rlsrl.', 'numpy', 'grpc')) for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = rlsrl.laod


def errors_in(text: str | None) -> set[str]:
    """Return the names below ``Raises:`` of a docstring."""
    _, _, raised = (text or "").partition("Raises:")
    return set(re.findall(r"(?m)^ +(\w+): ", raised))


def test_the_errors_of_the_interface_are_names_of_the_package() -> None:
    assert rlsrl.__all__ == sorted(rlsrl.__all__)
    for name in rlsrl.__all__:
        assert getattr(rlsrl, name).__name__ == name
    public = [getattr(rlsrl, name) for name in rlsrl.__all__]
    members = [member for each in public if isinstance(each, type) for member in vars(each).values()]
    raised = set().union(*(errors_in(each.__doc__) for each in [*public, *members]))
    assert {"SpecError", "ExportRefused", "NoVideo", "RunFolderError"} <= raised
    assert {name for name in raised if not hasattr(builtins, name)} <= set(rlsrl.__all__)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"tag": "frist"}, ParameterError, "did you mean 'first'"),
        ({"version": "1.11"}, ParameterError, "1.11"),
        ({"version": "eleven"}, ConfigurationError, "is not of the form"),
        ({"version": "1.10", "tag": "first"}, ConfigurationError, "exclude each other: give one of them"),
        ({"tag": "first", "experiment": "balance.yaml"}, ConfigurationError, "contains one version: omit version"),
    ],
)
def test_versions_that_are_not_there_are_named(
    balance: Path, arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        rlsrl.load(balance, **arguments)


def test_runs_that_are_not_there_are_named(balance: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (balance.parent / "runs").mkdir()
    balance.rename(balance.parent / "runs" / "balance")
    monkeypatch.chdir(balance.parent)
    assert rlsrl.load("balance").version == "1.20"
    with pytest.raises(RunFolderError, match=r"run ballance does not exist.*did you mean 'balance'"):
        rlsrl.load("ballance")
    with pytest.raises(RunFolderError, match="is not a run folder"):
        rlsrl.load("runs")


def test_a_wrong_observation_and_a_version_of_unknown_spaces_are_refused(balance: Path) -> None:
    with pytest.raises(ValueError, match=r"observation has the shape \(3,\); expected \(4,\)"):
        rlsrl.load(balance).act(np.zeros(3))
    push(balance, 30, BALANCES, exported=LINEAR)
    with pytest.raises(CodecError, match="is not an environment's interface"):
        rlsrl.load(balance)
