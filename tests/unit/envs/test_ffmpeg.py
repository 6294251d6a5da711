"""mp4 and GIF files have the frames that were written, and ffmpeg's failures are errors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest

from rlsrl.envs import ffmpeg
from rlsrl.envs.ffmpeg import MemoryFile, Mp4Writer, begin_gif

DEADLINE = 60.0


def grey(shade: int, height: int, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full((height, width, 3), shade, np.uint8)


def read(path: Path) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Return what a file says of itself, and its frames, [n, height, width, 3]."""
    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    return about, np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


@pytest.fixture
def memory() -> Iterator[tuple[MemoryFile, MemoryFile]]:
    with closing(MemoryFile("mp4")) as mp4, closing(MemoryFile("gif")) as gif:
        yield mp4, gif


@pytest.mark.parametrize(("height", "width", "shown"), [(36, 48, (48, 36)), (37, 49, (50, 38))])
def test_a_file_in_memory_has_every_frame(
    memory: tuple[MemoryFile, MemoryFile], tmp_path: Path, height: int, width: int, shown: tuple[int, int]
) -> None:
    mp4, _ = memory
    with closing(Mp4Writer(mp4, fps=12.5)) as writer:
        for shade in range(20, 220, 20):
            writer.write(grey(shade, height, width))
        assert writer.is_done(DEADLINE)
        assert writer.num_frames == 10
    (tmp_path / "a.mp4").write_bytes(mp4.read())
    about, frames = read(tmp_path / "a.mp4")
    assert (about["fps"], about["size"]) == (12.5, shown)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), np.arange(20, 220, 20), atol=4)


@pytest.mark.parametrize(
    ("num_frames", "fps", "size", "shown", "size_shown", "fps_shown"),
    [
        (7, 4.0, (36, 48), 7, (48, 36), 4.0),
        (100, 30.0, (36, 48), 100, (48, 36), 30.0),
        (101, 30.0, (400, 600), 51, (240, 160), 15.0),
        (250, 60.0, (600, 300), 84, (120, 240), 20.0),
    ],
)
def test_a_gif_is_small_and_shows_the_whole_video(
    memory: tuple[MemoryFile, MemoryFile],
    tmp_path: Path,
    num_frames: int,
    fps: float,
    size: tuple[int, int],
    shown: int,
    size_shown: tuple[int, int],
    fps_shown: float,
) -> None:
    mp4, gif = memory
    with closing(Mp4Writer(mp4, fps=fps)) as writer:
        for number in range(num_frames):
            writer.write(grey(10 + 230 * number // num_frames, *size))
        assert writer.is_done(DEADLINE)
    with closing(begin_gif(mp4, gif, num_frames=num_frames, fps=fps)) as making:
        assert making.is_done(DEADLINE)
    (tmp_path / "a.gif").write_bytes(gif.read())
    about, frames = read(tmp_path / "a.gif")
    assert (len(frames), about["size"]) == (shown, size_shown)
    # A GIF counts in hundredths of a second.
    assert about["fps"] == pytest.approx(fps_shown, rel=0.15)
    shades = frames.mean(axis=(1, 2, 3))
    assert (np.diff(shades) >= 0).all()
    assert shades[0] < 20
    assert shades[-1] > 200


def test_a_file_that_cannot_be_written_is_an_error_with_ffmpegs_reason(tmp_path: Path) -> None:
    with closing(Mp4Writer(str(tmp_path / "no" / "where.mp4"), fps=30.0)) as writer:

        def write_and_end() -> None:
            writer.write(grey(20, 400, 600))
            writer.is_done(DEADLINE)

        with pytest.raises(OSError, match=r"ffmpeg ended with \d+: .*No such file or directory"):
            write_and_end()


def test_an_ffmpeg_that_was_killed_is_an_error(memory: tuple[MemoryFile, MemoryFile]) -> None:
    with closing(Mp4Writer(memory[0], fps=30.0)) as writer:
        writer.write(grey(20, 36, 48))
        assert writer._process is not None
        process = writer._process._process
        process.kill()
        process.wait()
        with pytest.raises(OSError, match="ffmpeg ended with -9: it gave no reason"):
            writer.write(grey(20, 36, 48))


def test_an_ffmpeg_that_takes_nothing_is_an_error_after_a_while(
    memory: tuple[MemoryFile, MemoryFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ffmpeg, "WRITE_SECONDS", 0.01)
    with closing(Mp4Writer(memory[0], fps=30.0)) as writer:
        writer.write(grey(20, 4, 4))
        assert writer._process is not None
        os.kill(writer._process._process.pid, signal.SIGSTOP)

        def fill() -> None:
            for _ in range(100):
                writer.write(grey(20, 4, 40_000))

        with pytest.raises(TimeoutError, match="has taken no data"):
            fill()


def test_closing_ends_the_process(memory: tuple[MemoryFile, MemoryFile]) -> None:
    writer = Mp4Writer(memory[0], fps=30.0)
    writer.write(grey(20, 36, 48))
    assert writer._process is not None
    writer.close()
    writer.close()
    assert writer._process._process.returncode == -9
