"""Rows of a replay store: transitions with the rewards of n steps and the frame they lead to, or sequences of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.buffers.replay.layout import EPISODE_START
from rlsrl.buffers.replay.segments import NONE, Indices, Segments, stack_places
from rlsrl.data.sequences import HAS_BURN_IN, IS_FIRST, first_frames
from rlsrl.data.specs import Arrays

NEXT = "next/"
"""Prefix of the paths of observations that transitions lead to."""
IMPORTANCE = "importance"
"""Name of the rows' importance ratios, [N] float32, in (0, 1]: see ``importance_of``. Which power of it corrects a
loss, the algorithm decides."""
FOLLOWING = "following"
"""Among the rows of sequences: the frame that each step's last reward led to, int64 [N, T], from 1 to T."""


def largest_ratios(share: NDArray[np.float64], *, size: int) -> list[float]:
    """Return the largest ``1 / P(i)`` of the rows of each minibatch, by the probabilities [K * size] of the draws."""
    largest: list[float] = (1.0 / share.reshape(-1, size).min(axis=1)).tolist()
    return largest


def importance_of(share: NDArray[np.float64], of_ranks: Sequence[Sequence[float]], *, size: int) -> NDArray[np.float32]:
    """Return the importance ratios of rows, [K * size], by the probabilities with which this rank drew them.

    A row's ratio says how much more often it would be drawn if the rows of all ranks had the same probability. Of R
    ranks, each draws an equal part of a minibatch from its own store. So among N rows of all ranks the
    ratio is ``R / (N * P(i))``, however many of them each rank has. It is divided by the largest ratio of its minibatch
    over all ranks' rows, as in Schaul et al. 2016, section 3.4: R and N cancel.

    Args:
        share: ``Drawn.share``.
        of_ranks: ``largest_ratios`` of each rank.
        size: Rows of this rank's part of a minibatch.
    """
    largest = np.max(np.array(of_ranks, np.float64), axis=0)[:, np.newaxis]
    ratios: NDArray[np.float64] = 1.0 / share.reshape(-1, size) / largest
    return ratios.reshape(-1).astype(np.float32)


