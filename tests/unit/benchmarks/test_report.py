"""Table and picture of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from figures import NO_QUIET_RUN, RLSRL, SHOWN, STABLE_BASELINES3
from learning import COMPARISONS
from machine import REPOSITORY
from matplotlib import image
from report import (
    BEGIN,
    END,
    NOT_MEASURED,
    OTHER_SETTINGS,
    PAGE,
    PICTURE,
    Measured,
    draw,
    learning_table,
    memory_table,
    page,
    table,
    times_as_fast,
    with_part,
)
from results import FOLDER, keep, kept
from workloads import WORKLOADS


def turn(name: str, figure: float, others: float, **more: Any) -> dict[str, Any]:
    return {"contestant": name, "figure": figure, "others": others, "own": 0.9, "megabytes": 512.0, "more": more}


def result(name: str = "W1", **more: Any) -> dict[str, Any]:
    shares = {"actor": {"waits for credit": 0.25, "rest": 0.75, "cpu": 0.7}}
    return {
        "workload": name,
        "title": WORKLOADS[name].title,
        "unit": "env steps/s",
        "verdict": SHOWN,
        "figures": {
            RLSRL: {"median": 40000.0, "low": 39000.0, "high": 41000.0},
            STABLE_BASELINES3: {"median": 5000.0, "low": 4900.0, "high": 5100.0},
        },
        "fastest_peer": STABLE_BASELINES3,
        "counted_peers": [STABLE_BASELINES3],
        "ratio": {"median": 8.0, "low": 7.7, "high": 8.25},
        "others": 0.012,
        "megabytes": {RLSRL: 512.0, STABLE_BASELINES3: 300.0},
        "when": "2026-01-01T00:00:00+00:00",
        "machine": {
            "processor": "A Processor",
            "flags": ["amx_bf16"],
            "cores": 2,
            "python": "3.11.7",
            "packages": {"torch": "2.13.0"},
            "commit": "0123456789ab",
        },
        "contestants": {
            RLSRL: {"setting": "", "versions": {"rlsrl": "0.1.0"}, "trials": {}},
            STABLE_BASELINES3: {"setting": "--vector dummy --threads 1", "versions": {"torch": "2.13.0"}, "trials": {}},
        },
        "absent": {"sample-factory": "it does not install: no wheel"},
        "rounds": [
            {"quiet": False, "turns": [turn(RLSRL, 30000.0, 0.2, profile=shares)]},
            {"quiet": True, "turns": [turn(RLSRL, 40000.0, 0.01, profile=shares), turn(STABLE_BASELINES3, 5000.0, 0)]},
        ],
        **more,
    }


NOISY = result("B1", verdict=NO_QUIET_RUN)


def rows(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def test_every_workload_has_a_row_and_shows_whether_it_was_measured() -> None:
    told = rows(table({}))
    assert list(told) == list(WORKLOADS)
    assert all(NOT_MEASURED in row for row in told.values())


def test_a_row_has_both_figures_and_the_ratio_with_its_spread() -> None:
    told = rows(table({"W1": result()}))["W1"]
    assert "| 40,000 | stable-baselines3 5,000 | **8.00** (7.70 to 8.25) | 1.2% | A Processor |" in told


def test_a_ratio_of_seconds_says_that_less_is_better(tmp_path: Path) -> None:
    seconds = result("L", unit="seconds", ratio={"median": 0.5, "low": 0.4, "high": 0.8})
    told = rows(table({"L": seconds}))["L"]
    assert "| 40,000 s | stable-baselines3 5,000 s | **0.50** (0.40 to 0.80), less is better |" in told
    assert times_as_fast(seconds) == {"median": 2.0, "low": 1.25, "high": 2.5}
    assert times_as_fast(result()) == result()["ratio"]


def test_a_limit_adds_its_share_and_the_memory() -> None:
    limited = result("W4-16", of_the_limit={RLSRL: 0.977, STABLE_BASELINES3: 0.4})
    told = rows(table({"W4-16": limited}))["W4-16"]
    assert "40,000 (97.7% of the limit, 512 MB)" in told
    assert "5,000 (40.0% of the limit, 300 MB)" in told


def test_a_noisy_run_is_no_result_but_all_its_rounds_are_listed() -> None:
    assert f"| {NO_QUIET_RUN} |" in rows(table({"B1": NOISY}))["B1"]
    assert "8.00" not in table({"B1": NOISY})
    told = page(Measured(throughput={"B1": NOISY}))
    assert "| 1, not quiet | rlsrl | 30,000 | 90% | 20.0% | 512 |" in told


def test_the_page_has_the_conditions_and_the_profile() -> None:
    told = page(Measured(throughput={"W1": result()}))
    assert f"![ratios]({PICTURE})" in told
    assert "A Processor, 2 cores (amx_bf16), Python 3.11.7, torch 2.13.0" in told
    assert "commit 0123456789ab" in told
    assert "- stable-baselines3: `--vector dummy --threads 1`; torch 2.13.0" in told
    assert "- sample-factory took no part: it does not install: no wheel" in told
    assert "- actor: rest 75%, cpu 70%, waits for credit 25%" in told


def test_the_picture_shows_the_results(tmp_path: Path) -> None:
    path = tmp_path / "ratios.png"
    draw({"W1": result(), "B1": NOISY}, path)
    assert image.imread(path).size > 0
    draw({"B1": NOISY}, path)
    assert not path.exists(), "without a result there is no picture"


def test_only_what_is_between_the_marks_is_replaced() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert with_part(text, "new\n") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


@pytest.mark.parametrize("text", ["", BEGIN, END, f"{END}\n{BEGIN}", f"{BEGIN}{END}{BEGIN}"])
def test_without_the_marks_nothing_is_written(text: str) -> None:
    with pytest.raises(ValueError, match="must have one"):
        with_part(text, "new\n")


def test_a_kept_result_is_read_again(tmp_path: Path) -> None:
    assert kept("W1", tmp_path) is None
    assert keep(result(), tmp_path) == tmp_path / "W1.json"
    assert kept("W1", tmp_path) == result()


def test_a_result_is_not_replaced_by_a_noisy_run(tmp_path: Path) -> None:
    keep(result(), tmp_path)
    assert keep(result(verdict=NO_QUIET_RUN), tmp_path) is None
    assert kept("W1", tmp_path) == result()
    of_another = result(verdict=NO_QUIET_RUN, experiment={"seed": 2})
    assert keep(of_another, tmp_path) == tmp_path / "W1.json", "the earlier result is of another experiment"
    assert kept("W1", tmp_path) == of_another


def test_an_interrupted_write_keeps_the_old_result(tmp_path: Path) -> None:
    keep(result(), tmp_path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        keep(result(more=object()), tmp_path)
    assert kept("W1", tmp_path) == result()


def test_page_and_readme_agree_with_the_kept_results() -> None:
    measured = Measured.read()
    results = measured.throughput
    readme = (REPOSITORY / "README.md").read_text()
    assert with_part(readme, f"{table(results)}\n") == readme, "run `make bench-report`"
    assert (FOLDER / PAGE).read_text() == page(measured), "run `make bench-report`"
    assert (FOLDER / PICTURE).exists() == any(each["verdict"] == SHOWN for each in results.values())


def test_kept_results_are_of_the_present_workloads() -> None:
    measured = {
        name: (result["experiment"], result["peer_arguments"]) for name, result in Measured.read().throughput.items()
    }
    today = {name: (WORKLOADS[name].experiment()["spec"], WORKLOADS[name].peer_arguments()) for name in measured}
    assert measured == today, "measure it again"


def test_learning_and_memory_have_tables_that_show_what_is_missing() -> None:
    origin = {"when": "2026-01-01T00:00:00+00:00", "machine": {"commit": "0123", "processor": "A Processor"}}
    control = {"why": "ratio 3", "verdict": "higher"}
    judged = {"programs": {}, "why": "ratio 1.0", "verdict": "alike", "control": control, **origin}
    learned = {
        "cartpole": judged,
        "halfcheetah": judged | {"programs": {RLSRL: {"digest": "of other settings", "runs": {}}}},
        "pong": {"programs": {}},
    }
    told = learning_table(learned)
    assert told.count("| ratio 1.0 | alike | 2026-01-01, commit 0123, A Processor |") == 1
    assert "| ratio 3 | higher |" in told
    assert told.count(OTHER_SETTINGS) == 1
    never = [each for name, each in COMPARISONS.items() if name not in learned]
    assert told.count(NOT_MEASURED) == 1 + sum(1 + each.has_control for each in never)
    growths = {"trainer": {"megabytes": 500.2, "per_hour": 0.126, "error": 0.5, "grows": False}}
    watched = {"W1": {"minutes": 60, "env_steps": 1234567.0, "growths": growths, **origin}}
    told = memory_table(watched)
    assert "| W1, 60 minutes, 1,234,567 env steps | trainer | 500 | +0.13 ± 0.50 | flat | 2026-01-01, commit" in told
    assert told.count(NOT_MEASURED) == 1
    whole = page(Measured(learning=learned, memory=watched))
    assert learning_table(learned) in whole
    assert memory_table(watched) in whole


def test_floors_are_shown_with_the_share_that_is_reached() -> None:
    floor = {"products": 28.0, "floor_seconds": 0.0016845}
    shown = page(Measured(floors={"S1": {**floor, "share": 0.407}, "D1": floor}))
    assert "| S1 | 28 | 1.68 ms | 41% |" in shown
    assert "| D1 | 28 | 1.68 ms | not of the same machine |" in shown
    assert "Floors" not in page(Measured())
