"""``rlsrl.train`` in programs of the user's own: runs that end, fail, are invalid and are interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rlsrl
from rlsrl.testing.tensorboard import shown_scalars
from rlsrl.testing.waiting import until

EXPERIMENT = """
EXPERIMENT = {
    "apiVersion": "rlsrl.dev/v1alpha1",
    "kind": "RLExperiment",
    "metadata": {"name": "mine"},
    "spec": {
        "environment": {"id": "CartPole-v1"},
        "algorithm": {"ppo": {"minibatchSize": 64}},
        "actors": {"environments": 2, "rolloutLength": 32},
        "trainers": {"compile": "off"},
        "stop": {"trainSteps": 3},
    },
}
"""


def call(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import rlsrl\n{EXPERIMENT}\n{program}"],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_program_trains_reads_the_figures_acts_and_goes_on(tmp_path: Path) -> None:
    done = call(
        tmp_path,
        """
run = rlsrl.train(EXPERIMENT, changes={"seed": 4, "spec.policy.network.mlp.hiddenSizes": [8]}, progress=False)
assert run.experiment.spec.seed == 4
assert run.summary["finished"] and run.summary["train_steps"] == 3, run.summary
assert run.metrics()["step"][-1] == 3, run.metrics()
assert run.tag("latest", "published") == run.policy(tag="published").version == "1.3"
assert run.versions()[-1].tags == ("published",) and run.versions()[-1].has_state, run.versions()
assert run.versions()[-1].env_steps == run.summary["env_steps"], run.versions()
(group,) = rlsrl.compare(run).groups
assert group.env_steps.value == run.summary["env_steps"] and group.runs[0].return_mean == run.summary["return_mean"]
assert run.plot(axis="seconds").stat().st_size > 1000
assert run.policy().act(run.policy().observation_space.sample()) in (0, 1)
again = rlsrl.train(EXPERIMENT, changes={"seed": 4, "spec.policy.network.mlp.hiddenSizes": [8]}, progress=False)
assert again.path == run.path and again.summary["train_steps"] == 3
further = {"seed": 4, "policy.network.mlp.hiddenSizes": [8], "stop.trainSteps": 5}
assert rlsrl.train(EXPERIMENT, changes=further).summary["train_steps"] == 5
""",
    )
    assert done.returncode == 0, done.stderr
    assert "the run had ended, and continues" in done.stdout
    assert "resuming" in done.stdout, "only the last call shows its progress"
    assert done.stdout.count("\n") < 12
    assert done.stdout.count("mine finished (trainSteps): ") == 1
    assert f"\nresults: {tmp_path / 'runs' / 'mine'}\n" in done.stdout
    assert rlsrl.Run(tmp_path / "runs" / "mine").summary is not None


def test_a_file_and_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "my_env.py").write_text(
        "import gymnasium\n\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    )
    write = """
import json, pathlib
EXPERIMENT["spec"]["environment"] = {"factory": "my_env:make"}
pathlib.Path("project/mine.yaml").write_text(json.dumps(EXPERIMENT))
"""
    done = call(tmp_path, f"{write}\nprint(rlsrl.train('project/mine.yaml', run_dir='elsewhere', progress=False).path)")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'elsewhere'}\n"


def test_failures_are_errors_with_their_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import gymnasium\n\n\nclass Broken(gymnasium.Wrapper):\n    def step(self, action):\n"
        "        raise ValueError('the gripper is stuck')\n\n\n"
        "def make():\n    return Broken(gymnasium.make('CartPole-v1'))\n"
    )
    done = call(
        tmp_path,
        """
EXPERIMENT["spec"]["environment"] = {"factory": "broken:make"}
EXPERIMENT["spec"]["restarts"] = {"budget": 0}
try:
    rlsrl.train(EXPERIMENT, progress=False)
except rlsrl.RunFailed as error:
    assert error.run.path.name == "mine"
    print(error)
