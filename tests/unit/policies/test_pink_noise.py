"""Pink noise: its values, its spectrum, and how actors' samplers draw it."""

from __future__ import annotations

import numpy as np
import pytest

from rlsrl.data.specs import ActionPart
from rlsrl.policies.pink_noise import PinkNoise, PinkProcess
from rlsrl.policies.sampling import Exploration, Sampler, make_sampler

NUM_STEPS = 8


def drawn(process: PinkProcess, num_steps: int, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    out = np.empty((num_steps, *shape), np.float32)
    process.fill(out, rng)
    return out


def slope(noise: np.ndarray) -> float:
    """Return the exponent of the power's dependence on the frequency, by the lanes of [T, N]."""
    power = np.square(np.abs(np.fft.rfft(noise, axis=0))).mean(axis=1)
    frequency = np.fft.rfftfreq(len(noise))
    inside = (frequency > 1 / 512) & (frequency < 1 / 8)
    return float(np.polyfit(np.log(frequency[inside]), np.log(power[inside]), 1)[0])


def sampler_of(exploration: Exploration, *, rng: np.random.Generator, greedy: bool = False, lanes: int = 3) -> Sampler:
    return make_sampler(
        [ActionPart(kind="squashed", num_outputs=2)], is_joint=False, num_steps=NUM_STEPS, num_lanes=lanes, rng=rng,
        greedy=greedy, exploration=exploration,
    )  # fmt: skip


def actions_of(sampler: Sampler, lanes: int = 3) -> np.ndarray:
    """Return the actions of a rollout, [T, N, 2], with means of 0 and deviations of 1."""
    sampler.begin()
    sampler.parameters.fill(0.0)
    out = np.empty((NUM_STEPS, lanes, 2), np.float32)
    for step in range(NUM_STEPS):
        sampler.choose(step, out[step])
    return out


def test_each_value_is_a_standard_normal_one() -> None:
    noise = drawn(PinkProcess((40_000,)), 100, (40_000,), np.random.default_rng(0))
    for step in (0, 1, 99):
        assert noise[step].mean() == pytest.approx(0.0, abs=0.02)
        assert noise[step].std() == pytest.approx(1.0, abs=0.02)
        assert np.mean(np.abs(noise[step]) < 1.0) == pytest.approx(0.6827, abs=0.01)


def test_the_power_falls_as_the_frequency_rises() -> None:
    rng = np.random.default_rng(0)
    assert slope(drawn(PinkProcess((64,)), 8192, (64,), rng)) == pytest.approx(-1.0, abs=0.1)
    assert slope(rng.standard_normal((8192, 64))) == pytest.approx(0.0, abs=0.1), "what the check finds in white noise"


def test_lanes_are_independent() -> None:
    noise = drawn(PinkProcess((2, 3)), 200_000, (2, 3), np.random.default_rng(0)).reshape(-1, 6)
    assert np.abs(np.corrcoef(noise.T) - np.eye(6)).max() < 0.1


def test_noise_goes_on_from_rollout_to_rollout() -> None:
    of_one, of_two = PinkProcess((2, 3)), PinkProcess((2, 3))
    first, second = np.random.default_rng(0), np.random.default_rng(0)
    whole = drawn(of_one, 20, (2, 3), first)
    parts = [drawn(of_two, num_steps, (2, 3), second) for num_steps in (5, 15)]
    np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_actors_that_take_turns_share_the_noise() -> None:
    exploration, rng = Exploration(pink=PinkNoise()), np.random.default_rng(0)
    first, second = (sampler_of(exploration, rng=rng) for _ in range(2))
    alone = sampler_of(Exploration(pink=PinkNoise()), rng=np.random.default_rng(0))
    for turn in (first, second, first):
        np.testing.assert_array_equal(actions_of(turn), actions_of(alone))


def test_a_sampler_draws_pink_noise_only_where_it_explores() -> None:
    pink = Exploration(pink=PinkNoise())
    sampler = sampler_of(pink, rng=np.random.default_rng(0), lanes=1)
    rollouts = np.concatenate([actions_of(sampler, lanes=1)[:, 0, 0] for _ in range(1024)])
    assert slope(np.arctanh(rollouts)[:, None]) == pytest.approx(-1.0, abs=0.2)
    greedy = sampler_of(Exploration(pink=PinkNoise()), rng=np.random.default_rng(0), greedy=True)
    assert not actions_of(greedy).any(), "the tanh of the mean"


def test_each_part_of_an_action_has_noise_of_its_own() -> None:
    parts = [ActionPart(kind="squashed", num_outputs=2) for _ in range(2)]
    sampler = make_sampler(
        parts, is_joint=True, num_steps=NUM_STEPS, num_lanes=1, rng=np.random.default_rng(0), greedy=False,
        exploration=Exploration(pink=PinkNoise()),
    )  # fmt: skip
    found = []
    for _ in range(2000):
        sampler.begin()
        sampler.parameters.fill(0.0)
        out = np.empty((NUM_STEPS, 1, 4), np.float32)
        for step in range(NUM_STEPS):
            sampler.choose(step, out[step])
        found.append(out[:, 0])
    noise = np.arctanh(np.concatenate(found))
    assert np.abs(np.corrcoef(noise.T) - np.eye(4)).max() < 0.2
    assert all(np.corrcoef(part[1:], part[:-1])[0, 1] > 0.5 for part in noise.T)
