"""``parameters.from``: runs that start from the weights or the state of another run, or from a file."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from rlsrl.api.pods import SOURCE_FOLDER_VARIABLE
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.spec import InitialParameters
from rlsrl.api.tokens import reading_token
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.layout import shapes_in, split
from rlsrl.parameters.protocols import TrainerState
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.live_runs import rlsrl_command
from rlsrl.testing.process_driver import DrivenProcess
from rlsrl.workers.build.initial_weights import read_initial_weights

FIRST = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": "first"},
    "spec": {
        "environment": {"id": "CartPole-v1"},
        "policy": {"network": {"mlp": {"hiddenSizes": [8]}}, "normalizeObservations": True},
        "algorithm": {"ppo": {"minibatchSize": 32, "epochs": 1, "normalizeRewards": True}},
        "actors": {"environments": 2, "rolloutLength": 16},
        "trainers": {"compile": "off"},
        "stop": {"trainSteps": 5},
    },
}
"""A run of five steps."""


def rlsrl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [rlsrl_command(), *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def run(folder: Path, name: str, *options: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run an experiment with other settings, by path; it has another seed."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(FIRST | {"metadata": {"name": name}}))
    changes = [f"--set={path.replace('__', '.')}={json.dumps(value)}" for path, value in settings.items()]
    return rlsrl(folder, "run", f"{name}.yaml", *options, *changes)


def database(folder: Path, name: str) -> FilesystemParameterDB:
    return FilesystemParameterDB(folder / "runs" / name / "parameters")


def weights(folder: Path, name: str, version: str = "latest") -> dict[str, np.ndarray[Any, Any]]:
    """Return a version's weights by name."""
    db = database(folder, name)
    parameters = db.get(POLICY_NAME, version)
    assert parameters is not None
    (info,) = (each for each in db.versions(POLICY_NAME) if each.version == parameters.version)
    shapes = shapes_in(info.metadata)
    assert shapes is not None
    return {**split(parameters.vector, shapes), **parameters.statistics}


def state(folder: Path, name: str, version: str) -> TrainerState:
    found = database(folder, name).load_state(POLICY_NAME, version)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``first``, whose newest version is 1.5, tagged ``good``."""
    folder = tmp_path_factory.mktemp("initial")
    done = run(folder, "first", parameters__everySteps=1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rlsrl(folder, "params", "tag", "first", "latest", "good").returncode == 0
    return folder


def test_a_run_starts_from_the_weights_and_statistics_of_another(trained: Path) -> None:
    done = run(trained, "second", seed=1, parameters__from={"run": "first", "tag": "good"}, stop__trainSteps=1)
    assert done.returncode == 0, done.stdout + done.stderr
    before, first = weights(trained, "first"), weights(trained, "second", "1.0")
    assert before.keys() == first.keys()
    assert before["observation/count"] > 0
    for name, array in before.items():
        np.testing.assert_array_equal(first[name], array, err_msg=name)
    after = weights(trained, "second")
    assert any(not np.array_equal(after[name], before[name]) for name in before), "it trains on"
    begun = state(trained, "second", "1.0")
    assert begun.values["learner"]["step"] == 0
    assert not any(array.any() for name, array in begun.arrays.items() if name.startswith("optimizer/"))
    recorded = yaml.safe_load((trained / "runs" / "second" / "experiment.resolved.yaml").read_text())
    assert recorded["spec"]["parameters"]["from"] == {"run": "first", "tag": "good", "what": "weights"}


def test_a_run_starts_from_the_whole_state_of_another(trained: Path) -> None:
    done = run(trained, "whole", seed=1, parameters__from={"run": "runs/first", "what": "all"}, stop__trainSteps=1)
    assert done.returncode == 0, done.stdout + done.stderr
    source, begun = state(trained, "first", "latest"), state(trained, "whole", "1.0")
    assert source.arrays.keys() == begun.arrays.keys()
    for name, array in source.arrays.items():
        np.testing.assert_array_equal(begun.arrays[name], array, err_msg=name)
    assert source.values["learner"]["step"] == 5
    assert begun.values["learner"]["step"] == begun.values["learner"]["env_steps"] == 0


def test_a_run_that_resumes_does_not_need_where_it_started(trained: Path) -> None:
    source = trained / "runs" / "gone"
    assert run(trained, "gone", stop__trainSteps=1).returncode == 0
    start = {"run": "gone"}
    assert run(trained, "heir", parameters__from=start, stop__trainSteps=1).returncode == 0
    source.rename(trained / "elsewhere")
    done = run(trained, "heir", parameters__from=start, stop__trainSteps=2)
    assert done.returncode == 0, done.stdout + done.stderr
    other = run(trained, "heir", parameters__from={"run": "first"}, stop__trainSteps=3)
    assert other.returncode == 2
    assert "spec.parameters.from" in other.stderr


def test_a_run_starts_from_a_file_of_rlsrl_or_of_another_program(trained: Path) -> None:
    exported = rlsrl(trained, "params", "export", "first", "good", "-o", "good.safetensors")
    assert exported.returncode == 0, exported.stderr
    done = run(trained, "of-file", seed=1, parameters__from={"file": "good.safetensors"}, stop__trainSteps=1)
    assert done.returncode == 0, done.stdout + done.stderr
    before, first = weights(trained, "first"), weights(trained, "of-file", "1.0")
    for name, array in before.items():
        np.testing.assert_array_equal(first[name], array, err_msg=name)
    foreign = {name: array for name, array in load_file(trained / "good.safetensors").items() if "/" not in name}
    save_file(foreign, trained / "foreign.safetensors")
    start = {"file": str(trained / "foreign.safetensors")}
    settings = {"parameters__from": start, "policy__normalizeObservations": False, "stop__trainSteps": 1}
    done = run(trained, "of-foreign", seed=1, **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    first = weights(trained, "of-foreign", "1.0")
    assert first.keys() == foreign.keys()
    for name, array in foreign.items():
        np.testing.assert_array_equal(first[name], array, err_msg=name)


def test_an_experiment_is_the_run_of_its_name_on_one_machine(trained: Path) -> None:
    start = {"experiment": "first", "tag": "good"}
    done = run(trained, "student", seed=1, parameters__from=start, stop__trainSteps=1)
    assert done.returncode == 0, done.stdout + done.stderr
    before, first = weights(trained, "first"), weights(trained, "student", "1.0")
    for name, array in before.items():
        np.testing.assert_array_equal(first[name], array, err_msg=name)


@pytest.fixture
def served(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The Secret with the way to the coordinator of ``first``, as the operator gives it to trainers' pods."""
    address = f"unix-abstract:rlsrl-test-{uuid.uuid4()}"
    (tmp_path / "address").write_text(address)
    (tmp_path / "reading-token").write_text(reading_token("the-token"))
    monkeypatch.setenv(SOURCE_FOLDER_VARIABLE, str(tmp_path))
    with closing(DrivenProcess("rlsrl.testing.parameter_process")) as server:
        server.call("serve", address=address, token="the-token", folder=str(trained / "runs" / "first" / "parameters"))
        yield tmp_path


