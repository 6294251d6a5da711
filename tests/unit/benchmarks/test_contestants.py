"""Contestants: their commands, and the values read from their output."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from contestants import OUTPUT, PEERS, RUN, ContestantFailed, Rlsrl
from figures import JAX, SAMPLE_FACTORY, SINGLE_FILE, SINGLE_FILE_COMPILED
from peer_environments import REQUIREMENTS, cache_folder, home_of
from workloads import CORES, WORKLOADS

REPOSITORY = Path(__file__).parents[3]
PEER = next(peer for peer in PEERS if peer.name == SINGLE_FILE)


def row(step: int, wall: float, env_steps: float, **scalars: float) -> str:
    return json.dumps({"step": step, "wall": wall, "role": "trainer", "scalars": {"env_steps": env_steps, **scalars}})


def test_a_peers_progress_is_what_it_prints_as_json(tmp_path: Path) -> None:
    told = tmp_path / OUTPUT
    assert PEER.progress(tmp_path).points == []
    told.write_text(
        'a warning\n{"wall": 1.5, "env_steps": 0, "return_mean": NaN}\n'
        '{"wall": 2.5, "env_steps": 1024, "return_mean": 20.5}\n{"wall": 3.5, "env_st'
    )
    progress = PEER.progress(tmp_path)
    assert progress.points == [(1.5, 0), (2.5, 1024)], "the last line is not whole yet"
    assert progress.return_means == [None, 20.5], "no episode had ended first"


def test_output_of_a_peers_other_processes_is_ignored(tmp_path: Path) -> None:
    line = '{"wall": 2.5, "env_steps": 1024, "return_mean": 20.5}'
    (tmp_path / OUTPUT).write_text(f"{line}[2026] a worker has ended\n{line[:20]}[2026] another{line[20:]}\n7 of 8\n")
    assert PEER.progress(tmp_path).points == [(2.5, 1024)]


def test_rlsrls_progress_is_its_learning_curve(tmp_path: Path) -> None:
    assert Rlsrl().progress(tmp_path).points == []
    (tmp_path / RUN).mkdir()
    rows = [row(1, 10.0, 1024.0), row(2, 11.0, 2048.0, return_mean=21.0)]
    evaluation = json.dumps({"step": 2, "wall": 11.5, "role": "evaluator", "scalars": {"eval/return_mean": 30.0}})
    (tmp_path / RUN / "metrics.jsonl").write_text("\n".join([*rows, evaluation, '{"step": 3']))
    progress = Rlsrl().progress(tmp_path)
    assert progress.points == [(10.0, 1024.0), (11.0, 2048.0)]
    assert progress.return_means == [None, 21.0]


def test_a_contestant_has_started_once_it_trains_and_can_be_measured(tmp_path: Path) -> None:
    (tmp_path / OUTPUT).write_text('{"wall": 1.5, "env_steps": 0, "return_mean": NaN}\n')
    assert not PEER.has_started(tmp_path)
    (tmp_path / OUTPUT).write_text('{"wall": 1.5, "env_steps": 1024, "return_mean": NaN}\n')
    assert PEER.has_started(tmp_path)
    (tmp_path / RUN).mkdir()
    (tmp_path / RUN / "metrics.jsonl").write_text(f"{row(1, 10.0, 1024.0)}\n")
    assert not Rlsrl().has_started(tmp_path), "no metrics address is published yet"
    (tmp_path / RUN / "status.json").write_text('{"roles": {"actor": [{"index": 0, "endpoints": {}}]}}')
    assert Rlsrl().has_started(tmp_path)


def test_a_run_with_an_unbalanced_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContestantFailed, match="left no summary"):
        Rlsrl().check(tmp_path)
    (tmp_path / RUN).mkdir()
    summary = tmp_path / RUN / "summary.json"
    summary.write_text(json.dumps({"ledger": {"balanced": False, "problem": "one is missing"}}))
    with pytest.raises(ContestantFailed, match="one is missing"):
        Rlsrl().check(tmp_path)
    summary.write_text(json.dumps({"ledger": {"balanced": True}}))
    Rlsrl().check(tmp_path)


def test_peers_try_threads_and_processes() -> None:
    settings = PEER.settings(WORKLOADS["W1"])
    assert {"1", "2", str(CORES)} == {threads for *_, threads in settings}
    assert {setting[:2] for setting in settings} == {("--vector", vector) for vector in ("sync", "async")}
    assert {setting[1] for setting in PEER.settings(WORKLOADS["B1N"])} == {"native"}
    assert Rlsrl().settings(WORKLOADS["W1"]) == [()]


def test_peers_that_replay_try_threads_alone() -> None:
    assert PEER.settings(WORKLOADS["S1"]) == [("--threads", str(number)) for number in sorted({1, 2, CORES})]
    command = PEER.command(WORKLOADS["S1"], ("--threads", "1"), Path(), seed=2)
    assert Path(command[1]).name == "reference_twin_critics.py"
    assert command[2:].count("--algorithm") == 1
    assert command[-2:] == ["--threads", "1"]


def test_a_compiled_single_file_is_measured_with_replay_alone() -> None:
    (compiled,) = [peer for peer in PEERS if peer.name == SINGLE_FILE_COMPILED]
    assert compiled.unable(WORKLOADS["W1"]) == "single-file-compiled is not measured with ppo"
    for name, program in {"S1": "reference_twin_critics.py", "D1": "reference_dqn.py"}.items():
        assert compiled.unable(WORKLOADS[name]) is None
        command = compiled.command(WORKLOADS[name], (), Path(), seed=1)
        assert Path(command[1]).name == program
        assert "--compile" in command
    assert compiled.versions.keys() >= {"torch"}


@pytest.mark.parametrize("name", ["S1", "D1", "D2"])
def test_programs_know_the_options_of_workloads_that_replay(name: str) -> None:
    """Each option is one that the program's parser adds, so that no run fails after minutes."""
    workload = WORKLOADS[name]
    for peer in PEERS:
        if peer.unable(workload) is None:
            source = (REPOSITORY / "benchmarks" / peer.programs[workload.algorithm][0]).read_text()
            words = [word for word in peer.inputs(workload, seed=1) if word.startswith("--")]
            assert all(f'"{word}"' in source for word in words), (peer.name, words)


