from pathlib import Path

import pytest

from rlsrl.api.load import SpecError, load_file
from rlsrl.api.spec import ExperimentSpec
from rlsrl.sizing.advice import REMEDIES, SpecChange, Tried, changes, is_advised, limiting
from rlsrl.sizing.ceilings import Ceiling
from rlsrl.sizing.demands import ROLES

EXAMPLES = Path(__file__).parents[3] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))
FEWER, FASTER = SpecChange(overrides=("actors.replicas=1",), saves=True), SpecChange(overrides=("actors.replicas=4",))


def spec(name: str, *overrides: str) -> ExperimentSpec:
    return load_file(EXAMPLES / f"{name}.yaml", overrides).spec


def changed_fields(of: ExperimentSpec) -> set[str]:
    return {override.partition("=")[0] for change in changes(of) for override in change.overrides}


def with_change(file: Path, change: SpecChange) -> ExperimentSpec | str:
    """Return the changed experiment, or the error."""
    try:
        return load_file(file, change.overrides).spec
    except SpecError as error:
        return str(error)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_most_changes_are_allowed_by_the_spec_and_change_it(file: Path) -> None:
    before = load_file(file).spec
    found = [with_change(file, change) for change in changes(before)]
    problems = [each for each in found if isinstance(each, str)]

    # Only sizes may conflict. Unknown fields and wrong types would be bugs.
    assert not any("is not a field of" in problem or "wrong type" in problem for problem in problems)
    assert len(problems) <= len(found) / 2
    assert before not in found


def test_changes_fit_the_roles_of_the_experiment() -> None:
    assert "policyWorkers" in changed_fields(spec("cartpole-policy-worker"))
    assert "bufferWorkers" in changed_fields(spec("cartpole-buffer-worker"))
    assert "bufferWorkers" not in changed_fields(spec("cartpole"))
    assert "pacing.maxPolicyLag" in changed_fields(spec("cartpole", "pacing.maxPolicyLag=0"))
    assert "pacing.maxPolicyLag" not in changed_fields(spec("cartpole", "pacing.maxPolicyLag=1"))


@pytest.mark.parametrize(("actors", "more"), [(1, 2), (2, None), (3, 4), (4, None)])
def test_with_replay_more_trainers_share_the_actors_and_less_training_is_tried(actors: int, more: int | None) -> None:
    found = changes(spec("cartpole-dqn", f"actors.replicas={actors}"))
    (trainers,) = [change for change in found if change.overrides[0] == "trainers.replicas=2"]
    (ratio,) = [change for change in found if change.overrides == ("pacing.trainStepsPerEnvStep=0.25",)]

    assert trainers.overrides[1:] == (() if more is None else (f"actors.replicas={more}",))
    assert ratio.note == "changes learning"
    assert not any("batches" in change.note for change in found), "no batch is made of environments"
    assert not any("minibatchSize" in change.options for change in found), "the ratio counts minibatches"


def test_environments_are_changed_in_the_field_that_sets_them() -> None:
    total = changed_fields(spec("cartpole"))
    each = changed_fields(spec("cartpole", "actors.environments=null", "actors.environmentsPerActor=8"))

    assert "actors.environments" in total
    assert "actors.environmentsPerActor" not in total
    assert "actors.environmentsPerActor" in each
    assert "actors.environments" not in each


def test_a_change_is_shown_as_options() -> None:
    change = SpecChange(overrides=("policyWorkers=null", "actors.ringSize=1"))

    assert change.options == "--set policyWorkers=null --set actors.ringSize=1"


@pytest.mark.parametrize(
    ("change", "rate", "advised"),
    [(FASTER, 106.0, True), (FASTER, 104.0, False), (FEWER, 99.0, True), (FEWER, 97.0, False)],
)
def test_changes_are_advised_that_are_faster_or_save_workers(change: SpecChange, rate: float, advised: bool) -> None:
    assert is_advised(Tried(change=change, env_steps_a_second=rate), 100.0) is advised


def test_the_lowest_ceiling_limits_if_it_is_near() -> None:
    ceiling = Ceiling(part="trainers", role="trainer", env_steps_a_second=100.0)

    assert limiting(90.0, ceiling) == "trainers"
    assert limiting(50.0, ceiling) is None


def test_every_part_has_a_remedy() -> None:
    assert set(REMEDIES) == {*ROLES.values(), "machine", "network", None}
