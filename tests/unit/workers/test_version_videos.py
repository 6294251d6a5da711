"""Videos of evaluated versions: a frame a poll, obedient, and no failure of them costs anything else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
from gymnasium import spaces
from structlog.testing import capture_logs

from rlsrl.api.resolved import EvaluatorConfig
from rlsrl.data.version import Version
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.parameters.evaluations import evaluation_of
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.layout import layout_digest
from rlsrl.parameters.protocols import Parameters
from rlsrl.parameters.terminal import TERMINAL_KEY
from rlsrl.runtime.call_board import BOARD_BYTES, CallBoard
from rlsrl.testing.contexts import RecordingSession, make_context
from rlsrl.testing.stored_runs import LETS_FALL, LINEAR, LINEAR_SHAPES
from rlsrl.workers import recording
from rlsrl.workers.build.common import EXPORTED_ACTOR_KEY, INTERFACE_KEY
from rlsrl.workers.evaluator import EvaluatorWorker

POLICY = "default"
ENVIRONMENT = "rlsrl-tests/Shown-v0"
LENGTH = 5
DEADLINE = 60.0


class ShownEnv(gymnasium.Env[Any, Any]):
    """Its frames are shades of grey, brighter with each step. It counts, and does what a test wants."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 4}
    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)
    num_rendered: ClassVar[int] = 0
    num_open: ClassVar[int] = 0
    seeds: ClassVar[list[tuple[bool, int | None]]] = []
    """Of each reset with a seed: whether the environment renders, and the seed."""
    render_with: ClassVar[Callable[[int], Any] | None] = None
    """Makes the frame from the number of steps taken."""
    never_ends: ClassVar[bool] = False

    def __init__(self, render_mode: str | None = None, *, hides: bool = False) -> None:
        self.render_mode = None if hides else render_mode
        type(self).num_open += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.seeds.append((self.render_mode is not None, seed))
        self._taken = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._taken += 1
        return np.zeros(4, np.float32), 1.0, self._taken == LENGTH and not self.never_ends, False, {}

    def render(self) -> Any:
        type(self).num_rendered += 1
        make = type(self).render_with
        return np.full((36, 48, 3), 20 + 30 * self._taken, np.uint8) if make is None else make(self._taken)

    def close(self) -> None:
        type(self).num_open -= 1


@pytest.fixture(autouse=True)
def shown_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("rlsrl.workers.evaluator.CHECK_SECONDS", 0.001)
    gymnasium.register(ENVIRONMENT, entry_point=ShownEnv, disable_env_checker=True)
    ShownEnv.num_rendered = ShownEnv.num_open = 0
    ShownEnv.seeds = []
    ShownEnv.render_with, ShownEnv.never_ends = None, False
    yield
    del gymnasium.registry[ENVIRONMENT]


