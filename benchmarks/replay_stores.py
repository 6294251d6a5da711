"""Compare replay stores by themselves: batches drawn a second from the same data, by rlsrl and other libraries.

    python benchmarks/replay_stores.py --rounds 5
    python benchmarks/replay_stores.py --keep     # and keep the figures

Each store holds 150,000 transitions: stacks of four images of 84 x 84 pixels, or vectors of 17 numbers, each with the
observation that follows. A draw is a batch of 256 transitions, as arrays; with priorities, new ones are written back
for the batch, too. Stores take turns of a second, each in a process and a virtual environment of its own. rlsrl's store
is a file, as in a run. Of images it takes turns with 1,000,000 transitions, too (7.8 GB), which no ratio counts.

The bytes of a transition have the following observation in them: of rlsrl those of the file, of the others the memory
that filling took. A stack of images has 28,224 bytes; rlsrl's aim is 1/3.5 of one, 8,064 bytes.

TorchRL is missing: its extension, 0.13.1 to 0.14.1, does not load with torch 2.13 (undefined symbol), and there is no
source package to build it from.

This file is driver and worker: other libraries' environments have neither rlsrl nor its dependencies.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CAPACITY, BATCH, STACK, SIZE, FEATURES = 150_000, 256, 4, 84, 17
FRAMES = 1_000_000
"""Transitions of rlsrl's larger store of images."""
EPISODE = 200
SECONDS = 1.0
RLSRL, LARGE, STABLE_BASELINES3, CPPRB = "rlsrl", "rlsrl, large", "stable-baselines3", "cpprb"
KINDS = ("pixels", "vectors")
DRAWS = ("uniform", "priority")
Draw = Callable[[], None]
KEPT_AS = "replay-stores"
"""The name of the kept result."""


class Filled(NamedTuple):
    """A store that is full."""

    draw: Draw
    """Draws one batch."""
    file_bytes: int = 0
    """Size of the store's file; 0 if the store is in memory."""


def transitions(kind: str, number: int) -> Iterator[tuple[Any, int, float, Any, bool]]:
    """Yield (observation, action, reward, following, has ended); images as stacks [STACK, SIZE, SIZE]."""
    rng = np.random.default_rng(0)
    made = 0
    while made < number:
        if kind == "pixels":
            frames = rng.integers(0, 256, (EPISODE + 1, SIZE, SIZE), np.uint8)
            frames = np.concatenate([np.repeat(frames[:1], STACK - 1, axis=0), frames])
            observations = [frames[step : step + STACK] for step in range(EPISODE + 1)]
        else:
            observations = [*rng.standard_normal((EPISODE + 1, FEATURES), np.float32)]
        for step in range(min(EPISODE, number - made)):
            yield observations[step], step % 4, float(step), observations[step + 1], step == EPISODE - 1
        made += EPISODE


