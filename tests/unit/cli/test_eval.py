"""``rlsrl eval`` on generated run folders: the played version, the options, and errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlsrl.api.load import dump, load_text
from rlsrl.api.resolve import ResolvedExperiment
from rlsrl.api.resolved import EvaluatorConfig
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.role_names import EVALUATOR
from rlsrl.cli import main
from rlsrl.cli.init import write_project
from rlsrl.data.version import Version
from rlsrl.envs.factory import EnvironmentSource, environment_spec
from rlsrl.parameters.layout import Shapes, layout_digest
from rlsrl.policies.exported import ExportedActor
from rlsrl.runs.stored_version import load_version
from rlsrl.testing import stored_runs
from rlsrl.testing.stored_runs import BALANCES, CARTPOLE, LETS_FALL, LINEAR, LINEAR_SHAPES
from rlsrl.workers.build.common import torch_policy
from rlsrl.workers.build.run_database import RESOLVED

PHASES = EnvironmentSource(factory="rlsrl.testing.environments:PhaseEnv")


def make_run(folder: Path, experiment: str = CARTPOLE) -> Path:
    return stored_runs.make_run(folder, experiment)


def push(
    run: Path,
    step: int,
    weights: Any,
    *,
    shapes: Shapes = LINEAR_SHAPES,
    program: ExportedActor | None = LINEAR,
    tag: str = "",
) -> None:
    stored_runs.push(run, step, weights, shapes=shapes, exported=program, tag=tag)


def run_eval(run: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["eval", str(run), *arguments])


def evaluated(run: Path, *arguments: str) -> Mapping[str, Any]:
    result = run_eval(run, "--json", *arguments)
    assert result.exit_code == 0, result.output
    value: Mapping[str, Any] = json.loads(result.stdout)
    return value


@pytest.fixture
def cartpole(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "balance")
    push(run, 10, LETS_FALL, tag="first")
    push(run, 20, BALANCES)
    return run


def test_the_last_version_is_played_by_default(cartpole: Path) -> None:
    best = evaluated(cartpole, "--episodes=4", "--environments=2")
    assert (best["version"], best["episodes"], best["environments"]) == ("1.20", 4, 2)
    assert (best["return_mean"], best["return_std"], best["return_min"], best["return_max"]) == (500, 0, 500, 500)
    for arguments in (["--version=1.10"], ["--tag=first"]):
        worst = evaluated(cartpole, *arguments)
        assert (worst["version"], worst["episodes"], worst["environments"]) == ("1.10", 100, 10)
        assert 8 <= worst["return_min"] <= worst["return_mean"] == worst["length_mean"] <= worst["return_max"] <= 11


def test_the_report_for_people(cartpole: Path) -> None:
    result = run_eval(cartpole, "--version=1.10", "--episodes=5", "--environments=3", "--seed=4")
    assert result.exit_code == 0
    assert "version 1.10, 6 episodes in 3 environments, greedy actions, seed 4" in result.output
    assert re.search(r"return: mean (8|9)\.\d\d, std \d\.\d\d, min \d\.00, max \d+\.00\n", result.output)


def test_a_step_limit_reports_the_episodes_that_ended_and_fails(cartpole: Path) -> None:
    arguments = ["--episodes=4", "--environments=2", "--max-steps=600"]
    missing = "2 of 4 episodes ended in 640 steps of each environment; environment 0 ended 1 of 2"
    result = run_eval(cartpole, *arguments)
    assert result.exit_code == 1
    assert "2 episodes in 2 environments" in result.stdout
    assert "return: mean 500.00" in result.stdout
    assert missing in result.stderr
    as_json = run_eval(cartpole, "--json", *arguments)
    assert as_json.exit_code == 1
    report = json.loads(as_json.stdout)
    assert (report["episodes"], report["return_mean"]) == (2, 500)
    assert report["unfinished"].startswith(missing)


def test_chosen_values_of_info_are_in_the_report(tmp_path: Path) -> None:
    environment = f'factory: "{PHASES.factory}", episodeInfo: [is_success]'
    experiment = CARTPOLE.replace("id: CartPole-v1", environment)
    run = make_run(tmp_path / "phases", experiment)
    policy = torch_policy(
        load_text(experiment).spec.policy.network, environment_spec(PHASES), outputs="policyAndValue", seed=0
    )
    parameters = policy.parameters(Version(1, 1))
    push(run, 1, parameters.vector, shapes=policy.layout.shapes, program=None)
    report = evaluated(run, "--episodes=4", "--environments=2")
    assert report["length_mean"] == 16
    assert report["episode_info"] == {"is_success": {"mean": 0.5, "count": 4}}
    text = run_eval(run, "--episodes=4", "--environments=2").output
    assert "length: mean 16.0 steps, is_success 0.5 in 4 episodes" in text


def test_equal_seeds_repeat_and_sampled_actions_differ_from_greedy_ones(cartpole: Path) -> None:
    arguments = ["--version=1.10", "--episodes=20"]
    greedy, again = evaluated(cartpole, *arguments), evaluated(cartpole, *arguments)
    assert greedy == again
    drawn, other = (evaluated(cartpole, *arguments, "--stochastic", f"--seed={seed}") for seed in (0, 1))
    assert drawn == evaluated(cartpole, *arguments, "--stochastic")
    assert drawn["return_mean"] > greedy["return_mean"]  # left with probability 0.73 falls later than left always
    assert {**other, "seed": 0} != drawn


def test_without_an_exported_actor_the_network_plays_identically(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    network = load_text(CARTPOLE).spec.policy.network
    policy = torch_policy(
        network, environment_spec(EnvironmentSource(id="CartPole-v1")), outputs="policyAndValue", seed=0
    )
    parameters = policy.parameters(Version(1, 1))
    program = policy.export()
    assert program is not None
    push(run, 1, parameters.vector, shapes=policy.layout.shapes, program=None, tag="by-network")
    push(run, 2, parameters.vector, shapes=policy.layout.shapes, program=program, tag="by-program")
    results = [evaluated(run, "--episodes=20", f"--tag={tag}") for tag in ("by-network", "by-program")]
    assert {**results[0], "version": ""} == {**results[1], "version": ""}


def test_an_exported_policy_is_played_without_torch(cartpole: Path) -> None:
    program = (
        "import sys\nfrom rlsrl.cli import main\n"
        f"main(['eval', {str(cartpole)!r}, '--version=1.10', '--episodes=3'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 episodes" in done.stdout


def test_the_users_own_environment_and_network_are_found_in_the_folder_it_is_called_from(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write_project(project, "mine")
    run = make_run(project / "run", (project / "experiment.yaml").read_text())
    # In a process of its own, since the modules' names must not stay behind in this one.
    program = f"""