class Bench:
    """A store with versions, and evaluators that record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.db = FilesystemParameterDB(folder / "parameters")
        self.session = RecordingSession()
        self.context = make_context("evaluator", folder / "ledger", join_session=self.session)
        self.worker: EvaluatorWorker

    def push(self, *steps: int) -> None:
        for step in steps:
            metadata = {
                EXPORTED_ACTOR_KEY: LINEAR.to_json(),
                INTERFACE_KEY: EnvironmentInterface(
                    observation_space=ShownEnv.observation_space, action_space=ShownEnv.action_space
                ).to_json(),
                "number": step,
            }
            vector = np.array(LETS_FALL, np.float32)
            parameters = Parameters(version=Version(1, step), vector=vector, layout=layout_digest(LINEAR_SHAPES))
            self.db.push(POLICY, parameters, metadata=metadata)

    def finish(self, step: int) -> None:
        self.db.annotate(POLICY, Version(1, step), {TERMINAL_KEY: {"reason": "envSteps"}})

    def begin(self, *, environment: dict[str, Any] | None = None, **video: Any) -> EvaluatorWorker:
        """Return a configured and started evaluator that records each evaluation."""
        config = {
            "experiment": "test",
            "run_uid": "test",
            "seed": 1,
            "coordinator_address": "unix-abstract:none",
            "heartbeat_seconds": 1.0,
            "metrics_address": "127.0.0.1:0",
            "ledger_folder": "",
            "environment": {"id": ENVIRONMENT, "max_non_finite": 100, **(environment or {})},
            "network": {"mlp": {}},
            "outputs": "policyAndValue",
            "num_evaluators": 1,
            "environments": 2,
            "episodes_per_environment": 1,
            "max_steps_per_environment": 64,
            "greedy": True,
            "policy_name": POLICY,
            "parameter_store": {"folder": ""},
            "video": {"every_evaluations": 1, **video},
        }
        self.worker = EvaluatorWorker(self.context, open_db=lambda _: self.db)
        self.worker.configure(EvaluatorConfig.model_validate(config, by_name=True))
        self.worker.start()
        return self.worker

    def run(self, **options: Any) -> EvaluatorWorker:
        worker = self.begin(**options)
        worker.run()
        assert ShownEnv.num_open == 0, "everything is closed"
        return worker

    def end(self) -> None:
        """Shut the worker down, as ``run`` does."""
        self.worker._shutdown()
        assert ShownEnv.num_open == 0, "everything is closed"

    def poll_until(self, condition: Callable[[], object]) -> None:
        """Poll as ``run`` does."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline
            self.worker._poll()

    def versions(self) -> list[str]:
        """Return the recorded versions."""
        return [str(version) for version, *_ in self.session.videos]

    def evaluated(self) -> list[str]:
        return [str(info.version) for info in self.db.versions(POLICY) if evaluation_of(info) is not None]

    def counts(self) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for family in self.context.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "rlsrl_videos_total"
        }


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def frames_of(mp4: bytes, folder: Path) -> np.ndarray[Any, Any]:
    (folder / "seen.mp4").write_bytes(mp4)
    reader = imageio_ffmpeg.read_frames(str(folder / "seen.mp4"))
    width, height = next(reader)["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


def test_a_version_that_was_played_is_recorded_and_sent(bench: Bench) -> None:
    bench.push(10)
    bench.finish(10)

    worker = bench.run(episodes=3)

    assert worker.done
    ((version, is_fixed, mp4, gif),) = bench.session.videos
    assert (version, is_fixed) == (Version(1, 10), False)
    shades = frames_of(mp4, bench.folder).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(shades, [20 + 30 * step for step in range(LENGTH + 1)] * 3, atol=4)
    assert gif.startswith(b"GIF89a")
    assert bench.counts() == {"sent": 1.0}
    played = [seed for renders, seed in ShownEnv.seeds if not renders]
    recorded = [seed for renders, seed in ShownEnv.seeds if renders]
    assert recorded[:2] == played, "its episodes begin as those of the evaluation's environments"
    assert len(set(recorded)) == 3
    assert not list((bench.folder / "ledger").glob("*.recording"))


def test_the_first_evaluation_is_recorded_and_then_one_of_so_many(bench: Bench) -> None:
    bench.begin(every_evaluations=3)
    for step in range(8):
        bench.push(step)
        bench.poll_until(lambda: len(bench.evaluated()) == step + 1)
    bench.poll_until(lambda: len(bench.versions()) == 3)
    bench.end()
    assert bench.versions() == ["1.0", "1.3", "1.6"]


def test_a_poll_records_one_frame_after_the_result_is_recorded(bench: Bench) -> None:
    bench.push(0)
    bench.begin()
    bench.poll_until(lambda: ShownEnv.num_rendered)
    assert bench.evaluated() == ["1.0"]
    assert [step for step, _ in bench.session.rows] == [0]
    for number in range(2, LENGTH + 2):
        bench.worker._poll()
        assert ShownEnv.num_rendered == number
    assert bench.versions() == []
    bench.poll_until(bench.versions)
    bench.end()
    assert ShownEnv.num_rendered == LENGTH + 1


@pytest.mark.parametrize("command", ["exit", "pause"])
def test_a_command_is_obeyed_within_a_frame(bench: Bench, command: str) -> None:
    def stop_at_the_third(taken: int) -> Any:
        if taken == 2:
            getattr(bench.worker, command)()
        return np.full((36, 48, 3), 20, np.uint8)

    ShownEnv.render_with = stop_at_the_third
    bench.push(0)
    bench.begin()
    if command == "pause":
        rested = []

        def on_rest(rests: bool) -> None:
            if rests:
                rested.append(ShownEnv.num_rendered)
                ShownEnv.render_with = None
                bench.finish(0)
                bench.worker.start()

        bench.worker.run(on_rest=on_rest)
        assert rested == [3]
        assert bench.versions() == ["1.0"], "it goes on with the next frame"
        assert ShownEnv.num_rendered == LENGTH + 1
    else:
        bench.worker.run()
        assert (ShownEnv.num_rendered, ShownEnv.num_open) == (3, 0)
        assert (bench.versions(), bench.counts()) == ([], {})
    assert not list((bench.folder / "ledger").glob("*.recording")), "an orderly end is no death"


def raise_at_the_third(taken: int) -> Any:
    if taken == 2:
        raise RuntimeError("no more light")
    return np.full((36, 48, 3), 20, np.uint8)


def change_size(taken: int) -> Any:
    return np.full((36 + 2 * taken, 48, 3), 20, np.uint8)


def leave(taken: int) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("render_with", "environment", "outcome", "says", "attempts"),
    [
        (raise_at_the_third, {}, "failed", "render() of the environment raised RuntimeError: no more light", 2),
        (leave, {}, "failed", "render() of the environment raised SystemExit: 3", 2),
        (change_size, {}, "no_pictures", "renders (38, 48, 3) after (36, 48, 3)", 1),
        (lambda taken: "a picture", {}, "no_pictures", "render() returned an array of", 1),
        (lambda taken: None, {}, "no_pictures", "render() returned an array of object ()", 1),
        (None, {"kwargs": {"hides": True}}, "no_pictures", "has render_mode None", 1),
    ],
    ids=["raises", "exits", "changes its size", "returns text", "returns None", "hides its mode"],
)
def test_an_environment_that_does_not_render_costs_only_the_videos(
    bench: Bench, render_with: Any, environment: dict[str, Any], outcome: str, says: str, attempts: int
) -> None:
    ShownEnv.render_with = None if render_with is None else staticmethod(render_with)
    bench.begin(environment=environment)
    with capture_logs() as logs:
        for step in range(2):
            bench.push(step)
            bench.poll_until(lambda: len(bench.evaluated()) == step + 1)
        bench.finish(1)
        bench.poll_until(lambda: bench.worker.done)
        bench.end()
    assert bench.evaluated() == ["1.0", "1.1"]
    assert [step for step, _ in bench.session.rows] == [0, 1]
    assert (bench.versions(), bench.counts()) == ([], {outcome: attempts})
    found = [log for log in logs if log["event"] == "not_recorded"]
    assert len(found) == attempts
    assert says in found[0]["error"]
    assert (found[0]["outcome"], found[0]["records_more"]) == (outcome, outcome == "failed")