def rlsrl_draw(kind: str, draws: str, capacity: int, folder: Path) -> Filled:
    """Fill rlsrl's store through slots of 8 lanes and 40 steps, as actors write them."""
    from rlsrl.buffers.replay.draws import PrioritizedDraws, UniformDraws
    from rlsrl.buffers.replay.layout import ReplayLayout
    from rlsrl.buffers.replay.rows import RowForm, rows_of
    from rlsrl.buffers.replay.segments import Segments
    from rlsrl.buffers.replay.store_file import StoreFile
    from rlsrl.data.slots import ProducerId, Slot, rollout_layout
    from rlsrl.data.specs import ActionSpec, ArraySpec, EnvSpec

    shape, dtype = ((STACK, SIZE, SIZE), "uint8") if kind == "pixels" else ((FEATURES,), "float32")
    action = ActionSpec(kind="discrete", array=ArraySpec(shape=(), dtype="int64"), num_actions=4)
    env_spec = EnvSpec(observation={"observation": ArraySpec(shape=shape, dtype=dtype)}, action=action)
    num_steps, num_lanes = 40, 8
    slot_layout = rollout_layout(env_spec, num_steps=num_steps, num_lanes=num_lanes)
    stacks = {"observation": STACK} if kind == "pixels" else {}
    layout = ReplayLayout.of(slot_layout, capacity=capacity, stacks=stacks, has_priorities=draws == "priority")
    path = folder / "benchmark.store"
    file = StoreFile.open(path, layout, former=None, owner=0)
    segments = Segments(layout, file.content)
    chosen = UniformDraws(segments) if draws == "uniform" else PrioritizedDraws(segments, exponent=0.6, offset=1e-6)
    lanes = [transitions(kind, capacity) for _ in range(num_lanes)]
    arrays = slot_layout.view(bytearray(slot_layout.nbytes))
    arrays["mask"].fill(True)
    for sequence in range(-(-capacity // (num_steps * num_lanes))):
        for lane, source in enumerate(lanes):
            for step in range(num_steps):
                now, act, reward, following, has_ended = next(source)
                arrays["observation"][step, lane], arrays["observation"][step + 1, lane] = now, following
                arrays["action"][step, lane], arrays["reward"][step, lane] = act, reward
                # A truncated step's lane would go on with a reset: the rollout's length divides an episode.
                arrays["terminated"][step, lane] = has_ended
        chosen.inserted(segments.insert(Slot(arrays=arrays, producer=ProducerId(0, 0), sequence=sequence)).numbers)
    rng, form = np.random.default_rng(1), RowForm(num_steps=1, discount=0.99)

    def draw() -> None:
        drawn = chosen.draw(BATCH, rng)
        rows_of(segments, drawn.keys, form)
        if draws == "priority":
            chosen.settle(drawn.keys, rng.random(BATCH, np.float32))

    return Filled(draw, path.stat().st_size)


def stable_baselines3_draw(kind: str, draws: str, capacity: int, folder: Path) -> Filled:
    """Fill the replay buffer of Stable-Baselines3, which draws uniformly only."""
    import gymnasium
    from stable_baselines3.common.buffers import ReplayBuffer

    del folder
    assert draws == "uniform"
    space = (
        gymnasium.spaces.Box(0, 255, (STACK, SIZE, SIZE), np.uint8)
        if kind == "pixels"
        else gymnasium.spaces.Box(-1e9, 1e9, (FEATURES,), np.float32)
    )
    buffer = ReplayBuffer(capacity, space, gymnasium.spaces.Discrete(4), device="cpu")
    for now, action, reward, following, has_ended in transitions(kind, capacity):
        flags = np.array([has_ended])
        buffer.add(now[None], following[None], np.array([action]), np.array([reward]), flags, [{}])
    return Filled(lambda: buffer.sample(BATCH))


def cpprb_draw(kind: str, draws: str, capacity: int, folder: Path) -> Filled:
    """Fill the buffer of cpprb, images compressed as its documentation says."""
    import cpprb

    del folder
    is_image = kind == "pixels"
    shape = (SIZE, SIZE, STACK) if is_image else (FEATURES,)
    fields = {
        "obs": {"shape": shape, "dtype": np.uint8 if is_image else np.float32},
        "act": {"dtype": np.int64},
        "rew": {},
        "done": {},
    }
    options = {"next_of": "obs", **({"stack_compress": "obs"} if is_image else {})}
    has_priorities = draws == "priority"
    kind_of = cpprb.PrioritizedReplayBuffer if has_priorities else cpprb.ReplayBuffer
    buffer = kind_of(capacity, fields, **options, **({"alpha": 0.6} if has_priorities else {}))
    for now, action, reward, following, has_ended in transitions(kind, capacity):
        seen, then = (np.moveaxis(each, 0, -1) if is_image else each for each in (now, following))
        buffer.add(obs=seen, act=action, rew=reward, next_obs=then, done=has_ended)
        if has_ended:
            buffer.on_episode_end()
    rng = np.random.default_rng(1)

    def draw() -> None:
        if has_priorities:
            found = buffer.sample(BATCH, beta=0.4)
            buffer.update_priorities(found["indexes"], rng.random(BATCH, np.float32))
        else:
            buffer.sample(BATCH)

    return Filled(draw)


STORES: dict[str, Callable[[str, str, int, Path], Filled]] = {
    RLSRL: rlsrl_draw,
    LARGE: rlsrl_draw,
    STABLE_BASELINES3: stable_baselines3_draw,
    CPPRB: cpprb_draw,
}


def memory() -> int:
    """Return the bytes of memory that this process has written."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def work(store: str, kind: str, draws: str, capacity: int) -> None:
    """Fill the store and print its bytes a transition; for each line that comes, draw for a second and print the
    batches a second."""
    with tempfile.TemporaryDirectory() as folder:
        before = memory()
        filled = STORES[store](kind, draws, capacity, Path(folder))
        print((filled.file_bytes or memory() - before) / capacity, flush=True)
        for _ in sys.stdin:
            began, batches = time.perf_counter(), 0
            while (seconds := time.perf_counter() - began) < SECONDS:
                filled.draw()
                batches += 1
            print(batches / seconds, flush=True)


def contestants(kind: str, draws: str, capacity: int, frames: int) -> dict[str, int]:
    """Return the transitions of each store of a case, by store."""
    capacities = dict.fromkeys(STORES, capacity)
    del capacities[LARGE]
    if kind == "pixels":
        capacities[LARGE] = frames
    if draws == "priority":
        del capacities[STABLE_BASELINES3]
    return capacities


def compare(kind: str, draws: str, rounds: int, capacities: Mapping[str, int]) -> dict[str, Any]:
    """Return each store's bytes a transition and, of all rounds, its batches a second and rlsrl's ratio to the best
    peer."""
    from peer_environments import python_of

    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for store, capacity in capacities.items():
            python = sys.executable if store in (RLSRL, LARGE) else python_of(store)
            case = ["--kind", kind, "--draws", draws, "--capacity", str(capacity)]
            processes[store] = subprocess.Popen(
                [python, __file__, "--store", store, *case], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        sizes = {store: _reply(store, process) for store, process in processes.items()}
        found: dict[str, list[float]] = {store: [] for store in processes}
        for _ in range(rounds):
            for store, process in processes.items():
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                found[store].append(_reply(store, process))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    peers = [found[store] for store in found if store not in (RLSRL, LARGE)]
    ratios = [mine / max(theirs) for mine, *theirs in zip(found[RLSRL], *peers, strict=True)]
    return {
        "transitions": dict(capacities),
        "bytes_a_transition": {store: round(size) for store, size in sizes.items()},
        "batches_a_second": found,
        "ratio": ratios,
    }


def _reply(store: str, process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{store} has failed; its error is above")
    return float(line)


def table(name: str, case: Mapping[str, Any]) -> str:
    """Return a case as lines of text."""
    lines = [f"{name}: store, transitions, bytes a transition, batches a second"]
    for store, rates in case["batches_a_second"].items():
        transitions, size = case["transitions"][store], case["bytes_a_transition"][store]
        lines.append(f"  {store}  {transitions:,}  {size:,}  {statistics.median(rates):,.0f}")
    ratios = case["ratio"]
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return "\n".join([*lines, f"  ratio to the fastest peer {ratio}"])


def keep(results: Mapping[str, Any]) -> None:
    """Keep the results with the machine and the commit."""
    from machine import REPOSITORY, described
    from results import FOLDER, write

    absent = {"torchrl": "its extension does not load with torch 2.13, and there is no source package"}
    document = {"batch": BATCH, "cases": results, "absent": absent, "machine": described(REPOSITORY)}
    write(FOLDER / f"{KEPT_AS}.json", document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--capacity", type=int, default=CAPACITY)
    parser.add_argument("--frames", type=int, default=FRAMES, help="transitions of rlsrl's larger store of images")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--draws", choices=DRAWS)
    parser.add_argument("--store", choices=[*STORES], help="work as this store's process")
    parser.add_argument("--keep", action="store_true", help=f"write docs/benchmarks/{KEPT_AS}.json")
    args = parser.parse_args()
    if args.store is not None:
        work(args.store, args.kind, args.draws, args.capacity)
        return
    results = {}
    for kind in [args.kind] if args.kind else KINDS:
        for draws in [args.draws] if args.draws else DRAWS:
            name = f"{kind}, {draws}"
            results[name] = compare(kind, draws, args.rounds, contestants(kind, draws, args.capacity, args.frames))
            print(table(name, results[name]), flush=True)
    if args.keep:
        keep(results)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