@pytest.mark.parametrize("what", ["weights", "all"])
def test_a_trainer_reads_the_weights_of_another_experiment_from_its_coordinator(
    trained: Path, served: Path, what: Literal["weights", "all"]
) -> None:
    assert served
    found = read_initial_weights(InitialParameters(experiment="first", tag="good", what=what), POLICY_NAME)
    assert (found.origin, found.version) == ("version 1.5 of experiment first", "1.5")
    for name, array in weights(trained, "first", "good").items():
        given = found.weights.statistics if "/" in name else found.weights.tensors
        np.testing.assert_array_equal(given[name], array, err_msg=name)
    assert (found.state is None) == (what == "weights")


def test_a_version_that_the_experiment_lacks_is_a_wrong_spec(served: Path) -> None:
    assert served
    with pytest.raises(ConfigurationError, match=r"parameters\.from: .*has no version 1\.77; stored: "):
        read_initial_weights(InitialParameters(experiment="first", version="1.77"), POLICY_NAME)


def test_another_token_may_be_right_at_the_next_attempt(served: Path) -> None:
    (served / "reading-token").write_text("of an experiment that was deleted")
    says = "the coordinator of first does not serve its weights: UNAUTHENTICATED"
    with pytest.raises(ConnectionError, match=says):
        read_initial_weights(InitialParameters(experiment="first"), POLICY_NAME)


def test_a_missing_way_is_named(served: Path) -> None:
    (served / "reading-token").unlink()
    with pytest.raises(FileNotFoundError, match="reading-token"):
        read_initial_weights(InitialParameters(experiment="first"), POLICY_NAME)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"parameters__from": {"experiment": "frist"}}, "parameters.from.experiment: run"),
        ({"parameters__from": {"run": "frist"}}, "parameters.from.run: run"),
        ({"parameters__from": {"run": "frist"}}, "did you mean 'first'?"),
        ({"parameters__from": {"run": "first", "tag": "god"}}, "did you mean 'good'?"),
        ({"parameters__from": {"run": "first", "version": "1.77"}}, "has no version 1.77; stored: "),
        ({"parameters__from": {"file": "absent.safetensors"}}, "cannot be read: No such file"),
        ({"parameters__from": {"file": "first.yaml"}}, "first.yaml: no readable header"),
        ({"parameters__from": {"run": "first", "file": "a"}}, "exactly one of run, experiment, file"),
        ({"parameters__from": {"run": "first", "version": "1.5", "tag": "good"}}, "one of version and tag"),
        ({"parameters__from": {"file": "a", "what": "all"}}, "a file of weights has no state of a trainer"),
        ({"parameters__from": {"file": "a", "tag": "good"}}, "a file has one version, without tags"),
        ({"parameters__from": {"run": "first", "what": "weigths"}}, "weights or all"),
    ],
)
def test_what_does_not_exist_is_said_before_a_process_starts(
    trained: Path, settings: dict[str, Any], says: str
) -> None:
    done = run(trained, "refused", **settings)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert not (trained / "runs" / "refused" / "controller.json").exists(), "the corrected command starts a run"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"policy__network__mlp__hiddenSizes": [16]},
            "parameters.from: version 1.5 of {run} is of another network than policy.network: actor.0.weight is [8, 4]",
        ),
        ({"policy__normalizeObservations": False}, "has statistics of observations; allowed: true"),
        (
            {"parameters__from": {"run": "first", "what": "all"}, "algorithm__ppo__normalizeRewards": False},
            "parameters.from.what is all, and the state of version 1.5 of {run} does not fit this run's algorithm",
        ),
    ],
)
def test_what_does_not_fit_ends_the_run_with_the_reason(trained: Path, settings: dict[str, Any], says: str) -> None:
    fresh = ["--fresh"] if (trained / "runs" / "unfit").exists() else []
    done = run(trained, "unfit", *fresh, **{"parameters__from": {"run": "first"}, **settings, "restarts__budget": 0})
    assert done.returncode == 2, done.stdout + done.stderr
    assert says.format(run=trained / "runs" / "first") in done.stderr
