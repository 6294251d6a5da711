from typing import Any

import pytest

from rlsrl.envs.factory import EnvironmentSource
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
from rlsrl.sizing.environment import measure_environment

GATED = "rlsrl.testing.environments:GatedEnv"


def source(factory: str = GATED, **kwargs: Any) -> EnvironmentSource:
    return EnvironmentSource(factory=factory, kwargs=kwargs)


def test_an_environment_that_sleeps_waits_and_computes_little() -> None:
    speed = measure_environment(source(gate="/nowhere", step_seconds=0.005), seconds=0.3)

    assert speed.wait_seconds > 0.004  # 8 steps in 9 sleep, and none for less than it should
    assert speed.step_seconds < speed.wait_seconds


def test_resets_are_steps_but_not_transitions() -> None:
    speed = measure_environment(source(gate="/nowhere"), seconds=0.2)

    assert speed.transition_share == pytest.approx(8 / 9, abs=0.02)
    assert speed.step_seconds > 0.0


@pytest.mark.parametrize("in_info", [False, True])
def test_illegal_actions_are_not_taken(in_info: bool) -> None:
    masked = EnvironmentSource(
        factory="rlsrl.testing.environments:MaskedEnv", kwargs={"in_info": in_info}, action_mask="action_mask"
    )

    assert measure_environment(masked, seconds=0.05).step_seconds > 0.0


def test_an_environment_that_cannot_be_made_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'CartPole-v1'"):
        measure_environment(EnvironmentSource(id="CartPol-v1"))


def test_an_environment_that_raises_is_named() -> None:
    with pytest.raises(EnvironmentFailed, match=r"GatedEnv.* raised TypeError"):
        measure_environment(source(gate="/nowhere", step_seconds="long"))
