from rlsrl.api.role_names import EVALUATOR
from rlsrl.api.roles import ROLES
from rlsrl.sizing import demands

WITHOUT_SPEED = {EVALUATOR}
"""Roles that move neither samples nor live weights, so they limit no rate."""


def test_sizing_knows_the_speed_of_every_other_role() -> None:
    assert set(demands.ROLES) == {role.name for role in ROLES} - WITHOUT_SPEED