""",
    )
    assert done.returncode == 0, done.stderr
    assert "the gripper is stuck" in done.stdout


def test_invalid_experiments_are_refused_by_field(tmp_path: Path) -> None:
    done = call(tmp_path, 'EXPERIMENT["spec"]["actors"]["enviroments"] = 3\nrlsrl.train(EXPERIMENT)')
    assert done.returncode == 1
    assert "spec.actors.enviroments: is not a field of spec.actors" in done.stderr
    assert "did you mean: spec.actors.environments" in done.stderr
    done = call(tmp_path, 'rlsrl.train(EXPERIMENT, changes={"sead": 3})')
    assert "did you mean: spec.seed" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_interruption_stores_a_checkpoint_and_the_next_call_resumes(tmp_path: Path) -> None:
    program = f"import rlsrl\n{EXPERIMENT}\nrlsrl.train(EXPERIMENT, changes={{'stop.trainSteps': 10**6}})"
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs" / "mine" / "metrics.jsonl"
    try:
        until(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first row of metrics")
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # its workers die with it
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "\nmine has not finished: " in shown
    assert shown.endswith("\nto resume: the same call\n")
    summary = rlsrl.Run(tmp_path / "runs" / "mine").summary
    assert summary is not None
    assert not summary["finished"]
    stop = summary["train_steps"] + 2
    done = call(
        tmp_path, f"print(rlsrl.train(EXPERIMENT, changes={{'stop.trainSteps': {stop}}}).summary['train_steps'])"
    )
    assert done.returncode == 0, done.stderr
    assert "attempt 2" in done.stdout
    assert done.stdout.endswith(f"\n{stop}\n")


def test_a_program_follows_a_run_logs_its_own_metrics_and_stops_it(tmp_path: Path) -> None:
    done = call(
        tmp_path,
        """
def follow(progress):
    seen.append(progress)
    progress.log({"score": 3 * progress.env_steps})
    if progress.train_steps >= 2 and progress.seconds_left is not None:
        assert progress.run.metrics()["step"].size
        progress.stop()

seen = []
run = rlsrl.train(EXPERIMENT, changes={"stop": {"envSteps": 10**9}}, progress=False, on_progress=follow)
assert run.summary["finished"] and run.summary["reason"] == "now", run.summary
assert seen[-1].seconds > 0 and seen[-1].seconds_left > 60, seen[-1]
assert seen[-1].version.startswith("1."), seen[-1]
own = run.metrics("own")
assert own["own/score"].tolist() == [3 * each.env_steps for each in seen], (own, seen)
assert own["step"].tolist() == [each.train_steps for each in seen]
""",
    )
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    shown = {name for name, _, _ in shown_scalars(tmp_path / "runs" / "mine")}
    assert {"own/score", "env_steps"} <= shown
    steps = (rlsrl.Run(tmp_path / "runs" / "mine").summary or {})["train_steps"]
    further = f"{{'stop': {{'envSteps': 10**9, 'trainSteps': {steps + 2}}}}}"
    done = call(tmp_path, f"print(rlsrl.train(EXPERIMENT, changes={further}, progress=False).summary['train_steps'])")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{steps + 2}\n"


def test_an_error_of_the_program_ends_the_run_cleanly_and_is_raised(tmp_path: Path) -> None:
    done = call(
        tmp_path,
        """
def follow(progress):
    raise LookupError("no such score")

changes = {"stop.trainSteps": 10**9}
try:
    rlsrl.train(EXPERIMENT, changes=changes, on_progress=follow)
except LookupError as error:
    print(error)
summary = rlsrl.Run("mine").summary
assert not summary["finished"] and summary["versions"]["last"], summary
assert rlsrl.train(EXPERIMENT, changes={"stop.trainSteps": summary["train_steps"] + 1}).summary["finished"]
""",
    )
    assert done.returncode == 0, done.stderr
    assert "The program that watches the run ends it." in done.stdout
    assert "\nno such score\n" in done.stdout


def test_another_thread_is_refused() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="in the main thread only"):
        pool.submit(rlsrl.train, {}).result()
