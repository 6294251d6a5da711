"""``rlsrl compare`` and ``rlsrl plot --seeds``, and the same in Python, on generated run folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import rlsrl
from rlsrl.api.load import dump, load_text
from rlsrl.cli import main
from rlsrl.local.curves import Series
from rlsrl.local.run_folder import RESOLVED_EXPERIMENT, RunFolderError
from rlsrl.runs.comparison import read_result

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: balance}
spec:
  environment: {id: CartPole-v1}
  actors: {environments: 8}
  stop: {envSteps: 100000, returnMean: 5}
"""


def make_run(folder: Path, *returns: float, **settings: object) -> Path:
    """Make a run folder with a return for each of its steps of 100 transitions."""
    folder.mkdir(parents=True)
    experiment = load_text(EXPERIMENT, overrides=[f"{path.replace('__', '.')}={v}" for path, v in settings.items()])
    (folder / RESOLVED_EXPERIMENT).write_text(dump(experiment))
    (folder / "controller.json").write_text("{}")
    rows = [
        {
            "step": step,
            "wall": 0.0,
            "role": "trainer",
            "scalars": {"env_steps": 100.0 * step, "train_seconds": 2.0 * step, "return_mean": value},
        }
        for step, value in enumerate(returns, start=1)
    ]
    rows.append({"step": 2, "wall": 0.0, "role": "evaluator", "scalars": {"evaluation/return_mean": 8.0 + returns[-1]}})
    rows[-1]["scalars"]["evaluation/env_steps"] = 200.0
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five seeds of an experiment, and one run with another learning rate, in the current folder's runs/."""
    monkeypatch.chdir(tmp_path)
    for seed in range(5):
        make_run(tmp_path / "runs" / f"balance-seed-{seed}", 1.0, 3.0 + seed, 5.0, 4.0 + seed, seed=seed)
    make_run(tmp_path / "runs" / "faster", 1.0, 2.0, algorithm__ppo__learningRate=0.01)
    return tmp_path / "runs"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_seeds_of_an_experiment_are_one_row(runs: Path) -> None:
    result = call("compare", *sorted(runs.iterdir()))
    assert result.exit_code == 0, result.output
    header, seeds, faster = (line.split("  ") for line in result.output.splitlines())
    assert header[0] == "EXPERIMENT"
    assert [cell.strip() for cell in seeds if cell.strip()] == [
        "balance", "5", "6 (4.667 to 7.333)", "14 (12.67 to 15.33)", "400", "8.0", "5 (5 of 5)", "233 (200 to 300)",
    ]  # fmt: skip
    assert [cell.strip() for cell in faster if cell.strip()] == [
        "balance, algorithm.ppo.learningRate=0.01", "1", "2", "10", "200", "4.0", "5 (0 of 1)", "-",
    ]  # fmt: skip


def test_json_has_the_figures_of_each_run(runs: Path) -> None:
    (group,) = json.loads(call("compare", "--json", *sorted(runs.glob("balance*"))).output)
    assert (group["experiment"], group["goal"], group["reached"]) == ("balance", 5.0, 5)
    assert group["return_mean"]["value"] == 6.0
    assert [run["seed"] for run in group["runs"]] == [0, 1, 2, 3, 4]
    assert [run["return_mean"] for run in group["runs"]] == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert [run["steps_to_goal"] for run in group["runs"]] == [300.0, 300.0, 200.0, 200.0, 200.0]


def test_a_program_gets_the_figures_and_curves_that_the_command_prints(runs: Path) -> None:
    comparison = rlsrl.compare(*sorted(runs.iterdir()))
    assert f"{comparison}\n" == call("compare", *sorted(runs.iterdir())).output
    seeds, faster = comparison.groups
    assert (seeds.label, seeds.goal, seeds.num_reached) == ("balance", 5.0, 5)
    assert seeds.return_mean == rlsrl.SeedEstimate(value=6.0, low=seeds.return_mean.low, high=seeds.return_mean.high)
    assert 4.0 < seeds.return_mean.low < 6.0 < seeds.return_mean.high < 8.0
    assert (seeds.env_steps.value, seeds.seconds.value) == (400.0, 8.0)
    assert [run.steps_to_goal for run in seeds.runs] == [300.0, 300.0, 200.0, 200.0, 200.0]
    assert seeds.runs[0].curve.returns.points == ((100.0, 1.0), (200.0, 3.0), (300.0, 5.0), (400.0, 4.0))
    assert faster.steps_to_goal is None


