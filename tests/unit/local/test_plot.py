from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.colors import to_hex

from rlsrl.cli import main
from rlsrl.local.curves import AXES, Curve, Points, Series, curve_of
from rlsrl.local.metrics_log import MetricsRow
from rlsrl.local.plot import DrawnGroup, draw

PNG = b"\x89PNG\r\n\x1a\n"


def line(label: str, *points: tuple[float, float], evaluations: Points = ()) -> Curve:
    return Curve(label=label, returns=Series(points=points, evaluations=evaluations))


def alone(*curves: Curve) -> list[DrawnGroup]:
    return [DrawnGroup(label=curve.label, curves=[curve]) for curve in curves]


def row(step: int, **scalars: float) -> MetricsRow:
    return MetricsRow(step=step, wall=0.0, role="trainer", scalars=scalars)


def run_folder(path: Path, *returns: float) -> Path:
    path.mkdir()
    lines = [
        json.dumps(
            {
                "step": step,
                "wall": 0.0,
                "role": "trainer",
                "scalars": {"env_steps": 100.0 * step, "return_mean": value},
            }
        )
        for step, value in enumerate(returns)
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    return path


def test_a_curve_is_returns_over_env_steps_without_rolled_back_rows() -> None:
    rows = [
        row(0, env_steps=0.0),
        row(1, env_steps=10.0, return_mean=1.0),
        row(2, env_steps=20.0, return_mean=2.0),
        row(2, env_steps=21.0, return_mean=3.0),
        row(3, loss=1.0),
    ]
    assert curve_of(rows, "x") == line("x", (10.0, 1.0), (21.0, 3.0))


def evaluation(step: int, **scalars: float) -> MetricsRow:
    return MetricsRow(step=step, wall=0.0, role="evaluator", scalars=scalars)


def test_length_and_values_of_info_have_panels_of_their_own() -> None:
    won = {"episode_info/won/mean": 0.5, "episode_info/won/count": 1200.0, "episode_info/never/count": 0.0}
    evaluated = {"env_steps": 10.0, "return_mean": 4.0, "length_mean": 6.0, "episode_info/won/mean": 1.0}
    curve = curve_of(
        [
            row(1, env_steps=10.0, return_mean=1.0, length_mean=5.0, **won),
            evaluation(1, **{f"evaluation/{name}": value for name, value in evaluated.items()}),
            evaluation(2, **{f"unfinished_evaluation/{name}": value for name, value in evaluated.items()}),
        ],
        "a",
    )
    assert curve.returns.evaluations == ((10.0, 4.0),), "without the unfinished one"
    assert curve.others == {
        "mean length": Series(points=((10.0, 5.0),), evaluations=((10.0, 6.0),)),
        "mean won": Series(points=((10.0, 0.5),), evaluations=((10.0, 1.0),), count=1200.0),
    }

    panels = draw(alone(curve, line("b", (1.0, 2.0)))).axes

    assert [axes.get_ylabel() for axes in panels] == ["mean return of the last episodes", "mean length", "mean won"]
    assert [len(axes.get_lines()) for axes in panels] == [2, 1, 1]
    texts = [text.get_text() for text in panels[2].get_legend().get_texts()]
    assert texts == ["a, 1,200 episodes", "a, 1,200 episodes, evaluated"]
    assert to_hex(panels[2].get_lines()[0].get_color()) == to_hex(panels[0].get_lines()[0].get_color())


def test_the_figure_has_a_line_a_run() -> None:
    (axes,) = draw(alone(*(line(name, (0.0, 1.0), (1.0, 2.0), (2.0, 3.0)) for name in ("a", "b")))).axes
    assert [line.get_label() for line in axes.get_lines()] == ["a", "b"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert axes.get_lines()[0].get_xydata().tolist() == [[0, 1], [1, 2], [2, 3]]


def test_evaluations_are_points_in_the_colour_of_their_run() -> None:
    rows = [
        row(1, env_steps=10.0, return_mean=1.0),
        MetricsRow(step=2, wall=0.0, role="evaluator", scalars={"evaluation/return_mean": 9.0}),
        MetricsRow(
            step=1, wall=0.0, role="evaluator", scalars={"evaluation/env_steps": 10.0, "evaluation/return_mean": 4.0}
        ),
    ]
    curve = curve_of(rows, "a")
    assert curve.returns == Series(points=((10.0, 1.0),), evaluations=((10.0, 4.0),))

    (axes,) = draw(alone(curve)).axes

    (points,) = axes.collections
    assert points.get_offsets().tolist() == [[10, 4]]
    assert to_hex(points.get_facecolor()[0]) == to_hex(axes.get_lines()[0].get_color())
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "a, evaluated"]


def test_evaluations_alone_can_be_plotted() -> None:
    assert line("a", evaluations=((0.0, 1.0),)).has_points
    assert not line("a").has_points


def test_a_single_point_can_be_seen() -> None:
    (axes,) = draw(alone(line("a", (1.0, 2.0)))).axes
    assert axes.get_lines()[0].get_marker() == "."


def test_a_goal_is_a_line_across_the_returns_alone() -> None:
    panels = draw(
        alone(Curve(label="a", returns=Series(points=((0.0, 1.0), (1.0, 2.0))), others={"mean length": Series()})),
        goals=[475.0],
    ).axes
    assert [len(axes.get_lines()) for axes in panels] == [2, 1]
    assert panels[0].get_lines()[1].get_ydata() == [475.0, 475.0]
    assert [text.get_text() for text in panels[0].get_legend().get_texts()] == ["a", "goal 475"]


def test_seeds_are_a_band_with_thin_lines() -> None:
    seeds = [line(str(seed), *((float(x), float(x * seed)) for x in range(5))) for seed in range(1, 5)]
    (axes,) = draw([DrawnGroup(label="a", curves=seeds)], axis="train-steps").axes
    centre, *thin = axes.get_lines()
    assert centre.get_label() == "a, 4 seeds"
    np.testing.assert_allclose(centre.get_ydata(), 2.5 * np.array(centre.get_xdata()))
    assert len(thin) == 4
    assert all(each.get_linewidth() < centre.get_linewidth() for each in thin)
    assert len(axes.collections) == 1, "the interval"
    assert axes.get_xlabel() == "training steps"


@pytest.mark.parametrize("axis", AXES)
def test_a_curve_is_drawn_over_steps_or_time(axis: str) -> None:
    def scalars(step: int) -> dict[str, float]:
        return {"env_steps": 100.0 * step, "train_seconds": 0.5 * step, "return_mean": 1.0 * step}

    rows = [row(step, **scalars(step)) for step in (0, 2, 4)]
    rows.append(evaluation(3, **{"evaluation/env_steps": 300.0, "evaluation/return_mean": 7.0}))
    curve = curve_of(rows, "a", axis)  # type: ignore[arg-type]  # one of AXES
    scale = {"env-steps": 100.0, "train-steps": 1.0, "seconds": 0.5}[axis]
    assert curve.returns.points == tuple((scale * step, 1.0 * step) for step in (0, 2, 4))
    assert curve.returns.evaluations == ((3 * scale, 7.0),)


def test_one_run_is_drawn_into_its_folder(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "toy", 1.0, 2.0)
    result = CliRunner().invoke(main, ["plot", str(folder)])
    assert (result.exit_code, result.output) == (0, f"{folder / 'curve.png'}\n")
    assert (folder / "curve.png").read_bytes().startswith(PNG)


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run_folder(tmp_path / "runs" / "toy", 1.0, 2.0)
    result = CliRunner().invoke(main, ["plot", "toy"])
    assert (result.exit_code, result.output) == (0, "runs/toy/curve.png\n")
    assert "did you mean 'toy'?" in CliRunner().invoke(main, ["plot", "tay"]).output


def test_several_runs_go_into_one_named_picture(tmp_path: Path) -> None:
    folders = [str(run_folder(tmp_path / name, 1.0, 2.0)) for name in ("a", "b")]
    without = CliRunner().invoke(main, ["plot", *folders])
    assert without.exit_code == 2
    assert "-o FILE" in without.output
    output = tmp_path / "both.svg"
    assert CliRunner().invoke(main, ["plot", *folders, "-o", str(output)]).exit_code == 0
    assert b"<svg" in output.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{empty}"], "has no returns: no episode has ended yet"),
        (["{full}", "-o", "x.nonsense"], "x.nonsense: "),
        (["{full}", "-o", "missing/x.png"], "missing/x.png: "),
        (["{full}/nothing"], "does not exist"),
    ],
)
def test_plot_reports_input_that_it_cannot_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"empty": run_folder(tmp_path / "empty"), "full": run_folder(tmp_path / "full", 1.0)}
    result = CliRunner().invoke(main, ["plot", *(argument.format(**names) for argument in arguments)])
    assert result.exit_code == 2
    assert said in result.output
