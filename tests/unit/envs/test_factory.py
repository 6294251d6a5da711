"""Making environments, and the error for each mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

from rlsrl.envs.factory import EnvironmentSource, environment_spec, make_environment
from rlsrl.envs.place import INSPECTION
from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed

FACTORIES = """
import sys

import gymnasium

made = []

class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(3, start=1)

    def __init__(self, length):
        self.length = length
        self.closed = False
        made.append(self)

    def close(self):
        self.closed = True

def make(length=3):
    return Corridor(length)

def nothing():
    pass

def needy():
    import a_simulator_nobody_has

def flaky():
    raise ConnectionError("the simulator does not answer")

def typo():
    return len(3)

def exits():
    sys.exit(3)

def placed(place):
    return Corridor(place)

def perhaps_placed(length=3, place=None):
    return Corridor((length, place))

def takes_all(**kwargs):
    return Corridor(kwargs)
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "factory_samples.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "factory_samples", raising=False)


def test_a_gymnasium_id_with_arguments() -> None:
    env = make_environment(EnvironmentSource(id="CartPole-v1", kwargs={"max_episode_steps": 7}))
    env.reset(seed=0)
    assert env.spec is not None
    assert env.spec.max_episode_steps == 7
    env.close()


def test_the_users_own_factory_gets_its_arguments(factories: None) -> None:
    env = make_environment(EnvironmentSource(factory="factory_samples:make", kwargs={"length": 9}))
    assert env.get_wrapper_attr("length") == 9


@pytest.mark.parametrize(
    ("factory", "got"),
    [("placed", INSPECTION), ("perhaps_placed", (3, INSPECTION)), ("takes_all", {"place": INSPECTION})],
)
def test_an_environment_gets_its_place_if_the_experiment_passes_it(factories: None, factory: str, got: object) -> None:
    env = make_environment(EnvironmentSource(factory=f"factory_samples:{factory}", place=INSPECTION))
    assert env.get_wrapper_attr("length") == got


def test_a_factory_with_an_optional_place_does_without(factories: None) -> None:
    env = make_environment(EnvironmentSource(factory="factory_samples:perhaps_placed", kwargs={"length": 9}))
    assert env.get_wrapper_attr("length") == (9, None)


def test_a_registered_environment_gets_its_place(factories: None) -> None:
    gymnasium.register("Test/Placed-v0", entry_point="factory_samples:placed")
    try:
        env = make_environment(EnvironmentSource(id="Test/Placed-v0", place=INSPECTION))
    finally:
        del gymnasium.registry["Test/Placed-v0"]
    assert env.get_wrapper_attr("length") == INSPECTION


def test_a_spec_is_read_from_an_instance_that_is_closed_again(factories: None) -> None:
    spec = environment_spec(EnvironmentSource(factory="factory_samples:make"))
    assert spec.observation["observation"].shape == (2,)
    assert spec.action.num_actions == 3
    assert [env.closed for env in sys.modules["factory_samples"].made] == [True]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"id": "CartPol-v1"}, r"environment 'CartPol-v1': .*doesn't exist.*\(did you mean 'CartPole-v1'\?\)"),
        ({"id": "CartPole-v9"}, r"`v9` for environment `CartPole` doesn't exist"),
        ({"id": "Nowhere/Pong-v5"}, "Namespace Nowhere not found"),
        ({"id": "no_such_module_q:Thing-v0"}, "No module named 'no_such_module_q'"),
        ({"id": "CartPole-v1", "kwargs": {"gravty": 1}}, "unexpected keyword argument 'gravty'"),
        ({"factory": "factory_samples:mak"}, r"has no 'mak' \(did you mean 'make'\?\)"),
        ({"factory": "factory_sample:make"}, r"no module named 'factory_sample' \(did you mean 'factory_samples'\?\)"),
        ({"factory": "factory_samples:nothing"}, "'factory_samples:nothing' returned None, not a gymnasium.Env"),
        ({"factory": "factory_samples:needy"}, "No module named 'a_simulator_nobody_has'"),
        (
            {"factory": "factory_samples:make", "kwargs": {"lenght": 3}},
            r"unexpected keyword argument 'lenght' \(did you mean 'length'\?\)",
        ),
        (
            {"factory": "factory_samples:perhaps_placed", "kwargs": {"lenght": 3}},
            r"unexpected keyword argument 'lenght' \(did you mean 'length'\?\)",
        ),
        (
            {"factory": "factory_samples:make", "place": INSPECTION},
            r"unexpected keyword argument 'place'; add the parameter 'place', or remove environment.passPlace",
        ),
        ({"factory": "factory_samples:placed"}, r"missing a required argument: 'place'; set environment.passPlace"),
        (
            {"id": "CartPole-v1", "place": INSPECTION},
            "environment 'CartPole-v1': .*unexpected keyword argument 'place'",
        ),
    ],
)
def test_a_mistake_is_named_with_its_cure(factories: None, source: dict, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make_environment(EnvironmentSource(**source))


@pytest.mark.parametrize(("name", "error"), [("flaky", ConnectionError), ("typo", TypeError)])
def test_what_a_restart_may_mend_is_no_configuration_error(factories: None, name: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        make_environment(EnvironmentSource(factory=f"factory_samples:{name}"))
    assert not isinstance(caught.value, ConfigurationError)


@pytest.mark.parametrize(("name", "raised"), [("flaky", "ConnectionError"), ("exits", "SystemExit: 3")])
def test_the_spec_of_an_environment_that_cannot_be_made_has_the_users_traceback(
    factories: None, name: str, raised: str
) -> None:
    says = f"'factory_samples:{name}' cannot be made: it raised {raised}"
    with pytest.raises(EnvironmentFailed, match=says) as caught:
        environment_spec(EnvironmentSource(factory=f"factory_samples:{name}"))
    frames = [line for line in caught.value.traceback.splitlines() if line.startswith("  File")]
    assert [frame.endswith(f"in {name}") for frame in frames] == [True]


@pytest.mark.parametrize("source", [{}, {"id": "CartPole-v1", "factory": "a:b"}])
def test_a_source_is_an_id_or_a_factory(source: dict) -> None:
    with pytest.raises(ConfigurationError, match=r"id=.*, factory=.* and http=.*; set exactly one of them"):
        EnvironmentSource(**source)


@pytest.mark.parametrize(
    ("missing", "env_id", "extra"),
    [
        ("mujoco", "HalfCheetah-v5", "mujoco"),
        ("ale_py", "ALE/Pong-v5", "atari"),
        ("Box2D", "BipedalWalker-v3", "box2d"),
    ],
)
def test_a_missing_simulator_is_named_with_its_cure(missing: str, env_id: str, extra: str) -> None:
    # A process of its own: here the simulator may have been imported before.
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from rlsrl.envs.factory import EnvironmentSource, make_environment\n"
        "from rlsrl.runtime.errors import ConfigurationError\n"
        f"try: make_environment(EnvironmentSource(id={env_id!r}))\n"
        "except ConfigurationError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert f"environment {env_id!r} needs the package {missing!r}, which is not installed" in done.stdout
    assert f"pip install 'rlsrl[{extra}]'" in done.stdout


def test_gymnasium_is_imported_only_to_make_an_environment() -> None:
    program = (
        "import sys, rlsrl.envs.factory, rlsrl.envs.vector, rlsrl.envs.check; sys.exit('gymnasium' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_no_checker_wraps_the_steps() -> None:
    env: gymnasium.Env = make_environment(EnvironmentSource(id="CartPole-v1"))
    assert "PassiveEnvChecker" not in str(env)
    env.close()
