"""``rlsrl run examples/cartpole.yaml``, checked while it lives and after its end."""

from __future__ import annotations

import itertools
import json
import re

import gymnasium
import numpy as np
import pytest
import yaml
from matplotlib import image
from prometheus_client.parser import text_string_to_metric_families

import rlsrl
from rlsrl.runtime.metrics import Metrics
from rlsrl.testing.run_snapshot import WatchedRun
from rlsrl.testing.tensorboard import shown_scalars

SUMMARY_KEYS = {
    "env_steps",
    "train_steps",
    "return_mean",
    "wall_seconds",
    "env_steps_per_second",
    "ledger",
    "policy_lag",
    "versions",
}
SHOWN_BY = {
    "actor-0": ("rlsrl_env_steps_total", "rlsrl_rollouts_total", "rlsrl_ledger_transitions"),
    "trainer-0": ("rlsrl_train_steps_total", "rlsrl_policy_lag_steps_count", "rlsrl_durable_version_step"),
    "coordinator-0": ("rlsrl_workers", "rlsrl_joins_total"),
}
"""Some metrics of each worker during training."""
WITHOUT_TORCH = ("actor", "coordinator")


def imported_by(run: WatchedRun, worker: str) -> set[str]:
    """Return the top-level packages that a worker imported."""
    lines = (run.desk.run_folder / "logs" / f"{worker}.out").read_text().splitlines()
    modules = (line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:"))
    return {module.partition(".")[0] for module in modules}


# While it lived.


def test_every_worker_is_in_the_status(cartpole_run: WatchedRun) -> None:
    status = cartpole_run.snapshot.status
    assert status["phase"] == "training"
    assert {role: len(workers) for role, workers in status["roles"].items()} == {"actor": 1, "trainer": 1}
    assert status["totals"]["env_steps"] > 0


def test_top_shows_it_during_the_run_and_afterwards(cartpole_run: WatchedRun) -> None:
    assert cartpole_run.top.startswith("live: ")
    assert all(role in cartpole_run.top for role in ("actor", "trainer"))
    after = cartpole_run.desk.call("top", "live")
    assert after.returncode == 0
    assert after.stdout.rstrip().endswith("old: the run has ended")


@pytest.mark.parametrize("worker", SHOWN_BY)
def test_every_worker_shows_its_metrics(cartpole_run: WatchedRun, worker: str) -> None:
    families = text_string_to_metric_families(cartpole_run.snapshot.expositions[worker])
    shown = {sample.name: sample.value for family in families for sample in family.samples}
    for name in SHOWN_BY[worker]:
        assert name in shown
    declared = {each.name.removesuffix("_total") for each in Metrics.declared()}
    assert all(any(name.startswith(each) for each in declared) for name in shown if name.startswith("rlsrl_"))


@pytest.mark.parametrize("role", WITHOUT_TORCH)
def test_only_processes_that_need_torch_load_it(cartpole_run: WatchedRun, role: str) -> None:
    def is_torch(file: str) -> bool:
        return "libtorch" in file or "/torch/" in file

    assert any(map(is_torch, cartpole_run.snapshot.mapped_files["trainer"])), "this is how torch would show"
    assert not any(map(is_torch, cartpole_run.snapshot.mapped_files[role]))
    assert "torch" in imported_by(cartpole_run, "trainer-0"), "this is how an import would show"
    assert "numpy" in imported_by(cartpole_run, f"{role}-0")
    assert "torch" not in imported_by(cartpole_run, f"{role}-0")


def test_shared_memory_has_no_name(cartpole_run: WatchedRun) -> None:
    for role, files in cartpole_run.snapshot.mapped_files.items():
        assert not any(file.startswith("/dev/shm") for file in files), role
    assert any(file.startswith("/memfd:") for file in cartpole_run.snapshot.mapped_files["actor"])


def test_its_sockets_have_no_name_on_disk(cartpole_run: WatchedRun) -> None:
    names = {line.split()[-1] for line in cartpole_run.snapshot.sockets}
    uid = cartpole_run.desk.facts().run_uid
    assert names == {f"@rlsrl-{uid}-{what}" for what in ("coordinator", "trainer-0", "parameters")}


# After its end.


def test_it_stops_by_itself_and_reports(cartpole_run: WatchedRun) -> None:
    assert cartpole_run.exit_code == 0, cartpole_run.output
    assert "live finished (returnMean)" in cartpole_run.output
    for command in ("rlsrl eval runs/live", "rlsrl params list runs/live", "rlsrl plot runs/live"):
        assert re.search(rf"\n  \S*{command}\n", cartpole_run.output)
    assert "\x1b" not in cartpole_run.output, "no terminal, no colours"


def test_no_process_socket_or_memory_is_left(cartpole_run: WatchedRun) -> None:
    assert cartpole_run.desk.facts().leftovers() == []


def test_the_summary_contains_the_result(cartpole_run: WatchedRun) -> None:
    summary = cartpole_run.desk.facts().json("summary.json")
    assert summary.keys() >= SUMMARY_KEYS
    assert (summary["finished"], summary["reason"], summary["restarts"]) == (True, "returnMean", {})
    assert 475 <= summary["return_mean"] <= 500
    assert summary["env_steps"] == summary["ledger"]["trained"]
    # Eight environments, 128 steps; the step after an episode's end is no transition.
    assert 0.9 * 1024 * summary["train_steps"] < summary["env_steps"] <= 1024 * summary["train_steps"]
    assert 0 < summary["training_seconds"] < summary["wall_seconds"]
    assert summary["env_steps_per_second"] == pytest.approx(
        summary["env_steps"] / summary["training_seconds"], rel=0.01
    )
    assert 0 <= summary["policy_lag"] <= summary["max_policy_lag"] <= 1
    newest = cartpole_run.desk.facts().newest()
    assert newest is not None
    assert summary["versions"]["last"] == str(newest.version) == f"1.{summary['train_steps']}"


def test_the_ledger_accounts_for_every_transition_and_nothing_is_lost(cartpole_run: WatchedRun) -> None:
    ledger = cartpole_run.desk.facts().json("summary.json")["ledger"]
    assert ledger["balanced"]
    assert set(ledger["lost"].values()) == {0}
    assert ledger["dropped"].pop("end_of_run") <= 3 * 1024, "at most the next batches"
    assert set(ledger["dropped"].values()) == {0}
    assert ledger["in_buffer"] == ledger["unsettled"] == 0


def test_the_folder_contains_the_resolved_experiment(cartpole_run: WatchedRun) -> None:
    folder = cartpole_run.desk.run_folder
    given = (cartpole_run.desk.folder / "live.yaml").read_bytes()
    assert (folder / "experiment.yaml").read_bytes() == given
    resolved = yaml.safe_load((folder / "experiment.resolved.yaml").read_text())
    assert resolved["spec"]["algorithm"]["ppo"]["learningRate"] == 1e-3
    assert json.loads((folder / "resolved.json").read_text())["actor"]["num_actors"] == 1


def test_the_learning_curve_rises(cartpole_run: WatchedRun) -> None:
    rows = [json.loads(line) for line in (cartpole_run.desk.run_folder / "metrics.jsonl").read_text().splitlines()]
    for earlier, later in itertools.pairwise(rows):
        assert earlier["step"] < later["step"]
        assert earlier["wall"] < later["wall"]
        assert earlier["scalars"]["env_steps"] < later["scalars"]["env_steps"]
    summary = cartpole_run.desk.facts().json("summary.json")
    assert rows[-1]["step"] == summary["train_steps"]
    assert rows[-1]["scalars"]["return_mean"] == summary["return_mean"]
    assert {"train/loss", "train/entropy", "train/approx_kl"} <= rows[-1]["scalars"].keys()


def test_the_learning_curve_is_drawn(cartpole_run: WatchedRun) -> None:
    picture = image.imread(cartpole_run.desk.run_folder / "curve.png")
    assert min(picture.shape[:2]) > 200
    assert picture[..., :3].std() > 0.01, "not an empty page"


def test_tensorboard_would_show_the_learning_curve(cartpole_run: WatchedRun) -> None:
    scalars = shown_scalars(cartpole_run.desk.run_folder)
    shown = [(step, value) for tag, step, value in scalars if tag == "return_mean"]
    rows = [json.loads(line) for line in (cartpole_run.desk.run_folder / "metrics.jsonl").read_text().splitlines()]
    expected = [(row["step"], row["scalars"]["return_mean"]) for row in rows if "return_mean" in row["scalars"]]
    assert [step for step, _ in shown] == [step for step, _ in expected]
    assert [value for _, value in shown] == pytest.approx([value for _, value in expected])


def test_every_worker_has_its_log(cartpole_run: WatchedRun) -> None:
    for worker in ("actor-0", "trainer-0", "coordinator-0"):
        lines = (cartpole_run.desk.run_folder / "logs" / f"{worker}.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        assert {f"{entry['role']}-{entry['index']}" for entry in entries} == {worker}
        assert not [entry for entry in entries if entry["level"] in ("warning", "error", "critical")]


def test_a_second_call_only_reports_the_result(cartpole_run: WatchedRun) -> None:
    folder = cartpole_run.desk.run_folder
    before = {name: (folder / name).read_bytes() for name in ("controller.json", "metrics.jsonl", "summary.json")}
    again = cartpole_run.desk.call("run", "live.yaml")
    assert again.returncode == 0, again.stderr
    assert "runs/live has finished" in again.stdout
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_another_experiment_is_refused_by_field(cartpole_run: WatchedRun) -> None:
    refused = cartpole_run.desk.call("run", "live.yaml", "--seed", "5")
    assert refused.returncode == 2
    assert re.search(r"spec\.seed: [0-9]+ -> 5$", refused.stderr, re.MULTILINE)


def test_the_last_durable_version_plays_to_the_goal(cartpole_run: WatchedRun) -> None:
    played = cartpole_run.desk.call("eval", "runs/live", "--episodes", "100", "--json")
    assert played.returncode == 0, played.stderr
    result = json.loads(played.stdout)
    newest = cartpole_run.desk.facts().newest()
    assert newest is not None
    assert result["version"] == str(newest.version)
    assert (result["episodes"], result["greedy"]) == (100, True)
    assert result["return_mean"] >= 475


def test_the_last_version_plays_to_the_goal_in_a_program(cartpole_run: WatchedRun) -> None:
    policy, env = rlsrl.load(cartpole_run.desk.run_folder), gymnasium.make("CartPole-v1")
    lengths = []
    for seed in range(10):
        observation, _ = env.reset(seed=seed)
        for step in range(1, 501):
            observation, _, terminated, truncated, _ = env.step(policy.act(observation))
            if terminated or truncated:
                lengths.append(step)
                break
    assert np.mean(lengths) >= 475
    table = rlsrl.Run(cartpole_run.desk.run_folder).metrics()
    assert table["env_steps"][-1] == cartpole_run.desk.facts().json("summary.json")["env_steps"]