import numpy as np, sys
sys.path.insert(0, "")
from rlsrl.api.load import load_file
from rlsrl.data.version import Version
from rlsrl.envs.factory import EnvironmentSource, environment_spec
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.workers.build.common import torch_policy
from pathlib import Path
spec = load_file(Path("experiment.yaml")).spec
env_spec = environment_spec(EnvironmentSource(factory="my_env:make"))
policy = torch_policy(spec.policy.network, env_spec, outputs="policyAndValue", seed=0)
FilesystemParameterDB(Path("run/parameters")).push({POLICY_NAME!r}, policy.parameters(Version(1, 5)))
for name in ("", {str(project)!r}):
    while name in sys.path: sys.path.remove(name)
sys.modules.pop("my_env"); sys.modules.pop("my_network")
from rlsrl.cli import main
main(["eval", "run", "--episodes=4"])
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=project,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "version 1.5, 4 episodes in 4 environments" in done.stdout
    assert run.exists()


def test_exported_weights_are_played_without_a_run(cartpole: Path, tmp_path: Path) -> None:
    weights, experiment = tmp_path / "elsewhere" / "weights.safetensors", tmp_path / "elsewhere" / "balance.yaml"
    weights.parent.mkdir()
    experiment.write_text(CARTPOLE)
    exported = CliRunner().invoke(main, ["params", "export", str(cartpole), "-o", str(weights)])
    assert exported.exit_code == 0, exported.output
    told = f"--experiment={experiment}"
    best = evaluated(weights, told, "--episodes=4", "--environments=2")
    assert (best["version"], best["return_mean"]) == ("1.20", 500)
    for arguments, says in (
        (["--tag=first", told], "contains one version"),
        ([f"--experiment={tmp_path / 'absent.yaml'}"], "absent.yaml"),
    ):
        result = run_eval(weights, *arguments)
        assert result.exit_code == 2
        assert says in result.output
    absent = run_eval(weights.with_name("absent.safetensors"), told)
    assert absent.exit_code == 2
    assert "cannot read" in absent.output
    weights.write_bytes(weights.read_bytes()[:-1])
    result = run_eval(weights, told)
    assert result.exit_code == 2
    assert str(weights) in result.output


