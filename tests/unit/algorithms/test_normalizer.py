from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from rlsrl.algorithms.base import one_rank
from rlsrl.algorithms.normalizer import Moments, Normalizer, ReplayNormalizer, normalizable
from rlsrl.data.random_slots import random_slot
from rlsrl.data.slots import DISCOUNTED_RETURN
from rlsrl.data.specs import Arrays, ArraySpec, EnvSpec
from rlsrl.testing.rollouts import discrete_action

ENV_SPEC = EnvSpec(
    observation={
        "observation/pose": ArraySpec(shape=(3,), dtype="float32"),
        "observation/image": ArraySpec(shape=(2, 2), dtype="uint8"),
    },
    action=discrete_action(2),
)
POSE = {"observation/pose": ENV_SPEC.observation["observation/pose"]}
NUM_STEPS, NUM_LANES = 20, 6


def make_slots(seed: int, *, shift: float = 50.0, scale: float = 3.0) -> dict[str, np.ndarray]:
    """Observations and returns far from mean 0 and deviation 1."""
    rng = np.random.default_rng(seed)
    slots = random_slot(ENV_SPEC, num_steps=NUM_STEPS, num_lanes=NUM_LANES, rng=rng).arrays
    slots["observation/pose"][...] = slots["observation/pose"] * [scale, 1.0, 0.0] + [shift, -shift, 7.0]
    slots[DISCOUNTED_RETURN] = (rng.standard_normal((NUM_STEPS, NUM_LANES)) * 40.0 - 300.0).astype(np.float32)
    return slots


def acted_on(batches: list[Arrays]) -> np.ndarray:
    """The observations of all transitions, [n, 3]."""
    return np.concatenate([slots["observation/pose"][:-1][slots["mask"]] for slots in batches]).astype(np.float64)


def returns_of(batches: list[Arrays]) -> np.ndarray:
    return np.concatenate([slots[DISCOUNTED_RETURN][slots["mask"]] for slots in batches]).astype(np.float64)