def test_more_processes_are_tried_for_environments_that_wait() -> None:
    (factory,) = [peer for peer in PEERS if peer.name == SAMPLE_FACTORY]
    assert ("--workers", "16") in factory.settings(WORKLOADS["W4-16"])
    assert set(factory.settings(WORKLOADS["W1"])) < set(factory.settings(WORKLOADS["W4-16"]))


def test_a_peer_without_the_environment_names_it() -> None:
    peers = {peer.name: peer for peer in PEERS}
    assert peers[SAMPLE_FACTORY].unable(WORKLOADS["R1"]) is None
    why = peers[SAMPLE_FACTORY].unable(WORKLOADS["W3"])
    measured = "CartPole-v1, ALE/Pong-v5, CartPole-without-velocities"
    assert why == f"sample-factory is measured only on {measured}: its Gymnasium has no HalfCheetah-v5"
    others = [peer for peer in PEERS if "ppo" in peer.programs and peer.name not in (SAMPLE_FACTORY, JAX)]
    assert all(peer.unable(WORKLOADS["W3"]) is None for peer in others)


def test_jax_takes_part_where_its_environment_is_the_same() -> None:
    (jax,) = [peer for peer in PEERS if peer.name == JAX]
    assert [name for name, workload in WORKLOADS.items() if jax.unable(workload) is None] == ["W1", "B1", "B1N", "W1N"]
    assert jax.unable(WORKLOADS["R1"]) == "jax is measured only in W1, W1N, B1, B1N"
    source = (REPOSITORY / "benchmarks" / "jax_ppo.py").read_text()
    words = [word.removeprefix("--") for word in jax.inputs(WORKLOADS["W1N"], seed=1) if word.startswith("--")]
    assert all(f'"--{word}"' in source or f'"{word}":' in source for word in words), words
    assert [*jax.settings(WORKLOADS["B1N"])] == [("--threads", str(number)) for number in sorted({1, 2, CORES})]


def test_rlsrl_is_started_as_a_user_starts_it(tmp_path: Path) -> None:
    command = Rlsrl().command(WORKLOADS["W4-16"], (), tmp_path, seed=3)
    assert [Path(command[0]).name, command[1]] == ["rlsrl", "run"]
    assert "seed: 3" in Path(command[2]).read_text()
    assert str(REPOSITORY / "benchmarks") in Rlsrl().environment()["PYTHONPATH"], "its actors find the environments"


def test_each_peer_and_each_set_of_pins_has_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    homes = {home_of(peer.pins or peer.name) for peer in PEERS}
    assert len(homes) == len([peer for peer in PEERS if not peer.pins])
    assert all(home.parent == tmp_path / "rlsrl" / "benchmarks" for home in homes)
    monkeypatch.setattr("peer_environments.REQUIREMENTS", tmp_path)
    (tmp_path / "single-file.txt").write_text("torch==1.0\n")
    assert home_of("single-file") not in homes


def test_environments_are_in_the_users_cache() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/rlsrl/benchmarks")
    assert cache_folder({"XDG_CACHE_HOME": ""}) == Path.home() / ".cache" / "rlsrl" / "benchmarks"


@pytest.mark.parametrize("peer", [peer.name for peer in PEERS if not peer.pins])
def test_pins_agree_with_this_environment(peer: str) -> None:
    def pins(path: Path) -> dict[str, str]:
        return dict(re.findall(r"(?m)^([A-Za-z0-9_.-]+)==(\S+)$", path.read_text()))

    ours, theirs = pins(REPOSITORY / "constraints.txt"), pins(REQUIREMENTS / f"{peer}.txt")
    telling = {"jax", "numpy"} if peer == JAX else {"torch", "numpy", "gymnasium"}
    assert telling <= theirs.keys()
    shared = ("torch",) if peer == SAMPLE_FACTORY else tuple(theirs.keys() & ours.keys())
    assert {name: theirs[name] for name in shared} == {name: ours[name] for name in shared}
    (versions,) = [each.versions for each in PEERS if each.name == peer]
    assert telling <= versions.keys()