def test_environments_that_wait_are_stepped_side_by_side(tmp_path: Path) -> None:
    together = f'{{factory: "rlsrl.testing.environments:TogetherEnv", kwargs: {{group: "{tmp_path}", number: 3}}}}'
    experiment = CARTPOLE.replace("{id: CartPole-v1}", together).replace(
        "environments: 8", "environments: 8, vectorization: threads"
    )
    run, weights, file = make_run(tmp_path / "run", experiment), tmp_path / "weights.safetensors", tmp_path / "it.yaml"
    push(run, 1, BALANCES)
    file.write_text(experiment)
    exported = CliRunner().invoke(main, ["params", "export", str(run), "-o", str(weights)])
    assert exported.exit_code == 0, exported.output
    for played, *given in ((run,), (weights, f"--experiment={file}")):
        report = evaluated(played, *given, "--episodes=6", "--environments=3")
        assert (report["episodes"], report["length_mean"], report["faults"]) == (6, 4, 0)


@pytest.mark.parametrize(
    "override", ["actors.vectorization=loop", "actors.vectorization=threads", "environment={http: {url: 'http://a'}}"]
)
def test_environments_are_stepped_as_the_runs_evaluators_step_them(tmp_path: Path, override: str) -> None:
    experiment = load_text(CARTPOLE, overrides=["evaluators={}", override])
    run = make_run(tmp_path / "run", dump(experiment))
    push(run, 1, BALANCES)
    config = ResolvedExperiment.from_json((run / RESOLVED).read_bytes()).configs[EVALUATOR]
    assert isinstance(config, EvaluatorConfig)
    assert load_version(run, "latest").side_by_side == config.side_by_side


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--version=1.11"], "1.11"),
        (["--version=eleven"], "is not of the form <attempt>.<step>"),
        (["--tag=frist"], "did you mean 'first'?"),
        (["--tag=first", "--version=1.10"], "exclude each other: give one of them"),
        (["--episodes=0"], "Invalid value for '--episodes'"),
    ],
)
def test_versions_that_cannot_be_played_are_named(cartpole: Path, arguments: list[str], says: str) -> None:
    result = run_eval(cartpole, *arguments)
    assert result.exit_code == 2
    assert says in result.output


def test_a_folder_that_holds_no_run_is_named(tmp_path: Path) -> None:
    result = run_eval(tmp_path)
    assert result.exit_code == 2
    assert "is not a run folder" in result.output
    (tmp_path / "resolved.json").write_text("{}")
    result = run_eval(tmp_path)
    assert result.exit_code == 2
    assert "has another format than this version of rlsrl writes" in result.output


def test_a_damaged_record_of_the_run_is_named(cartpole: Path) -> None:
    (cartpole / "controller.json").write_text('{"run_uid": 7}')
    result = run_eval(cartpole)
    assert result.exit_code == 2
    assert "controller.json is damaged" in result.output