def test_a_band_is_over_steps_or_time(runs: Path) -> None:
    for axis, unit in (("env-steps", 100.0), ("train-steps", 1.0), ("seconds", 2.0)):
        (group,) = rlsrl.compare(*sorted(runs.glob("balance*")), axis=axis).groups  # type: ignore[arg-type]
        assert group.band is not None
        assert (group.band.x[0], group.band.x[-1]) == (unit, 4 * unit)
        assert group.band.centre[[0, -1]].tolist() == [1.0, 6.0]
        assert np.all((group.band.low <= group.band.centre) & (group.band.centre <= group.band.high))
        assert group.band.low[-1] < 6.0 < group.band.high[-1]


def test_a_picture_is_drawn_of_both(runs: Path, tmp_path: Path) -> None:
    for command in (("compare",), ("plot", "--seeds", "--x", "seconds", "--smooth", 3)):
        picture = tmp_path / f"{command[0]}.svg"
        result = call(*command, *sorted(runs.iterdir()), "-o", picture)
        assert result.exit_code == 0, result.output
        assert "<svg" in picture.read_text()


def test_what_cannot_be_compared_is_named(runs: Path) -> None:
    for arguments, says in (
        (("compare", "balance-seed-9"), "did you mean 'balance-seed-"),
        (("plot", "balance-seed-0", "--x", "hours"), "'env-steps', 'train-steps', 'seconds'"),
        (("compare", "faster", "-o", "x.nonsense"), "x.nonsense: "),
        (
            ("plot", "faster", "--metric", "train_second"),
            "no run has a metric 'train_second' (did you mean 'train_seconds'?); allowed: env_steps, return_mean, ",
        ),
    ):
        result = call(*arguments)
        assert result.exit_code == 2
        assert says in result.output


def test_a_program_draws_the_same_picture_as_the_command(runs: Path, tmp_path: Path) -> None:
    paths = sorted(runs.iterdir())
    options = ("--seeds", "--x", "seconds", "--smooth", 3)
    assert call("plot", *options, *paths, "-o", tmp_path / "command.png").exit_code == 0
    assert rlsrl.plot(*paths, path=tmp_path / "same.png", axis="seconds", smooth=3, seeds=True) == tmp_path / "same.png"
    rlsrl.plot(*paths, path=tmp_path / "lines.png", axis="seconds", smooth=3)
    rlsrl.compare(*paths, axis="seconds").plot(tmp_path / "compared.png", smooth=3)
    command, same, lines, compared = (
        (tmp_path / f"{name}.png").read_bytes() for name in ("command", "same", "lines", "compared")
    )
    assert command == same == compared != lines


def test_metrics_that_are_asked_for_have_panels_of_their_own(runs: Path, tmp_path: Path) -> None:
    assert read_result(runs / "faster", metrics=["train_seconds"]).curve.others == {
        "train_seconds": Series(points=((100.0, 2.0), (200.0, 4.0)))
    }
    assert call("plot", "faster", "--metric", "train_seconds", "-o", tmp_path / "command.png").exit_code == 0
    with_metric = rlsrl.plot("faster", path=tmp_path / "same.png", metrics=["train_seconds"]).read_bytes()
    without = rlsrl.plot("faster", path=tmp_path / "without.png").read_bytes()
    assert (tmp_path / "command.png").read_bytes() == with_metric != without


def test_a_program_gets_errors_with_what_is_allowed(runs: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    empty = make_run(tmp_path / "runs" / "empty", 1.0)
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="did you mean 'balance-seed-"):
        rlsrl.compare("balance-seed-9")
    with pytest.raises(RunFolderError, match=r"empty: metrics\.jsonl has no returns: no episode has ended yet"):
        rlsrl.plot("faster", "empty", path=picture)
    with pytest.raises(ValueError, match="no run is given"):
        rlsrl.compare(*runs.glob("none-*"))
    with pytest.raises(ValueError, match="axis is 'hours'; allowed: env-steps, train-steps, seconds"):
        rlsrl.plot("faster", path=picture, axis="hours")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="smooth is 0; allowed: 1 or more"):
        rlsrl.plot("faster", path=picture, smooth=0)
    with pytest.raises(ValueError, match=r"x\.nonsense: Format 'nonsense' is not supported"):
        rlsrl.plot("faster", path="x.nonsense")
    with pytest.raises(FileNotFoundError):
        rlsrl.plot("faster", path="missing/x.png")
    assert not picture.exists()
