from dataclasses import asdict, replace

import pytest

from rlsrl.sizing.costs import Costs, MeasuredCosts, measured_costs


def test_the_packages_costs_name_their_origin() -> None:
    measured = measured_costs()

    assert measured.machine
    assert measured.date >= "2026"
    assert measured.source


def test_costs_are_read_back_as_they_were_written() -> None:
    measured = measured_costs()
    written = measured.to_json()

    assert Costs.from_json(written["costs"]) == measured.costs
    assert MeasuredCosts(**{**written, "costs": measured.costs}) == measured


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ask_seconds", -1e-6),
        ("ask_seconds", float("nan")),
        ("full_load_speed", 0.0),
        ("full_load_speed", 1.1),
        ("crowded_speed", 0.0),
    ],
)
def test_impossible_costs_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(measured_costs().costs, **{name: value})


def test_a_missing_cost_is_named() -> None:
    value = asdict(measured_costs().costs)
    del value["hop_seconds"]

    with pytest.raises(KeyError, match="hop_seconds"):
        Costs.from_json(value)