def test_a_run_without_a_version_is_named(tmp_path: Path) -> None:
    result = run_eval(make_run(tmp_path / "run"))
    assert result.exit_code == 2
    assert POLICY_NAME in result.output


def test_a_missing_environment_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", CARTPOLE.replace("{id: CartPole-v1}", "{factory: 'gone_module_q:make'}"))
    push(run, 1, BALANCES)
    result = run_eval(run)
    assert result.exit_code == 2
    assert "no module named 'gone_module_q'" in result.output


def test_weights_of_another_network_are_refused(cartpole: Path) -> None:
    push(cartpole, 30, BALANCES, shapes={"another": (10,)})
    result = run_eval(cartpole)
    assert result.exit_code == 2
    assert f"weights of layout {layout_digest({'another': (10,)})}" in result.output


def test_evaluation_fails_if_episodes_do_not_end(cartpole: Path) -> None:
    result = run_eval(cartpole, "--max-steps=100")
    assert result.exit_code == 1
    assert "0 of 100 episodes ended in 128 steps of each environment" in result.output


FAULTY = """
import gymnasium

class Faulty(gymnasium.Wrapper):
    "Fails in every step, or in the third one only."

    def __init__(self, how, always):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.how, self.always, self.taken = how, always, 0

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        self.taken += 1
        if not self.always and self.taken != 3:
            return observation, reward, *rest
        if self.how == "raises":
            raise ValueError("the arm is stuck")
        return observation, float("nan"), *rest
"""


@pytest.fixture
def eval_faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    (tmp_path / "faulty_env.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty_env", raising=False)

    def run(how: str, *, always: bool) -> Result:
        kwargs = f"{{how: {how}, always: {str(always).lower()}}}"
        environment = f'{{factory: "faulty_env:Faulty", kwargs: {kwargs}, maxNonFinite: 50}}'
        folder = make_run(tmp_path / "run", CARTPOLE.replace("{id: CartPole-v1}", environment))
        push(folder, 10, LETS_FALL)
        return run_eval(folder, "--episodes=4", "--environments=2")

    return run


def test_the_traceback_of_an_environment_comes_before_the_error(eval_faulty: Callable[..., Result]) -> None:
    result = eval_faulty("raises", always=True)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    begin = lines.index("Traceback (most recent call last):")
    assert all(line.startswith("warning: environment_fault: ") for line in lines[:begin])
    assert 'faulty_env.py", line ' in lines[begin + 1]
    assert lines[-2] == "ValueError: the arm is stuck"
    assert lines[-1].startswith("Error: environment rank 0 raised ValueError: the arm is stuck; ")


def test_an_evaluation_of_nothing_but_nan_is_an_error(eval_faulty: Callable[..., Result]) -> None:
    result = eval_faulty("nan", always=True)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: environment rank ")
    assert "reward is nan at step 1 of its episode; 50 steps and resets in a row" in result.stderr


def test_faults_that_cut_episodes_are_reported(eval_faulty: Callable[..., Result]) -> None:
    result = eval_faulty("nan", always=False)
    assert result.exit_code == 0, result.output
    assert "4 episodes in 2 environments" in result.stdout
    assert "WARNING: 2 steps or resets of the environments were not finite or raised" in result.stdout
    assert "nan" not in result.stdout
    told = [line for line in result.stderr.splitlines() if line.startswith("warning: environment_fault: ")]
    assert len(told) == 2
    assert "rank 1, step 3, key reward, value nan" in told[1]


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    push(make_run(tmp_path / "runs" / "balance"), 1, BALANCES)
    result = run_eval(Path("balance"), "--episodes=1", "--environments=1")
    assert result.exit_code == 0, result.output
    assert result.output.startswith("runs/balance: version ")
    assert "did you mean 'balance'?" in run_eval(Path("balanse")).output