def test_a_missing_package_costs_only_the_videos(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "imageio_ffmpeg", None)
    bench.push(0)
    bench.finish(0)
    with capture_logs() as logs:
        assert bench.run().done
    assert bench.counts() == {"no_pictures": 1.0}
    (found,) = [log for log in logs if log["event"] == "not_recorded"]
    assert "pip install 'rlsrl[video]'" in found["error"]


def test_a_video_that_is_too_large_is_not_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_MP4_BYTES", 20_000)
    rng = np.random.default_rng(1)
    ShownEnv.render_with = staticmethod(lambda taken: rng.integers(256, size=(36, 48, 3), dtype=np.uint8))
    ShownEnv.never_ends = True
    bench.push(0)
    bench.finish(0)
    with capture_logs() as logs:
        assert bench.run(max_steps=100_000).done
    assert (bench.versions(), bench.counts()) == ([], {"too_large": 1.0})
    (found,) = [log for log in logs if log["event"] == "not_recorded"]
    assert "more than 20,000 bytes after" in found["error"]
    assert "lower evaluators.video.maxSteps or episodes" in found["error"]
    assert ShownEnv.num_rendered < 2000, "it ends where the limit is reached"


def test_a_gif_that_is_too_large_is_left_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_GIF_BYTES", 100)
    bench.push(0)
    bench.finish(0)
    bench.run()
    ((_, _, mp4, gif),) = bench.session.videos
    assert len(frames_of(mp4, bench.folder)) == LENGTH + 1
    assert gif == b""


