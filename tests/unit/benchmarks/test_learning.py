"""A comparison of learning with stand-ins for the programs: runs made, runs kept, verdicts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import learning
import pytest
from contestants import OUTPUT, RUN, ContestantFailed, Peer, Progress, Rlsrl
from figures import RLSRL, SINGLE_FILE, STABLE_BASELINES3
from hindrances import slow_trainer
from learning import (
    COMPARISONS,
    HINDERED,
    Comparison,
    Program,
    Runs,
    compare,
    control_of,
    hold,
    make_runs,
    programs_held,
    programs_of,
)
from workloads import WORKLOADS

from rlsrl.testing.waiting import until

STAND_IN = """
import json, sys
said = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with open({log!r}, "a") as log:
    log.write({name!r} + " " + said["--seed"] + "\\n")
for part in (0.5, 1.0):
    steps = part * ({steps} + 10 * int(said["--seed"]))
    print(json.dumps({{"wall": 1.0, "env_steps": steps, "return_mean": 500.0 * part}}), flush=True)
"""


@pytest.fixture
def made(tmp_path: Path) -> Callable[[], list[str]]:
    """Return the runs made so far."""
    log = tmp_path / "log"
    log.touch()
    return lambda: log.read_text().splitlines()


Stage = Callable[..., Comparison]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Replace the programs by stand-ins with fixed numbers of steps, plus ten for each seed."""

    def play(*, rlsrl: int, single: int, hindered: int, seeds: int = 3, most_seeds: int = 3) -> Comparison:
        comparison = replace(COMPARISONS["cartpole"], seeds=seeds, most_seeds=most_seeds, run_seconds=30.0)

        def program(name: str, steps: int) -> Program:
            text = STAND_IN.format(log=str(tmp_path / "log"), name=name, steps=steps)
            (path := tmp_path / f"{name}.py").write_text(text)
            contestant = Peer(
                name=name, programs={"ppo": (str(path),)}, ways=((),), python=lambda name: Path(sys.executable)
            )
            # Stand-ins have no pins, and so no versions.
            monkeypatch.setattr(Peer, "versions", {})
            return Program(name=name, contestant=contestant, workload=comparison.workload, at_once=2)

        two = program(RLSRL, rlsrl), program(SINGLE_FILE, single)
        monkeypatch.setattr(learning, "programs_of", lambda _: two)
        monkeypatch.setattr(learning, "control_of", lambda _: program(HINDERED, hindered))
        return comparison

    return play


def judged(comparison: Comparison, folder: Path, *, restart: bool = False) -> tuple[bool, dict[str, Any]]:
    good = compare("cartpole", restart=restart, folder=folder, comparisons={"cartpole": comparison})
    return good, json.loads((folder / "learning-cartpole.json").read_text())


def test_equal_numbers_of_steps_are_alike(tmp_path: Path, stage: Stage, made: Callable[[], list[str]]) -> None:
    good, kept = judged(stage(rlsrl=10_000, single=10_100, hindered=50_000), tmp_path)
    assert good
    assert (kept["verdict"], kept["control"]["verdict"]) == ("alike", "higher")
    assert sorted(made()) == sorted(f"{name} {seed}" for name in (RLSRL, SINGLE_FILE, HINDERED) for seed in (1, 2, 3))