def bits(normalizer: Normalizer) -> dict[str, bytes]:
    state = {path: array.tobytes() for path, array in normalizer.state_dict().items()}
    return state | {path: array.tobytes() for path, array in normalizer.statistics.items()}


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_moments_of_parts_are_those_of_the_whole(offset: float) -> None:
    samples = np.random.default_rng(0).standard_normal((1000, 2, 3)) * 2.0 + offset
    moments = Moments.zeros((2, 3))
    for part in np.split(samples, [1, 1, 10, 500, 999]):
        moments = moments.with_sums(moments.sums(part))
    assert moments.count == 1000
    np.testing.assert_allclose(moments.mean, samples.mean(0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(moments.variance, samples.var(0), rtol=1e-9)


def test_without_samples_nothing_is_shifted_or_scaled() -> None:
    normalizer = Normalizer(POSE)
    assert set(normalizer.statistics) == {f"observation/pose/{name}" for name in ("mean", "variance", "count")}
    assert not normalizer.statistics["observation/pose/mean"].any()
    assert (normalizer.statistics["observation/pose/variance"] == 1).all()


def test_statistics_are_those_of_the_observations_acted_on() -> None:
    """Final observations do not count, since only a reset follows; nor does the frame after the last step."""
    normalizer, batches = Normalizer(POSE), [make_slots(seed) for seed in range(3)]
    for slots in batches:
        assert not slots["mask"].all()
        slots["observation/pose"][:-1][~slots["mask"]] = 1e9
        slots["observation/pose"][-1] = -1e9
        _, metrics = normalizer.step(slots, one_rank)
        assert metrics == {"non_finite_transitions": 0.0}
    expected = acted_on(batches)
    np.testing.assert_allclose(normalizer.statistics["observation/pose/mean"], expected.mean(0), rtol=1e-6)
    np.testing.assert_allclose(normalizer.statistics["observation/pose/variance"], expected.var(0), rtol=1e-5, atol=0)
    assert all(array.dtype == np.float32 for array in normalizer.statistics.values())
    assert not any(array.flags.writeable for array in normalizer.statistics.values())


def test_a_batch_is_standardised_by_the_statistics_before_it() -> None:
    normalizer, batches = Normalizer(POSE), [make_slots(0), make_slots(1)]
    for slots in batches:
        before = {path: array.copy() for path, array in normalizer.statistics.items()}
        raw = slots["observation/pose"].copy()
        seen, _ = normalizer.step(slots, one_rank)
        deviation = np.sqrt(before["observation/pose/variance"] + np.float32(1e-8))
        expected = np.clip((raw - before["observation/pose/mean"]) / deviation, -10, 10)
        np.testing.assert_allclose(seen["observation/pose"], expected, rtol=1e-5, atol=1e-5)
        assert np.array_equal(slots["observation/pose"], raw), "the slot is unchanged"
        assert seen["observation/image"] is slots["observation/image"]
        assert seen["reward"] is slots["reward"]
        assert not np.array_equal(normalizer.statistics["observation/pose/mean"], before["observation/pose/mean"])


def test_a_run_starts_from_the_statistics_of_a_version_and_continues_with_their_weight() -> None:
    first, second = Normalizer(POSE, rewards=True), Normalizer(POSE, rewards=True)
    for seed in range(4):
        first.step(make_slots(seed), one_rank)
    second.start_from(first.statistics)
    for name, array in first.statistics.items():
        np.testing.assert_allclose(second.statistics[name], array, rtol=1e-6)
    assert second.statistics["observation/pose/count"] == acted_on([make_slots(seed) for seed in range(4)]).shape[0]
    later = make_slots(9, shift=-20.0)
    first.step(later, one_rank)
    second.step(later, one_rank)
    for name, array in first.statistics.items():
        np.testing.assert_allclose(second.statistics[name], array, rtol=1e-5, atol=1e-5)
    assert second.state_dict()["return/count"] == later["mask"].sum(), "rewards' scale begins anew"
    with pytest.raises(KeyError, match="observation/pose/mean"):
        second.start_from({})


def test_rewards_are_scaled_by_the_returns_including_this_batch() -> None:
    normalizer, batches = Normalizer(rewards=True), [make_slots(0), make_slots(1)]
    assert normalizer.statistics == {}, "actors do not need them"
    for number, slots in enumerate(batches, start=1):
        slots["reward"][3, 2] = 1e6
        seen, _ = normalizer.step(slots, one_rank)
        deviation = returns_of(batches[:number]).std()
        np.testing.assert_allclose(seen["reward"], np.clip(slots["reward"] / deviation, -10, 10), rtol=1e-4)
        assert seen["reward"].dtype == np.float32
        assert seen["observation/pose"] is slots["observation/pose"]


def test_rewards_are_clipped_after_they_are_scaled_and_unchanged_in_the_slot() -> None:
    for scales in (False, True):
        slots = make_slots(0)
        slots["reward"][...] *= 5.0
        raw = slots["reward"].copy()
        whole, _ = Normalizer(rewards=scales).step(slots, one_rank)
        bound = float(np.median(np.abs(whole["reward"])))
        seen, _ = Normalizer(rewards=scales, reward_clip=bound).step(slots, one_rank)
        expected = np.clip(whole["reward"], -bound, bound)
        assert (expected != whole["reward"]).any()
        np.testing.assert_array_equal(seen["reward"], expected)
        np.testing.assert_array_equal(slots["reward"], raw)


def test_non_finite_transitions_are_left_out_and_counted() -> None:
    clean, dirty = make_slots(0), make_slots(0)
    spoilt = [tuple(place) for place in np.argwhere(dirty["mask"])[[3, 10, 50]]]
    dirty["observation/pose"][spoilt[0]] = np.nan
    dirty["observation/pose"][spoilt[1]][1] = np.inf
    dirty[DISCOUNTED_RETURN][spoilt[2]] = np.nan
    dirty["observation/pose"][:-1][~dirty["mask"]] = np.nan
    for place in spoilt:
        clean["mask"][place] = False
    normalizers = [Normalizer(POSE, rewards=True) for _ in range(2)]
    _, counted = normalizers[0].step(dirty, one_rank)
    _, none = normalizers[1].step(clean, one_rank)
    assert (counted, none) == ({"non_finite_transitions": 3.0}, {"non_finite_transitions": 0.0})
    assert bits(normalizers[0]) == bits(normalizers[1])


def step_together(ranks: list[Normalizer], parts: list[Arrays]) -> list[Mapping[str, float]]:
    """Make one step on each rank with sums over all ranks; return their metrics."""
    said: list[np.ndarray] = []
    for rank, part in zip(ranks, parts, strict=True):
        rehearsal = Normalizer(POSE, rewards=True)
        rehearsal.load_state_dict(rank.state_dict())
        rehearsal.step(part, lambda values: said.append(values) or values)
    return [rank.step(part, lambda values: sum(said))[1] for rank, part in zip(ranks, parts, strict=True)]


def test_two_ranks_have_the_statistics_of_both_their_lanes() -> None:
    ranks, whole = [Normalizer(POSE, rewards=True) for _ in range(2)], Normalizer(POSE, rewards=True)
    for seed in range(3):
        slots = make_slots(seed)
        slots["observation/pose"][0, 1] = np.nan
        lanes = ([0, 1], [2, 3, 4, 5])
        parts = [{name: array[:, each] for name, array in slots.items() if array.ndim > 1} for each in lanes]
        metrics = step_together(ranks, parts)
        assert metrics[0] == metrics[1] == whole.step(slots, one_rank)[1]
    assert bits(ranks[0]) == bits(ranks[1])
    for path, array in whole.state_dict().items():
        np.testing.assert_allclose(ranks[0].state_dict()[path], array, rtol=1e-10)


def test_a_restored_normalizer_continues_with_the_same_bits() -> None:
    straight, resumed = Normalizer(POSE, rewards=True), Normalizer(POSE, rewards=True)
    straight.step(make_slots(0), one_rank)
    resumed.load_state_dict(straight.state_dict())
    assert bits(straight) == bits(resumed)
    seen = [normalizer.step(make_slots(1), one_rank)[0] for normalizer in (straight, resumed)]
    assert bits(straight) == bits(resumed)
    for name in ("observation/pose", "reward"):
        assert np.array_equal(seen[0][name], seen[1][name])


def test_a_state_is_a_copy_and_another_one_is_refused() -> None:
    normalizer = Normalizer(POSE, rewards=True)
    state = normalizer.state_dict()
    normalizer.step(make_slots(0), one_rank)
    assert not any(array.any() for array in state.values())
    before = bits(normalizer)
    with pytest.raises(KeyError):
        normalizer.load_state_dict(Normalizer(POSE).state_dict())
    assert bits(normalizer) == before


def test_statistics_stay_finite_whatever_is_observed() -> None:
    normalizer, slots = Normalizer(POSE), make_slots(0)
    slots["observation/pose"][...] = np.where(slots["observation/pose"] > 0, 3e38, -3e38)
    normalizer.step(slots, one_rank)
    assert all(np.isfinite(array).all() for array in normalizer.statistics.values())


def test_without_statistics_slots_pass_unchanged_and_nothing_is_reduced() -> None:
    def never(values: np.ndarray) -> np.ndarray:
        raise AssertionError("a reduction for nothing")

    slots = make_slots(0)
    seen, metrics = Normalizer().step(slots, never)
    assert seen is slots
    assert metrics == {}


def test_only_floats_are_normalised() -> None:
    assert normalizable(ENV_SPEC) == POSE


def rows_like(slots: Arrays) -> dict[str, np.ndarray]:
    """Rows with the observations and rewards of a slot."""
    mask = slots["mask"]
    pose = slots["observation/pose"]
    return {
        "observation/pose": pose[:-1][mask],
        "next/observation/pose": pose[1:][mask],
        "reward": slots["reward"][mask],
    }


def test_a_store_s_statistics_are_those_of_all_that_arrived() -> None:
    normalizer, batches = ReplayNormalizer(POSE, rewards=True), [make_slots(seed) for seed in range(4)]
    assert normalizer.is_empty
    parts = [normalizer.moments_of(normalizer.samples_of(slots)) for slots in batches]
    nothing = normalizer.moments_of({name: array[:0] for name, array in normalizer.samples_of(batches[0]).items()})
    for arrived in ([], [*parts[:3], nothing], [parts[3]]):
        normalizer.learn(normalizer.joined(arrived), one_rank)
    assert not normalizer.is_empty
    assert normalizer.state_dict()["observation/pose/count"] == len(acted_on(batches))
    expected, state = acted_on(batches), normalizer.state_dict()
    np.testing.assert_allclose(state["observation/pose/mean"], expected.mean(0), rtol=1e-12)
    np.testing.assert_allclose(state["observation/pose/squares"], expected.var(0) * len(expected), rtol=1e-9)
    np.testing.assert_allclose(state["return/squares"] / state["return/count"], returns_of(batches).var(), rtol=1e-9)


def test_rows_of_a_store_are_normalised_by_all_that_was_learned_and_teach_nothing() -> None:
    normalizer, slots = ReplayNormalizer(POSE, rewards=True, reward_clip=0.01), make_slots(0)
    normalizer.learn(normalizer.moments_of(normalizer.samples_of(slots)), one_rank)
    before, rows = bits(normalizer), rows_like(slots)
    seen, metrics = normalizer.step(rows, one_rank)
    assert metrics == {"non_finite_transitions": 0.0}
    pose = acted_on([slots])
    for name in ("observation/pose", "next/observation/pose"):
        deviation = np.sqrt(pose.var(0) + 1e-8)
        np.testing.assert_allclose(seen[name], np.clip((rows[name] - pose.mean(0)) / deviation, -10, 10), atol=2e-4)
    assert seen["reward"] is rows["reward"], "they were scaled before they were added up"
    scaled = np.clip(rows["reward"] / returns_of([slots]).std(), -0.01, 0.01)
    assert (np.abs(scaled) < 0.01).any()
    assert (np.abs(scaled) == 0.01).any()
    np.testing.assert_allclose(normalizer.rewards(rows["reward"]), scaled, rtol=1e-4)
    assert normalizer.rewards(rows["reward"]).dtype == np.float32
    assert bits(normalizer) == before


def test_what_a_store_got_and_is_not_finite_is_counted_with_the_next_step() -> None:
    normalizer, slots = ReplayNormalizer(POSE, rewards=True), make_slots(0)
    first, second = np.argwhere(slots["mask"])[:2]
    slots["observation/pose"][tuple(first)] = np.nan
    slots[DISCOUNTED_RETURN][tuple(second)] = np.inf
    found = normalizer.moments_of(normalizer.samples_of(slots))
    for _ in range(2):
        normalizer.learn(normalizer.joined([found, found]), one_rank)
    counts = [normalizer.step(rows_like(slots), one_rank)[1]["non_finite_transitions"] for _ in range(2)]
    assert counts == [8.0, 0.0]
    assert normalizer.state_dict()["return/count"] == 4 * (slots["mask"].sum() - 2)
    assert all(np.isfinite(array).all() for array in normalizer.state_dict().values())


def test_two_ranks_with_stores_have_the_statistics_of_both() -> None:
    ranks, batches = [ReplayNormalizer(POSE, rewards=True) for _ in range(2)], [make_slots(0), make_slots(1)]
    for _ in range(2):
        said: list[np.ndarray] = []
        parts = [rank.moments_of(rank.samples_of(slots)) for rank, slots in zip(ranks, batches, strict=True)]
        for rank, part in zip(ranks, parts, strict=True):
            rehearsal = ReplayNormalizer(POSE, rewards=True)
            rehearsal.load_state_dict(rank.state_dict())
            rehearsal.learn(part, lambda values: said.append(values) or values)
        for rank, part in zip(ranks, parts, strict=True):
            rank.learn(part, lambda _: sum(said))
        batches = [make_slots(2), make_slots(3)]
    assert bits(ranks[0]) == bits(ranks[1])
    expected, state = acted_on([make_slots(seed) for seed in range(4)]), ranks[0].state_dict()
    np.testing.assert_allclose(state["observation/pose/mean"], expected.mean(0), rtol=1e-10)
    np.testing.assert_allclose(state["observation/pose/squares"], expected.var(0) * len(expected), rtol=1e-9)


def test_a_store_without_statistics_has_rows_pass_unchanged_but_for_clipped_rewards() -> None:
    normalizer, rows = ReplayNormalizer(reward_clip=0.5), rows_like(make_slots(0))
    assert not normalizer.is_empty
    assert normalizer.fields == ()
    assert normalizer.moments_of(normalizer.samples_of(make_slots(0))).num_left_out == 0
    seen, metrics = normalizer.step(rows, one_rank)
    assert seen is rows
    assert metrics == {}
    np.testing.assert_array_equal(normalizer.rewards(rows["reward"]), np.clip(rows["reward"], -0.5, 0.5))


def test_a_batch_without_a_transition_on_one_rank_is_learned_from() -> None:
    normalizer, slots = Normalizer(POSE, rewards=True), make_slots(0)
    slots["mask"][...] = False
    normalizer.step(slots, one_rank)
    assert normalizer.state_dict()["return/count"] == 0