def test_an_episode_that_does_not_end_is_cut_and_recorded(bench: Bench) -> None:
    ShownEnv.never_ends = True
    bench.push(0)
    bench.finish(0)
    bench.run(max_steps=7)
    ((_, _, mp4, _),) = bench.session.videos
    assert len(frames_of(mp4, bench.folder)) == 8
    assert "unfinished" in (evaluation_of(bench.db.versions(POLICY)[0]) or {})


def test_nothing_is_recorded_while_videos_wait_for_the_coordinator(bench: Bench) -> None:
    bench.session.has_room_for_video = False
    bench.push(0)
    bench.finish(0)
    assert bench.run().done
    assert (ShownEnv.num_rendered, bench.counts()) == (0, {"unsent": 1.0})


def test_an_evaluator_whose_process_ended_in_two_recordings_records_no_more(bench: Bench) -> None:
    """The third life plays its versions; the next one tries again."""

    def lives(expected: list[bool]) -> None:
        for life, records in enumerate(expected):
            bench.push(life)
            bench.begin()
            bench.poll_until(lambda life=life: len(bench.evaluated()) == life + 1)
            videos = bench.worker._parts.videos  # type: ignore[union-attr]
            assert videos is not None
            assert videos.is_recording == records
            if records:  # As a SIGKILL leaves it.
                assert videos._recording is not None
                videos._recording.close()

    lives([True, True, False, True])
    assert bench.counts() == {"died": 1.0}


def test_a_video_between_two_deaths_forgives_the_first(bench: Bench) -> None:
    bench.push(0)
    bench.begin()
    bench.poll_until(lambda: ShownEnv.num_rendered)
    bench.worker._parts.videos._recording.close()  # type: ignore[union-attr]
    bench.push(1)
    bench.begin()
    bench.poll_until(bench.versions)
    bench.push(2)
    bench.poll_until(lambda: ShownEnv.num_rendered > LENGTH + 2)
    bench.worker._parts.videos._recording.close()  # type: ignore[union-attr]
    bench.push(3)
    bench.begin()
    bench.poll_until(lambda: "1.3" in bench.versions())
    bench.end()
    assert bench.counts() == {"sent": 2.0}


def test_the_calls_of_a_recording_are_on_the_call_watchs_board(bench: Bench) -> None:
    import dataclasses
    import mmap

    board = CallBoard(mmap.mmap(-1, BOARD_BYTES))
    bench.context = dataclasses.replace(bench.context, call_board=board)
    seen: list[tuple[str, int]] = []

    def look(taken: int) -> Any:
        seen.extend((call.name, call.first_rank) for call in board.calls())
        return np.full((36, 48, 3), 20, np.uint8)

    ShownEnv.render_with = staticmethod(look)
    bench.push(0)
    bench.finish(0)
    bench.run()
    assert seen == [("render", 0)] * (LENGTH + 1)
    assert list(board.calls()) == []
    assert not any(board._entry(number)[5] for number in range(board._words[0])), "the entry is given back"
