"""The room that the files of an experiment's replay stores need, and what is said where it is too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.api.load import load_file
from rlsrl.api.replay_memory import assumed_store_bytes
from rlsrl.api.role_names import ACTOR, TRAINER
from rlsrl.buffers.replay.store_file import StoreFile
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.testing.rollouts import discrete_action, discrete_env_spec
from rlsrl.workers.build.replay_stores import ReplayStores, pod_shortage, stores_of

EXAMPLES = Path(__file__).parents[3] / "examples"
ENV_SPEC = discrete_env_spec(num_features=4, num_actions=2)
FIELD = "spec.algorithm.dqn.replay.capacity"
SIZE_FIELD = "spec.bufferWorkers.volume.size"


def stores(*overrides: str, name: str = "cartpole-dqn") -> ReplayStores:
    found = stores_of(load_file(EXAMPLES / f"{name}.yaml", overrides).spec, ENV_SPEC)
    assert found is not None
    return found


def of_ranks(number: int, capacity: int) -> ReplayStores:
    return stores(f"trainers.replicas={number}", f"actors.replicas={number}", f"{FIELD}={capacity}")


@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_bytes_are_those_of_the_files(number: int, tmp_path: Path) -> None:
    found = of_ranks(number, 5000)
    files = [tmp_path / str(rank) for rank in range(number)]
    for file in files:
        StoreFile.open(file, found.layout, former=None, owner=1)
    assert found.num_bytes == sum(file.stat().st_size for file in files)
    assert found.capacity == 5000


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("room", [300_000, 1_000_000])
def test_the_largest_capacity_is_the_largest_that_fits(number: int, room: int) -> None:
    found = of_ranks(number, 1_000_000)
    largest = found.largest_capacity(room)
    assert of_ranks(number, largest).num_bytes <= room
    assert of_ranks(number, largest + 1).num_bytes > room
    assert found.largest_capacity(found.num_bytes) >= 1_000_000


IMAGES = EnvSpec(
    observation={"observation": ArraySpec(shape=(4, 84, 84), dtype="uint8")}, action=discrete_action(num_actions=6)
)


ATARI = ["policy.network={cnn: {}}", "environment.atari={}", "environment.frameStack=4"]


LSTM = ["policy.network.recurrent={kind: lstm, size: 512}"]
"""Whose state takes as much as the observations of its rollouts of 16 steps."""


CAMERAS = [
    "policy.network={mlp: {}, encoders: [{key: left, cnn: {}}, {key: right, impalaCnn: {}}]}",
    "algorithm.dqn.replay.capacity=5000",
]
TWO_IMAGES = EnvSpec(
    observation={
        "observation/left": ArraySpec(shape=(1, 84, 84), dtype="uint8"),
        "observation/numbers": ArraySpec(shape=(64,), dtype="float32"),
        "observation/right": ArraySpec(shape=(1, 84, 84), dtype="uint8"),
    },
    action=discrete_env_spec().action,
)


@pytest.mark.parametrize(
    ("overrides", "env_spec", "most"),
    [
        pytest.param([], discrete_env_spec(num_features=4), 10, id="CartPole"),
        pytest.param([], discrete_env_spec(num_features=64), 1.2, id="64 floats"),
        pytest.param(ATARI, IMAGES, 1.01, id="Atari"),
        pytest.param(CAMERAS, TWO_IMAGES, 1.1, id="two images and numbers"),
        pytest.param(LSTM, discrete_env_spec(num_features=64), 1.2, id="LSTM"),
    ],
)
def test_pods_request_at_least_the_bytes_of_their_stores(overrides: list[str], env_spec: EnvSpec, most: float) -> None:
    spec = load_file(EXAMPLES / "cartpole-dqn.yaml", [*overrides, "trainers.replicas=2", "actors.replicas=2"]).spec
    found = stores_of(spec, env_spec)
    assert found is not None
    assert 1 <= 2 * assumed_store_bytes(spec, TRAINER) / found.num_bytes <= most
    assert assumed_store_bytes(spec, ACTOR) == 0


def test_no_capacity_fits_into_next_to_nothing() -> None:
    assert of_ranks(2, 1000).largest_capacity(2 * 4096) == 0


def test_a_shortage_names_field_value_arithmetic_and_the_largest_capacity() -> None:
    found = stores(f"{FIELD}=100000000")
    each, gib = found.num_bytes / 1e8, found.num_bytes / 1024**3
    assert found.shortage(2 * 1024**3, "on the disk at /runs") == (
        f"{FIELD}: 100,000,000 transitions x {each:.0f} bytes = {gib:.1f} GiB, and there is room for 2.0 GiB on the "
        f"disk at /runs: at most {found.largest_capacity(2 * 1024**3):,} transitions fit; lower it, or make room"
    )
    assert found.shortage(found.num_bytes, "on the disk at /runs") is None
    assert " MiB in 2 files" in str(of_ranks(2, 100_000))


def test_an_algorithm_that_does_not_replay_has_no_stores() -> None:
    assert stores_of(load_file(EXAMPLES / "cartpole.yaml").spec, ENV_SPEC) is None


def test_the_field_is_where_the_algorithm_has_it() -> None:
    own = "{factory: 'a:b', needs: {minibatchSize: 64, replay: {}}}"
    assert stores(f"algorithm={{custom: {own}}}").field == "spec.algorithm.custom.needs.replay.capacity"


def limit(amount: str) -> str:
    return f"trainers.podTemplate={{spec: {{containers: [{{name: worker, resources: {{limits: {amount}}}}}]}}}}"


@pytest.mark.parametrize(
    ("limits", "is_short"),
    [("{ephemeral-storage: 2Mi}", True), ("{ephemeral-storage: 8Mi}", False), ("{memory: 1Ki}", False)],
)
@pytest.mark.parametrize("number", [1, 2])
def test_a_pod_s_stores_must_fit_into_its_ephemeral_storage(limits: str, is_short: bool, number: int) -> None:
    """Each pod has one of equal parts: with two trainers half as much."""
    ranks = (f"trainers.replicas={number}", f"actors.replicas={number}", f"{FIELD}={number * 100_000}")
    spec = load_file(EXAMPLES / "cartpole-dqn.yaml", [*ranks, limit(limits)]).spec
    found = stores_of(spec, ENV_SPEC)
    assert found is not None
    said = pod_shortage(spec, found)
    assert (said is not None) == is_short
    if said is not None:
        part = "" if number == 1 else ", one of 2 parts"
        assert said.startswith(f"{FIELD}{part}: 100,000 transitions x ")
        assert "there is room for 2.0 MiB in each trainer pod, by its limit of ephemeral-storage" in said


@pytest.mark.parametrize(("capacity", "size", "is_short"), [(40_000, "2Mi", False), (100_000, "2Mi", True)])
def test_a_store_fits_into_the_volume_of_its_buffer_worker_or_the_largest_that_does_is_named(
    capacity: int, size: str, is_short: bool
) -> None:
    workers = ("actors.replicas=2", "bufferWorkers.replicas=2", f"bufferWorkers.volume.size={size}")
    spec = load_file(EXAMPLES / "cartpole-dqn.yaml", [*workers, f"{FIELD}={2 * capacity}"]).spec
    found = stores_of(spec, ENV_SPEC)
    assert found is not None
    said = pod_shortage(spec, found)
    assert (said is not None) == is_short
    if said is not None:
        assert said.startswith(f"{FIELD}, one of 2 parts: {capacity:,} transitions x ")
        assert f"there is room for 2.0 MiB on the volume of each buffer worker, by its {SIZE_FIELD} of {size}" in said


def test_the_default_volume_counts_where_none_is_given() -> None:
    spec = load_file(EXAMPLES / "cartpole-dqn.yaml", ["bufferWorkers.replicas=1", f"{FIELD}=400000000"]).spec
    found = stores_of(spec, ENV_SPEC)
    assert found is not None
    assert f"{SIZE_FIELD} of 10Gi" in str(pod_shortage(spec, found))
