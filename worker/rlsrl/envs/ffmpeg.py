"""Makes mp4 and GIF files of frames, by the ffmpeg of the package imageio-ffmpeg.

Each file is made by a process. It ends with its input: with the frames that this process sends, or the mp4 file. So it
also ends if this process is killed. It uses one core.
"""

from __future__ import annotations

import errno
import math
import os
import select
import subprocess
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from rlsrl.envs.rendering import Frame, NoVideo
from rlsrl.runtime.extras import pip_install

WRITE_SECONDS = 30.0
"""How long ffmpeg may take no frame."""
GIF_FRAMES = 100
"""Most frames of a GIF. Of longer videos it has every second frame, every third, and so on."""
GIF_SIDE = 240
"""Longest side of a GIF, in pixels."""
_GIF_FPS = 50
"""Most frames a second that viewers of GIFs show."""
_ERROR_CHARACTERS = 500


def ffmpeg_path() -> str:
    """Return the path of ffmpeg.

    Raises:
        NoVideo: the package is missing; the text says how to install it.
    """
    try:
        import imageio_ffmpeg  # type: ignore[import-untyped]

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise NoVideo(f"videos need one more package: {pip_install('video')} ({error})") from error


class MemoryFile:
    """A file in memory that other processes write and read by its path. Linux."""

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(name)
        """A process needs it to use ``path``: see ``FfmpegProcess``."""

    @property
    def path(self) -> str:
        """The file's path in a process that has inherited the descriptor."""
        return f"/proc/self/fd/{self.descriptor}"

    @property
    def num_bytes(self) -> int:
        """The size of the file now."""
        return os.fstat(self.descriptor).st_size

    def read(self) -> bytes:
        """Return the whole content."""
        return os.pread(self.descriptor, self.num_bytes, 0)

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class FfmpegProcess:
    """One process of ffmpeg. One thread uses it; ``close`` ends the process."""

    def __init__(self, arguments: Sequence[str], *, memory: Sequence[MemoryFile] = ()) -> None:
        """Start ffmpeg with these arguments. Its standard input takes ``write``. ``memory``: the files that it uses.

        Raises:
            NoVideo: the package is missing.
            OSError: the process cannot be started.
        """
        self._process = subprocess.Popen(
            [ffmpeg_path(), "-y", "-loglevel", "error", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[file.descriptor for file in memory],
            process_group=0,  # Ctrl-C is for this process, which ends the other one.
        )
        assert self._process.stdin is not None, "it is a pipe"
        self._input = self._process.stdin
        os.set_blocking(self._input.fileno(), False)

    def write(self, data: memoryview) -> None:
        """Write bytes to the standard input. Waits up to ``WRITE_SECONDS`` each time that ffmpeg takes none.

        Raises:
            OSError: ffmpeg has ended, or takes nothing; the text says why.
        """
        ready = select.poll()
        ready.register(self._input, select.POLLOUT)
        while data:
            if not ready.poll(WRITE_SECONDS * 1000):
                raise TimeoutError(errno.ETIMEDOUT, f"ffmpeg has taken no data for {WRITE_SECONDS:g} s")
            try:
                data = data[os.write(self._input.fileno(), data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise self._failure() from error

    def is_done(self, timeout: float) -> bool:
        """End the input, and wait up to ``timeout`` seconds for the process; return whether it has ended.

        Raises:
            OSError: ffmpeg has failed; the text says why.
        """
        self._input.close()
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        if code:
            raise self._failure()
        return True

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._input, self._process.stderr):
            assert pipe is not None, "both are pipes"
            pipe.close()

    def _failure(self) -> OSError:
        self._process.kill()  # Otherwise it could still write to standard error.
        code = self._process.wait()
        assert self._process.stderr is not None, "it is a pipe"
        said = self._process.stderr.read().decode(errors="replace").strip()[-_ERROR_CHARACTERS:]
        return OSError(errno.EIO, f"ffmpeg ended with {code}: {said or 'it gave no reason'}")


class Mp4Writer:
    """Writes frames of one size to an mp4 file. One thread uses it; ``close`` ends its process."""

    def __init__(self, target: str | MemoryFile, *, fps: float) -> None:
        """Write to a file, or into memory, ``fps`` frames for each second. The first frame starts the process.

        Raises:
            NoVideo: the package is missing.
        """
        self._target = target
        self._fps = Fraction(fps).limit_denominator(1001)
        self._process: FfmpegProcess | None = None
        self.num_frames = 0
        """Frames written."""
        ffmpeg_path()

    def write(self, frame: Frame) -> None:
        """Write a frame. Waits while ffmpeg is busy.

        Raises:
            OSError: the file cannot be written, or ffmpeg failed; the text says why.
        """
        if self._process is None:
            self._process = self._begun(height=frame.shape[0], width=frame.shape[1])
        self._process.write(np.ascontiguousarray(frame).data.cast("B"))
        self.num_frames += 1

    def is_done(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the whole file; return whether it is there. No frame may follow.

        Raises:
            OSError: as ``write``.
        """
        assert self._process is not None, "a file needs a frame"
        return self._process.is_done(timeout)

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._process.close()

    def _begun(self, *, height: int, width: int) -> FfmpegProcess:
        memory = [self._target] if isinstance(self._target, MemoryFile) else []
        path = self._target.path if isinstance(self._target, MemoryFile) else f"file:{self._target}"
        # Players need 4:2:0, which needs even sides.
        even = [] if height % 2 == width % 2 == 0 else ["-vf", f"scale={width + width % 2}:{height + height % 2}"]
        return FfmpegProcess(
            [
                *("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(self._fps), "-i", "-"),
                *even,
                *("-an", "-c:v", "libx264", "-preset", "veryfast", "-crf", "25", "-threads", "1"),
                # Index first: players begin before they have the whole file.
                *("-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4", path),
            ],
            memory=memory,
        )


def begin_gif(mp4: MemoryFile, gif: MemoryFile, *, num_frames: int, fps: float) -> FfmpegProcess:
    """Return a process that makes an animated GIF of an mp4 file of ``num_frames`` frames, ``fps`` each second.

    Raises:
        NoVideo, OSError: as ``FfmpegProcess``.
    """
    every = math.ceil(num_frames / GIF_FRAMES)
    shown = Fraction(min(fps / every, _GIF_FPS)).limit_denominator(1001)
    filters = (
        f"select=not(mod(n\\,{every})),setpts=N/({shown})/TB,"
        f"scale=w=min({GIF_SIDE}\\,iw):h=min({GIF_SIDE}\\,ih):force_original_aspect_ratio=decrease:flags=area,"
        "split[whole][sample];[sample]palettegen[colors];[whole][colors]paletteuse=dither=none:diff_mode=rectangle"
    )
    return FfmpegProcess(
        ["-f", "mp4", "-i", mp4.path, "-vf", filters, "-r", str(shown), "-threads", "1", "-f", "gif", gif.path],
        memory=[mp4, gif],
    )
