from rlsrl.api.roles import ROLES
from rlsrl.testing.chaos import CONTROLLER, KILLED_ROLES


def test_the_death_of_every_role_has_an_allowed_cost() -> None:
    assert set(KILLED_ROLES) == {role.name for role in ROLES} | {CONTROLLER}
