import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scaling_fit import MeasuredRate, fit, least_squares

from rlsrl.sizing.costs import Costs
from rlsrl.sizing.estimate import estimate
from rlsrl.sizing.workload import Workload
from rlsrl.testing.workloads import TYPICAL, workload

POINTS = (
    workload(),
    workload(epochs=8),
    workload(epochs=8, minibatch_size=64),
    workload(actor_lanes=(8,) * 3, batch_lanes=24),
    workload(num_policy_workers=1, ring_size=2),
    workload(actor_lanes=(8,) * 3, batch_lanes=24, num_policy_workers=1, ring_size=2),
)
FREE = ("minibatch_seconds", "ask_seconds", "answer_seconds")


def measured(points: tuple[Workload, ...], truth: Costs) -> list[MeasuredRate]:
    """Return the rates of a machine with these costs."""
    return [
        MeasuredRate(workload=point, env_steps_a_second=estimate(point, truth).env_steps_a_second) for point in points
    ]


def test_costs_that_points_depend_on_are_recovered() -> None:
    start = TYPICAL
    truth = replace(start, minibatch_seconds=0.6 * start.minibatch_seconds, ask_seconds=1.5 * start.ask_seconds)

    found = fit(measured(POINTS, truth), start, FREE)

    for name in FREE:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.15), name


def test_costs_that_points_do_not_depend_on_stay_unchanged() -> None:
    start = TYPICAL

    found = fit(measured(POINTS[:1], start), start, ("answer_seconds",))

    assert found.answer_seconds == pytest.approx(start.answer_seconds)


def test_points_that_were_not_fitted_to_are_predicted() -> None:
    start = TYPICAL
    truth = replace(start, minibatch_seconds=2 * start.minibatch_seconds, full_load_speed=0.8)
    points = measured(POINTS, truth)

    found = fit(points[::2], start, (*FREE, "full_load_speed"))

    for point in points[1::2]:
        predicted = estimate(point.workload, found).env_steps_a_second
        assert abs(math.log(predicted / point.env_steps_a_second)) < 0.15


def test_bad_input_is_refused() -> None:
    start = TYPICAL

    with pytest.raises(ValueError, match="no points"):
        fit([], start, FREE)
    with pytest.raises(ValueError, match="minibatch_second: no such cost"):
        fit(measured(POINTS[:1], start), start, ("minibatch_second",))


@pytest.mark.parametrize("ripple", [0.0, 0.02])
def test_the_minimum_of_a_curved_valley_is_found(ripple: float) -> None:
    def rosenbrock(place: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([10 * (place[1] - place[0] ** 2), 1 - place[0], *(ripple * np.sin(40 * place))])

    found = least_squares(rosenbrock, np.array([-1.2, 1.0]))

    np.testing.assert_allclose(found, [1.0, 1.0], atol=0.05)
