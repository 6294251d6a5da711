"""The process that shows a run's learning curve on Weights & Biases: ``python -m rlsrl.workers.wandb_process OPTIONS``.

A process of its own, since wandb is not to be trusted with the coordinator: its import holds the interpreter for a
second, it starts a server and handlers that run at exit, and what it raises or waits for depends on a service far away.
Here it may fail; the coordinator starts it again (``rlsrl.workers.wandb_mirror``).

``metrics.jsonl`` is read from where the former life left off. A byte on standard input says that there may be more, its
end that there will be none. Rows are written at least once: what was handed to wandb right before a kill may be there
twice.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from rlsrl.runtime.process import PARENT_VARIABLE, die_with_parent
from rlsrl.workers.learning_curve import METRICS_FILE, Row

NOT_INSTALLED = 2
"""Exit code where starting again does not help."""
STEP = "train_step"
"""What wandb draws everything over: a row's own step, since a run that resumes goes back, which wandb's cannot."""
MARK_FILE = "rlsrl.json"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the process is told."""

    project: str
    entity: str | None
    mode: Literal["offline", "online"]
    experiment: str
    """The run's name at wandb."""
    run_uid: str
    """The run's identity at wandb: a run that resumes goes on under it."""
    folder: str
    """The run's folder; wandb's own files are in ``wandb/`` there."""

    def to_json(self) -> str:
        """A JSON object that ``from_json`` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote."""
        return cls(**json.loads(text))


class Mark:
    """How many bytes of the learning curve are at wandb; kept in a file beside wandb's."""

    def __init__(self, path: Path, run_uid: str) -> None:
        """Read what a former life of that run left."""
        self._path = path
        self._run_uid = run_uid
        self.offset = self._read()

    def _read(self) -> int:
        try:
            value = json.loads(self._path.read_bytes())
            return int(value["offset"]) if value["run_uid"] == self._run_uid else 0
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def move(self, offset: int) -> None:
        """Keep it over a kill of the process."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"run_uid": self._run_uid, "offset": offset}))
        new.replace(self._path)
        self.offset = offset


def read_rows(path: Path, offset: int) -> Iterator[tuple[Row | None, int]]:
    """The whole lines from ``offset`` on, with the offset behind each; None for one that is no row."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                yield Row.from_line(line), offset
            except (TypeError, ValueError, KeyError):
                yield None, offset


def begin_run(wandb: Any, options: Options) -> Any:
    """The wandb run, new or gone on with; nothing of the machine, its processes or the code is sent along."""
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


def write_rows(run: Any, path: Path, mark: Mark) -> None:
    """Hand over what is new."""
    offset = mark.offset
    for row, offset in read_rows(path, mark.offset):  # noqa: B007 - the last one is the new mark
        if row is not None:
            run.log({STEP: row.step, "attempt": row.attempt, **row.scalars})
    if offset != mark.offset:
        mark.move(offset)


def main(arguments: list[str]) -> int:
    """Mirror rows until standard input ends."""
    if parent := os.environ.get(PARENT_VARIABLE):
        die_with_parent(int(parent))
    options = Options.from_json(arguments[0])
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its own errors are not for its makers
    try:
        import wandb
    except ImportError as error:
        sys.stderr.write(f"rlsrl: tracking.wandb needs the package 'wandb': pip install wandb ({error})\n")
        return NOT_INSTALLED
    folder = Path(options.folder)
    (folder / "wandb").mkdir(exist_ok=True)
    mark, rows = Mark(folder / "wandb" / MARK_FILE, options.run_uid), folder / METRICS_FILE
    run = begin_run(wandb, options)
    write_rows(run, rows, mark)
    while os.read(sys.stdin.fileno(), 4096):
        write_rows(run, rows, mark)
    write_rows(run, rows, mark)
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