def test_the_single_file_is_held_against_another_library(
    tmp_path: Path, stage: Stage, made: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = stage(rlsrl=1, single=10_000, hindered=1)
    _, single = learning.programs_of(comparison)
    other = replace(single, name=STABLE_BASELINES3)
    monkeypatch.setattr(learning, "programs_held", lambda _: (single, other))
    assert hold("cartpole", folder=tmp_path, comparisons={"cartpole": comparison})
    kept = json.loads((tmp_path / "learning-cartpole-single-file.json").read_text())
    assert (kept["verdict"], [*kept["programs"]]) == ("alike", [SINGLE_FILE, STABLE_BASELINES3])
    assert sorted(made()) == sorted(f"{SINGLE_FILE} {seed}" for seed in (1, 1, 2, 2, 3, 3))


def text_of(program: Path) -> str:
    """Return the text of a program, with that of the programs that it imports."""
    own = program.read_text()
    imported = (program.with_name(f"{name}.py") for name in re.findall(r"^from (\w+) import", own, re.MULTILINE))
    return own + "".join(path.read_text() for path in imported if path.exists())


@pytest.mark.parametrize("name", COMPARISONS)
def test_programs_that_are_held_know_their_options(name: str) -> None:
    comparison = COMPARISONS[name]
    for held in programs_held(comparison):
        _, program, *words = held.contestant.command(held.workload, held.setting, Path(), seed=1)
        options = {word.replace("--no-", "--") for word in words if word.startswith("--")}
        assert {option for option in options if f'"{option}"' not in text_of(Path(program))} == set()
        assert held.setting in held.contestant.settings(held.workload)
        assert ("--plain" in options) == (comparison.workload.algorithm == "dqn")


def test_twice_as_many_steps_are_worse(tmp_path: Path, stage: Stage) -> None:
    good, kept = judged(stage(rlsrl=20_000, single=10_000, hindered=50_000), tmp_path)
    assert not good
    assert kept["verdict"] == "higher"


def test_a_control_that_learns_better_makes_the_check_worthless(tmp_path: Path, stage: Stage) -> None:
    good, kept = judged(stage(rlsrl=10_000, single=10_000, hindered=5_000), tmp_path)
    assert not good
    assert (kept["verdict"], kept["control"]["verdict"]) == ("alike", "lower")


def test_with_a_goal_more_is_worse_and_without_one_less() -> None:
    assert {name: each.worse for name, each in COMPARISONS.items()} == {
        "cartpole": "higher",
        "cartpole-recurrent": "higher",
        "halfcheetah": "lower",
        "pong": "lower",
        "cartpole-dqn": "higher",
        "cartpole-dqn-slowed": "higher",
        "cartpole-dqn-killed": "higher",
        "pendulum-sac": "higher",
        "pendulum-td3": "higher",
    }


def test_with_evaluations_the_figure_is_the_first_that_reaches_the_goal() -> None:
    comparison = COMPARISONS["cartpole-dqn"]
    evaluations = [(1000.0, 20.0), (2000.0, 475.0), (3000.0, 100.0), (4000.0, 500.0)]
    progress = Progress(points=[(1.0, 50_000.0)], return_means=[100.0], evaluations=evaluations)
    assert comparison.figure(progress, total_steps=50_000) == 2000.0
    assert comparison.figure(progress, total_steps=1500) == 1500.0
    missed = replace(progress, evaluations=evaluations[:1])
    assert [comparison.figure(missed, total_steps=steps) for steps in (50_000, 100_000)] == [50_000.0, 100_000.0]
    assert "20 episodes without exploration, played every 1,000 env steps" in comparison.what


def test_runs_that_were_judged_otherwise_are_made_again() -> None:
    comparison = COMPARISONS["cartpole-dqn"]
    (mine, _), (other, _) = programs_of(comparison), programs_of(replace(comparison, greedy_goal=450.0))
    (slowed, _), (killed, _) = (programs_of(COMPARISONS[f"cartpole-dqn-{how}"]) for how in ("slowed", "killed"))
    assert len({program.digest for program in (mine, other, slowed, killed)}) == 4


def test_what_hinders_rlsrl_does_not_hinder_the_single_file() -> None:
    names = ("cartpole-dqn", "cartpole-dqn-slowed", "cartpole-dqn-killed")
    assert len({programs_of(COMPARISONS[name])[1].digest for name in names}) == 1


def test_runs_of_another_comparison_with_equal_inputs_count(
    tmp_path: Path, stage: Stage, made: Callable[[], list[str]]
) -> None:
    comparison = stage(rlsrl=10_000, single=10_100, hindered=50_000)
    judged(comparison, tmp_path)
    first = made()
    (tmp_path / "learning-cartpole.json").rename(tmp_path / "learning-other.json")
    good, kept = judged(replace(comparison, seeds=4, most_seeds=4), tmp_path)
    assert good
    assert "of 4 and 4 seeds" in kept["why"]
    assert sorted(made()[len(first) :]) == sorted(f"{name} 4" for name in (RLSRL, SINGLE_FILE, HINDERED))


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_single_file_knows_its_options_and_has_one_thread(name: str) -> None:
    comparison = COMPARISONS[name]
    _, single = programs_of(comparison)
    _, program, *words = single.contestant.command(comparison.workload, single.setting, Path(), seed=1)
    options = {word.replace("--no-", "--") for word in words if word.startswith("--")}
    assert {option for option in options if f'"{option}"' not in text_of(Path(program))} == set()
    assert words[words.index("--threads") + 1] == "1"
    assert ("--vector" in options) == (comparison.workload.algorithm == "ppo")


def test_the_control_of_a_comparison_with_replay_makes_few_updates() -> None:
    control = control_of(COMPARISONS["cartpole-dqn"])
    assert control.workload.total_steps == 100_000
    experiment = control.workload.experiment()["spec"]
    assert experiment["pacing"] == {"trainStepsPerEnvStep": pytest.approx(0.5 / 20)}
    assert experiment["parameters"]["everySteps"] == 8, "of 128 env steps each"


def test_a_control_that_passes_makes_the_check_worthless(tmp_path: Path, stage: Stage) -> None:
    good, kept = judged(stage(rlsrl=10_000, single=10_000, hindered=10_000), tmp_path)
    assert not good
    assert (kept["verdict"], kept["control"]["verdict"]) == ("alike", "alike")


def test_seeds_are_added_until_it_is_decided(tmp_path: Path, stage: Stage, made: Callable[[], list[str]]) -> None:
    # A ratio of about 1.25 is never decided.
    good, kept = judged(stage(rlsrl=125, single=100, hindered=5000, seeds=2, most_seeds=6), tmp_path)
    assert not good
    assert kept["verdict"] == "not decided"
    assert "of 6 and 6 seeds" in kept["why"]
    assert sum(line.startswith(SINGLE_FILE) for line in made()) == 6
    assert sum(line.startswith(HINDERED) for line in made()) == 2


def test_a_narrow_interval_needs_no_more_seeds(tmp_path: Path, stage: Stage, made: Callable[[], list[str]]) -> None:
    comparison = stage(rlsrl=125, single=100, hindered=5000, seeds=2, most_seeds=6)
    good, kept = judged(replace(comparison, narrow=1.8), tmp_path)
    assert not good
    assert (kept["verdict"], kept["needs_seeds"]) == ("not decided", False)
    assert "of 2 and 2 seeds" in kept["why"]
    assert sum(line.startswith(SINGLE_FILE) for line in made()) == 2


def test_a_run_that_is_kept_is_not_made_again(tmp_path: Path, stage: Stage, made: Callable[[], list[str]]) -> None:
    comparison = stage(rlsrl=10_000, single=10_000, hindered=50_000)
    judged(comparison, tmp_path)
    first = made()
    assert judged(comparison, tmp_path)[0]
    assert made() == first
    judged(stage(rlsrl=10_000, single=10_000, hindered=50_000, seeds=4, most_seeds=4), tmp_path)
    assert sorted(made()[len(first) :]) == sorted(f"{name} 4" for name in (RLSRL, SINGLE_FILE, HINDERED))


def test_restart_repeats_rlsrls_runs(tmp_path: Path, stage: Stage, made: Callable[[], list[str]]) -> None:
    comparison = stage(rlsrl=10_000, single=10_000, hindered=50_000)
    judged(comparison, tmp_path)
    first = made()
    assert judged(comparison, tmp_path, restart=True)[0]
    assert sorted(made()[len(first) :]) == sorted(f"{name} {seed}" for name in (RLSRL, HINDERED) for seed in (1, 2, 3))


def test_the_next_run_removes_the_verdict(tmp_path: Path) -> None:
    program = Program(name=RLSRL, contestant=Rlsrl(), workload=WORKLOADS["W1"], at_once=1)
    path = tmp_path / "runs.json"
    Runs(path).add(program, 1, {"figure": 3.0})
    Runs(path).judge({"verdict": "alike"})
    Runs(path).add(program, 2, {"figure": 4.0})
    kept = json.loads(path.read_text())
    assert kept.keys() == {"programs"}
    assert Runs(path).series(program) == {1: 3.0, 2: 4.0}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_is_ended_and_not_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    (script := tmp_path / "endless.py").write_text("import time\ntime.sleep(600)")
    (tmp_path / "main.py").write_text(
        f"""
import sys, threading, signal, os
from dataclasses import replace
from pathlib import Path
from contestants import Peer
from learning import COMPARISONS, Program, Runs, make_runs
from turns import ended_by_signals
Peer.versions = {{}}
programs = {{"ppo": ({str(script)!r},)}}
contestant = Peer(name="x", programs=programs, ways=((),), python=lambda name: Path(sys.executable))
comparison = COMPARISONS["cartpole"]
program = Program(name="x", contestant=contestant, workload=comparison.workload, at_once=2)
ended_by_signals()
threading.Timer(1.0, os.kill, (os.getpid(), {int(number)})).start()
make_runs(comparison, program, range(1, 9), Runs(Path({str(tmp_path / "runs.json")!r})))
"""
    )
    path = os.pathsep.join([str(Path(learning.__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "KeyboardInterrupt" in done.stderr
    listed = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True, check=False)
    assert not listed.stdout, "no process is left"


def test_runs_with_other_settings_do_not_count(tmp_path: Path) -> None:
    contestant = Peer(name=SINGLE_FILE, programs={"ppo": ("none.py",)}, ways=((),))
    one = Program(name=SINGLE_FILE, contestant=contestant, workload=WORKLOADS["W1"], at_once=1)
    other = replace(one, workload=replace(WORKLOADS["W1"], epochs=5))
    path = tmp_path / "runs.json"
    Runs(path).add(one, 7, {"figure": 3.0})
    assert Runs(path).series(one) == {7: 3.0}
    assert Runs(path).series(other) == {}
    Runs(path).add(other, 8, {"figure": 4.0})
    assert Runs(path).series(one) == {}
    assert Runs(path).series(other) == {8: 4.0}


def test_a_setting_that_is_no_input_of_a_program_keeps_its_runs() -> None:
    more_actors = replace(WORKLOADS["W1"], actors=7)
    peer = Peer(name=SINGLE_FILE, programs={"ppo": ("none.py",)}, ways=((),))
    for contestant, is_told in ((peer, False), (Rlsrl(), True)):
        one = Program(name=contestant.name, contestant=contestant, workload=WORKLOADS["W1"], at_once=1)
        assert (replace(one, workload=more_actors).digest != one.digest) is is_told


def test_a_failed_run_is_reported_and_earlier_runs_are_kept(tmp_path: Path, stage: Stage) -> None:
    comparison = stage(rlsrl=10_000, single=10_000, hindered=50_000)
    script = tmp_path / f"{SINGLE_FILE}.py"
    script.write_text("raise SystemExit('no room')")
    with pytest.raises(ContestantFailed, match="no room"):
        judged(comparison, tmp_path)
    programs = json.loads((tmp_path / "learning-cartpole.json").read_text())["programs"]
    assert {name: len(each["runs"]) for name, each in programs.items()} == {RLSRL: 3}


def test_a_failed_run_does_not_stop_runs_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = json.dumps({"wall": 1.0, "env_steps": 1024, "return_mean": 5.0})
    run_is_over = tmp_path / "run is over"

    @contextmanager
    def noted(_: Path) -> Iterator[None]:
        try:
            yield
        finally:
            run_is_over.touch()

    script = tmp_path / "some.py"
    script.write_text(
        f"""
import sys, time
from pathlib import Path
if sys.argv[sys.argv.index("--seed") + 1] == "1":
    raise SystemExit("no room")
while not Path({str(run_is_over)!r}).exists():
    time.sleep(0.01)
print({told!r})
"""
    )
    comparison = replace(COMPARISONS["cartpole"], workload=replace(WORKLOADS["W1"], total_steps=1024))
    contestant = Peer(name="x", programs={"ppo": (str(script),)}, ways=((),), python=lambda name: Path(sys.executable))
    program = Program(name="x", contestant=contestant, workload=comparison.workload, at_once=2, hindered=noted)
    runs = Runs(tmp_path / "runs.json")
    monkeypatch.setattr(Peer, "versions", {})
    with pytest.raises(ContestantFailed, match="no room"):
        make_runs(comparison, program, [1, 2], runs)
    assert [*json.loads((tmp_path / "runs.json").read_text())["programs"]["x"]["runs"]] == ["2"]


def test_a_run_ends_when_its_evaluations_reach_the_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script := tmp_path / "endless.py").write_text(
        """
import json, time
for steps, mean in ((1000, 400.0), (2000, 475.0), (3000, 500.0)):
    said = {"wall": 1.0, "env_steps": steps, "return_mean": 5.0, "greedy_return": mean}
    print(json.dumps(said), flush=True)
time.sleep(600)
"""
    )
    comparison = replace(COMPARISONS["cartpole-dqn"], run_seconds=60.0)
    contestant = Peer(name="x", programs={"dqn": (str(script),)}, ways=((),), python=lambda name: Path(sys.executable))
    program = Program(name="x", contestant=contestant, workload=comparison.workload, at_once=1)
    monkeypatch.setattr(Peer, "versions", {})
    runs = Runs(tmp_path / "runs.json")
    assert make_runs(comparison, program, [1], runs) == {1: 2000.0}


def test_two_threads_may_add_to_one_file(tmp_path: Path) -> None:
    program = Program(name=RLSRL, contestant=Rlsrl(), workload=WORKLOADS["W1"], at_once=1)
    one, other = Runs(tmp_path / "runs.json"), Runs(tmp_path / "runs.json")
    one.add(program, 1, {"figure": 3.0})
    other.add(program, 2, {"figure": 4.0})
    one.add(program, 3, {"figure": 5.0})
    assert other.series(program) == {1: 3.0, 2: 4.0, 3: 5.0}


def test_a_slow_trainer_stands_still_most_of_the_time_and_is_left_running(tmp_path: Path) -> None:
    (tmp_path / RUN).mkdir()
    (tmp_path / OUTPUT).touch()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            worker = {"pid": process.pid, "stats": {"train_steps": 3.0}}
            with slow_trainer(tmp_path):
                (tmp_path / RUN / "status.json").write_text(json.dumps({"roles": {"trainer": [worker]}}))
                until(lambda: state_of(process.pid) == "T", "it is stopped")
                until(lambda: state_of(process.pid) == "R", "it works again")
                until(lambda: state_of(process.pid) == "T", "it is stopped again")
            assert state_of(process.pid) != "T"
        finally:
            process.kill()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
