"""The process that shows a run's learning curve on Weights & Biases: ``python -m rlsrl.workers.wandb_process OPTIONS``.

wandb runs in its own process because it could stop or delay the coordinator. Its import holds the interpreter for a
second, it starts a server and exit handlers, and its calls depend on a remote service. Here wandb may fail: the
coordinator starts the process again (``rlsrl.workers.wandb_mirror``).

The process copies the rows of ``metrics.jsonl`` that wandb's own files lack. A line on standard input signals new rows.
If it is not empty, it is a row of the workers' metrics, or names a video. The end of the input asks the process to
finish.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

from rlsrl.runtime.extras import pip_install
from rlsrl.runtime.process import PARENT_VARIABLE, die_with_parent
from rlsrl.workers.learning_curve import METRICS_FILE, CurveRow
from rlsrl.workers.video_rows import VideoRow
from rlsrl.workers.worker_metrics import WorkerMetricsRow

NOT_INSTALLED = 2
"""Exit code of a failure that a restart does not cure."""
STEP = "train_step"
"""wandb's x axis: the row's own step. wandb's built-in step cannot decrease, but a resumed run repeats steps."""
ATTEMPT = "attempt"
"""The key of the trainers' attempt. Every row of the learning curve has it, and no metrics of workers and no video."""

_READ_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the process."""

    project: str
    entity: str | None
    mode: Literal["offline", "online"]
    experiment: str
    """The run's name at wandb."""
    run_uid: str
    """The run's identity at wandb, which a resumed run keeps."""
    folder: str
    """The run's folder; wandb's own files are in ``wandb/`` there."""

    def to_json(self) -> str:
        """Return a JSON object that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read an object of ``to_json``."""
        return cls(**json.loads(text))


class Follower:
    """Reads a learning curve that grows."""

    def __init__(self, path: Path) -> None:
        """Begin at the first row. The file may not exist yet."""
        self._path = path
        self._offset = 0

    def new_rows(self) -> Iterator[CurveRow]:
        """Yield the rows of the lines that were completed since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                # Skip invalid rows: `LearningCurve` has logged them.
                with contextlib.suppress(TypeError, ValueError, KeyError):
                    yield CurveRow.from_line(line)


def num_rows_written(folder: Path, run_uid: str) -> int:
    """Return the number of rows that earlier processes of the run wrote to wandb's files.

    wandb writes in blocks and loses the last block if it is killed, so only its files show which rows it has.
    """
    files = sorted(folder.glob(f"wandb/*run-*-{run_uid}/run-{run_uid}.wandb"))
    if not files:
        return 0
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # made by protoc

    records = (Record.FromString(data) for path in files for data in _records(path))
    return sum(any(ATTEMPT in (item.key, *item.nested_key) for item in record.history.item) for record in records)


def _records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of one of wandb's files. A kill may have cut the last one short."""
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    # wandb raises AssertionError at an incomplete record.
    with contextlib.suppress(AssertionError):
        store.open_for_scan(str(path))  # type: ignore[no-untyped-call]
        while (data := store.scan_data()) is not None:  # type: ignore[no-untyped-call]
            yield data


def begin_run(wandb: Any, options: Options) -> Any:
    """Return the wandb run, new or resumed. wandb gets no data about the machine, its processes or the code."""
    settings = wandb.Settings(
        console="off",
        silent=True,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    run = wandb.init(
        project=options.project,
        entity=options.entity,
        mode=options.mode,
        name=options.experiment,
        id=options.run_uid,
        resume="allow" if options.mode == "online" else None,
        dir=options.folder,
        settings=settings,
    )
    run.define_metric(STEP)
    run.define_metric("*", step_metric=STEP)
    return run


def write_rows(run: Any, rows: Iterable[CurveRow]) -> None:
    """Log the rows to the run."""
    for row in rows:
        run.log({STEP: row.step, ATTEMPT: row.attempt, **row.scalars})


def write_line(wandb: Any, run: Any, folder: Path, line: bytes) -> None:
    """Log the workers' metrics or the video of a line of standard input. A file that is gone is left out."""
    if (video := VideoRow.from_line(line)) is None:
        row = WorkerMetricsRow.from_line(line)
        run.log({STEP: row.step, **row.scalars})
    elif (path := folder / video.file).exists():
        run.log({STEP: video.step, video.tag: wandb.Video(str(path), format="mp4")})


def main(arguments: list[str]) -> int:
    """Mirror rows until standard input ends."""
    if parent := os.environ.get(PARENT_VARIABLE):
        die_with_parent(int(parent))
    options = Options.from_json(arguments[0])
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # Do not send wandb's internal errors to its vendor.
    try:
        import wandb
    except ImportError as error:
        sys.stderr.write(f"rlsrl: tracking.wandb needs the package 'wandb': {pip_install('wandb')} ({error})\n")
        return NOT_INSTALLED
    folder = Path(options.folder)
    curve = Follower(folder / METRICS_FILE)
    for _ in islice(curve.new_rows(), num_rows_written(folder, options.run_uid)):
        pass
    run = begin_run(wandb, options)
    write_rows(run, curve.new_rows())
    incomplete = b""
    while data := os.read(sys.stdin.fileno(), _READ_BYTES):
        write_rows(run, curve.new_rows())
        *lines, incomplete = (incomplete + data).split(b"\n")
        for line in filter(None, lines):
            write_line(wandb, run, folder, line)
    write_rows(run, curve.new_rows())
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
