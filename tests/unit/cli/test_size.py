import os
import pty
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rlsrl.cli import main
from rlsrl.local.replay_room import Room
from rlsrl.sizing.costs import MeasuredCosts
from rlsrl.testing.live_runs import rlsrl_command
from rlsrl.testing.waiting import DEADLINE_SECONDS
from rlsrl.testing.workloads import TYPICAL

EXAMPLES = Path(__file__).parents[3] / "examples"
CARTPOLE = EXAMPLES / "cartpole.yaml"


@pytest.fixture(autouse=True)
def typical_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates that do not depend on the machine that was measured last."""
    measured = MeasuredCosts(machine="a machine", date="2026-11-22", source="made up", costs=TYPICAL)
    monkeypatch.setattr("rlsrl.sizing.costs.measured_costs", lambda: measured)


def size(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["size", *map(str, arguments)])


def env_steps(result: Result) -> float:
    """Return the estimate in env steps a second."""
    found = re.search(r"about ([\d,]+) env steps/s", result.output)
    assert found, result.output
    return float(found[1].replace(",", ""))


def test_size_reports_speed_bottleneck_and_effective_changes() -> None:
    result = size(CARTPOLE, "--env-step-seconds", "1e-5", "--set", "algorithm.ppo.epochs=16")

    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert re.fullmatch(r"cartpole: about [\d,]+ env steps/s, [\d.]+ training steps/s", lines[0])
    assert lines[1] == "hardware: each worker is a pod with one core and a link of 10 Gbit/s"
    assert lines[2] == "environment: 10 us a step (--env-step-seconds)"
    assert lines[3] == "costs: measured on a machine, 2026-11-22"
    assert lines[4].startswith("limited by: trainers, at ")
    assert lines[5].startswith("what helps: ")
    assert lines[6].split()[:3] == ["role", "workers", "busy"]
    assert [line.split()[0] for line in lines[7:10]] == ["actor", "trainer", "coordinator"]
    assert any(line.startswith("helps: --set algorithm.ppo.minibatchSize=512 ") for line in lines[10:])
    assert any(line.startswith("does not help: ") and "trainers.replicas=2" in line for line in lines[10:])


def test_the_lines_fit_100_columns_of_a_terminal() -> None:
    """A pipe gets one line for each fact."""
    ours, its = pty.openpty()
    with os.fdopen(ours, "rb") as terminal:
        done = subprocess.Popen(
            [rlsrl_command(), "size", str(CARTPOLE), "--env-step-seconds=1e-5"],
            stdout=its,
            env={**os.environ, "COLUMNS": "200"},
        )
        os.close(its)
        lines = []
        with suppress(OSError):  # EIO: the command has closed its end
            for line in terminal:
                lines.append(line)  # noqa: PERF402 - keeps the lines before the error
        assert done.wait(DEADLINE_SECONDS) == 0
    assert any(line.startswith(b"does not help: ") for line in lines)
    assert max(len(line.rstrip()) for line in lines) <= 100


def test_an_environment_of_unknown_speed_is_stepped() -> None:
    result = size(CARTPOLE, "--cores", "2")

    assert result.exit_code == 0, result.output
    assert "hardware: one machine, 2 cores that all workers share" in result.stdout
    assert re.search(r"environment: .* us a step.* \(one environment measured here for 1 s\)", result.stdout)


def test_slow_environments_limit_the_speed_and_more_actors_help() -> None:
    result = size(CARTPOLE, "--env-step-seconds", "0.01", "--set", "actors.replicas=2")

    assert env_steps(result) == pytest.approx(200, rel=0.05)
    assert "limited by: actors, at 100%" in result.stdout
    assert re.search(r"helps: --set actors.replicas=4  \+(9|10)\d%", result.stdout)


def test_fields_can_be_set_and_a_trainer_s_speed_given() -> None:
    slow = size(CARTPOLE, "--env-step-seconds", "1e-5", "--minibatch-seconds", "0.1", "--set", "algorithm.ppo.epochs=1")

    # A batch of 8 x 128 transitions is 4 minibatches of 256.
    assert env_steps(slow) == pytest.approx(1024 / 0.4, rel=0.02)


def test_policy_and_buffer_workers_have_their_rows() -> None:
    # With a batch as wide as the actor, whose slot without a ring then fills one batch and not two.
    batch = ("--set", "trainers.batchEnvironments=16")
    policy = size(EXAMPLES / "cartpole-policy-worker.yaml", "--env-step-seconds", "1e-5", *batch)
    buffer = size(EXAMPLES / "cartpole-buffer-worker.yaml", "--env-step-seconds", "1e-5")

    assert re.search(r"^policy +1 ", policy.stdout, re.MULTILINE)
    assert re.search(
        r"helps: --set policyWorkers=null --set actors.ringSize=1 .*actors evaluate the network", policy.stdout
    )
    assert re.search(r"^buffer +\d+ ", buffer.stdout, re.MULTILINE)


def test_a_replay_store_is_sized(tmp_path: Path) -> None:
    file = tmp_path / "replay.yaml"
    file.write_text(
        """
        apiVersion: rlsrl.dev/v1alpha1
        kind: RLExperiment
        metadata: {name: replay}
        spec:
          environment: {id: CartPole-v1}
          algorithm:
            custom: {factory: "my:Own", needs: {minibatchSize: 64, outputs: actionValues, replay: {capacity: 2000000}}}
          actors: {environments: 8, rolloutLength: 32}
          pacing: {trainStepsPerEnvStep: 1}
          stop: {envSteps: 1000}
        """
    )
    of_one: list[int] = []
    for changes in ((), ("--set", "algorithm.custom.normalizeRewards=true")):
        result = size(file, "--env-step-seconds", "1e-5", *changes)
        assert result.exit_code == 0, result.output
        found = re.search(r"(?m)^replay: 2,000,000 transitions x (\d\d) bytes = \d\d\.\d MiB$", result.stdout)
        assert found is not None
        of_one.append(int(found[1]))
    assert of_one[1] - of_one[0] == 4, "the discounted return"
    result = size(file, "--env-step-seconds", "1e-5", "--set", "trainers.replicas=2", "--set", "actors.replicas=2")
    assert result.exit_code == 0, result.output
    assert re.search(r"(?m)^replay: 2,000,000 transitions x \d\d bytes = \d\d\.\d MiB in 2 files$", result.stdout)
    assert "here: spec.algorithm.custom" not in result.stdout, "pods are elsewhere"


def test_replay_stores_without_room_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Room(folder=tmp_path, num_bytes=4096, is_memory=False, memory=0)
    monkeypatch.setattr("rlsrl.local.replay_room.room_in", lambda folder, role: full)
    here = size(EXAMPLES / "cartpole-dqn.yaml", "--env-step-seconds", "1e-5", "--cores", "2")
    assert re.search(r"(?m)^cannot work here: spec\.algorithm\.dqn\.replay\.capacity: 100,000 tr", here.stdout)
    assert re.search(r"(?m)^slow here: spec\.algorithm\.dqn\.replay\.capacity: 100,000 transitions", here.stdout)
    container = "{name: worker, resources: {limits: {ephemeral-storage: 1Mi}}}"
    template = f"trainers.podTemplate={{spec: {{containers: [{container}]}}}}"
    pods = size(EXAMPLES / "cartpole-dqn.yaml", "--env-step-seconds", "1e-5", "--set", template)
    assert re.search(r"(?m)^cannot work: spec\.algorithm\.dqn\.replay\.capacity: 100,000 transitions", pods.stdout)


def test_the_user_s_own_modules_are_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "my_sized_env.py").write_text(
        "import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
    )
    file = tmp_path / "experiment.yaml"
    file.write_text(CARTPOLE.read_text().replace("id: CartPole-v1", "factory: my_sized_env:make"))

    result = size(file, "--env-step-seconds", "1e-5")

    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "environment.id=CartPol-v1"], "did you mean 'CartPole-v1'"),
        (["--set", "actors.replicas=0"], "spec.actors.replicas: value 0 is out of range"),
        (["--cores", "2", "--bandwidth", "1"], "leave --bandwidth out"),
        (["--cores", "0"], "0 is not in the range x>=1"),
        (["--env-step-seconds", "0"], "0.0 is not in the range x>0"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: list[str], said: str) -> None:
    result = size(CARTPOLE, *arguments)

    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    result = size(tmp_path / "absent.yaml")

    assert (result.exit_code, "cannot be read: No such file" in result.stderr) == (2, True)


def test_recurrent_networks_need_the_time_of_a_minibatch() -> None:
    example = (EXAMPLES / "delayed-cue.yaml", "--env-step-seconds", "1e-5")

    refused = size(*example)
    estimated = size(*example, "--minibatch-seconds", "0.01")

    assert refused.exit_code == 2
    assert "the costs of recurrent networks have not been measured: pass --minibatch-seconds" in refused.output
    assert estimated.exit_code == 0, estimated.output
    assert env_steps(estimated) < 26_000, "an optimizer step of 10 ms takes 256 / 4 transitions"