def as_stored(reward: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rewards as they are."""
    return reward


@dataclass(frozen=True, kw_only=True)
class RowForm:
    """What a row makes of its transition and of those after it in the episode."""

    num_steps: int
    """Steps whose rewards a row has: n of n-step returns."""
    discount: float
    """Per env step."""
    rewards: Callable[[NDArray[np.float32]], NDArray[np.float32]] = as_stored
    """Returns stored rewards as the algorithm sees them."""
    burn_in: bool = False
    """Of sequences: whether they have the frames of the segment before, too."""


def rows_of(segments: Segments, keys: Indices, form: RowForm) -> Arrays:
    """Return the rows with these keys, [N]: ``number * T + step`` for a step of a segment that is held.

    Sequences where slots carry recurrent state, else transitions: see ``sequences_of`` and ``transitions_of``.
    """
    return (sequences_of if segments.layout.states else transitions_of)(segments, keys, form)


def transitions_of(segments: Segments, keys: Indices, form: RowForm) -> Arrays:
    """Return the transitions with these keys, [N].

    With up to n = ``form.num_steps`` steps from each on, fewer at the end of an episode and where the lane's next
    segment is not there yet:

    - ``action`` [N, ...] and observations [N, ...] by path;
    - ``reward`` [N]: the sum of the steps' rewards, each as ``form.rewards`` returns it, the k-th weighted by
      ``discount ** k``;
    - ``next/...`` [N, ...]: observations after the last of the steps;
    - ``discount`` [N]: the weight of a value of these, ``discount ** steps``, or 0 if the episode terminated.
    """
    discount, rewards = form.discount, form.rewards
    layout, flat = segments.layout, segments.flat
    first = last = keys % layout.num_places
    reward = rewards(flat["reward"][first])
    weight = np.full(len(keys), discount, np.float32)
    for _ in range(1, form.num_steps):
        last, goes_on = _after(segments, last)
        reward += np.where(goes_on, weight * rewards(flat["reward"][last]), np.float32(0.0))
        weight *= np.where(goes_on, np.float32(discount), np.float32(1.0))
    weight *= ~flat["terminated"][last]
    rows = {"action": flat["action"].take(first, axis=0), "reward": reward, "discount": weight}
    for name in layout.frames:
        rows[name] = _frames(segments, name, first)
        rows[NEXT + name] = _frames(segments, name, last, 1)
    return rows


def sequences_of(segments: Segments, keys: Indices, form: RowForm) -> Arrays:
    """Return the segments with these keys, [N], as sequences of T steps and T + 1 frames.

    N-step returns end with the sequence, as they do at the end of an episode: its last step has one reward.

    - ``action``, ``reward`` and ``discount``, [N, T, ...]: as those of transitions;
    - ``FOLLOWING`` [N, T]: the frame to whose value ``discount`` belongs;
    - ``mask`` [N, T]: which steps are transitions;
    - observations [N, T + 1, ...] by path, and ``IS_FIRST`` [N, T + 1];
    - ``state/...`` [N, size]: the recurrent state with which frame 0 was acted on.

    With ``form.burn_in`` the T frames before these are the first ones, [N, 2 T + 1, ...], and ``HAS_BURN_IN`` [N] says
    where they are known: the state is that of the first of them there.
    """
    layout, arrays = segments.layout, segments.arrays
    places = keys // layout.num_steps % layout.num_segments
    mask = arrays["mask"][places]
    action = arrays["action"][places]
    action[~mask] = 0  # a value that a step without a transition has may be no action
    rows = {"action": action, "mask": mask, **_returns(segments, places, mask, form)}
    is_first = np.zeros((len(keys), layout.num_steps + 1), np.bool_)
    is_first[:, 1:] = first_frames(mask)
    before, known = places, np.zeros(len(keys), np.bool_)
    if form.burn_in:
        preceding = segments.preceding[places]
        known = segments.are_held(preceding)
        before = np.where(known, preceding % layout.num_segments, places)
        # Of an unknown segment nothing is used: the sequence's own state is that of its frame 0.
        earlier = first_frames(arrays["mask"][before]) & known[:, None]
        is_first = np.concatenate([is_first[:, :1], earlier, is_first[:, 1:]], axis=1)
        rows[HAS_BURN_IN] = known
    rows[IS_FIRST] = is_first
    rows |= {name: arrays[name][before] for name in layout.states}
    for name in layout.frames:
        frames = _frames_of(segments, name, places)
        if form.burn_in:
            frames = np.concatenate([_frames_of(segments, name, before)[:, :-1], frames], axis=1)
        rows[name] = frames
    return rows


def _returns(segments: Segments, places: Indices, mask: NDArray[np.bool_], form: RowForm) -> dict[str, NDArray[Any]]:
    """Return ``reward``, ``discount`` and ``FOLLOWING`` of all steps of these segments, [N, T] each."""
    arrays, num_steps = segments.arrays, segments.layout.num_steps
    rewards = form.rewards(arrays["reward"][places])
    terminated = arrays["terminated"][places]
    has_ended = terminated | arrays["truncated"][places]
    last = np.broadcast_to(np.arange(num_steps), mask.shape)
    reward, weight = rewards.copy(), np.full(mask.shape, form.discount, np.float32)
    for _ in range(1, form.num_steps):
        after = np.minimum(last + 1, num_steps - 1)
        goes_on = (last + 1 < num_steps) & ~np.take_along_axis(has_ended, last, 1) & np.take_along_axis(mask, after, 1)
        reward += np.where(goes_on, weight * np.take_along_axis(rewards, after, 1), np.float32(0.0))
        weight *= np.where(goes_on, np.float32(form.discount), np.float32(1.0))
        last = np.where(goes_on, after, last)
    weight *= ~np.take_along_axis(terminated, last, 1)
    return {"reward": reward, "discount": weight, FOLLOWING: last + 1}


def fields_of(segments: Segments, keys: Indices, names: Iterable[str]) -> Arrays:
    """Return these fields of the transitions' slots, each [N, ...]: observations are those that were acted on."""
    places, frames = keys % segments.layout.num_places, segments.layout.frames
    return {
        name: _frames(segments, name, places) if name in frames else segments.flat[name].take(places, axis=0)
        for name in names
    }


def _after(segments: Segments, places: Indices) -> tuple[Indices, NDArray[np.bool_]]:
    """Return the places of the transitions after these in their episodes, and whether there are any; else these.

    None follows the end of an episode, a step whose successor has not arrived, and a step before one that is no
    transition: after a fault, an episode of the slot before is not marked as truncated.
    """
    layout, flat = segments.layout, segments.flat
    segment, step = np.divmod(places, layout.num_steps)
    is_last = step + 1 == layout.num_steps
    following = segments.following[segment]
    after = np.where(is_last, following % layout.num_segments * layout.num_steps, places + 1)
    has_ended = flat["terminated"][places] | flat["truncated"][places]
    exists = ~has_ended & (~is_last | (following != NONE))
    exists &= flat["mask"][np.where(exists, after, places)]
    return np.where(exists, after, places), exists


def _frames_of(segments: Segments, name: str, places: Indices) -> NDArray[Any]:
    """Return all frames of the segments at these places, [N, T + 1, ...]."""
    layout = segments.layout
    if name not in layout.stacks:
        whole: NDArray[Any] = segments.arrays[name][places]
        return whole
    steps = (places[:, None] * layout.num_steps + np.arange(layout.num_steps)).reshape(-1)
    frames = _frames(segments, name, steps).reshape(len(places), layout.num_steps, *layout.frame_spec(name).shape)
    final = _frames(segments, name, places * layout.num_steps + layout.num_steps - 1, 1)
    return np.concatenate([frames, final[:, None]], axis=1)


def _frames(segments: Segments, name: str, places: Indices, after: int = 0) -> NDArray[Any]:
    """Return the observations ``after`` steps after these steps' own, [N, ...]."""
    layout, flat = segments.layout, segments.flat
    segment = places // layout.num_steps
    frames = places + segment + after  # a segment has one frame more than it has steps
    if name not in layout.stacks:
        whole: NDArray[Any] = flat[name].take(frames, axis=0)
        return whole
    depth = layout.stacks[name]
    of_segment = stack_places(places % layout.num_steps + after, flat[EPISODE_START][frames], depth)
    images: NDArray[Any] = flat[name].take(segment[:, None] * (layout.num_steps + depth) + of_segment, axis=0)
    return images
