"""Edits of a run's experiment: by another file when the run resumes, and by ``rlsrl edit`` at any time.

`rlsrl edit` writes the whole edited experiment into the run folder. The controller of a running run applies it, and the
next `rlsrl run` applies it otherwise. Both remove the file last, so an edit survives the death of each process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from rlsrl.api.edits import FieldEdit, edits, merged
from rlsrl.api.load import SpecError, dump, load_text
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.api.spec import RLExperiment
from rlsrl.local.controller import RunPlan
from rlsrl.local.plans import check_and_write, resolve_locally, role_plans, run_plan
from rlsrl.local.replay_room import require_room_after_edit
from rlsrl.local.run_folder import RESOLVED_EXPERIMENT, RunFolder, RunFolderError
from rlsrl.local.run_record import RunRecord
from rlsrl.parameters.terminal import withdraw_end
from rlsrl.runtime.durable import write_durably
from rlsrl.runtime.errors import ConfigurationError

EDIT = "experiment.edit.yaml"
"""The edited experiment, until a controller or `rlsrl run` has applied it."""
GIVEN = "experiment.given.yaml"
"""The experiment as the last `rlsrl run` gave it, if edits have changed it since."""

LOCK_SECONDS = 10.0
"""How long a command waits for another process that edits the same run."""
_LOCK_POLL_SECONDS = 0.05
_FRESH = "To start a new run, use --fresh, which moves the old run aside, or --run-dir with another folder."
_ADVICE = f"To resume the run, give these fields their former values: the others may change. {_FRESH}"


@dataclass(frozen=True, kw_only=True)
class ClaimedRun:
    """A run folder's experiment, to be run now."""

    experiment: RLExperiment
    changes: tuple[FieldEdit, ...] = ()
    """What differs from the experiment until now."""
    ignored: tuple[FieldEdit, ...] = ()
    """Changes without effect: the run has ended."""
    is_reopened: bool = False
    """Whether the run had ended, and continues because of the changes."""


def claim(folder: RunFolder, asked: RLExperiment, *, as_given: bytes) -> ClaimedRun:
    """Write the experiment into an empty folder, or the changes of ``asked`` into a run of the same experiment.

    Changes since the last `rlsrl run` count, so what `rlsrl edit` has changed stays. A run that has ended stays as it
    is, unless its failure may be mended by the changes, or its end is not reached any more. A further limit in ``stop``
    also continues a run that `rlsrl control` has stopped.

    Raises:
        RunFolderError: the folder holds a run of another experiment; the text lists every field that differs.
        SpecError: the changes do not fit the edits since the last `rlsrl run`.
        ConfigurationError: there is no room for the changed replay stores.
    """
    if not folder.holds_run:
        folder.create(as_given=as_given, resolved=dump(asked).encode(), package_version=installed_version("rlsrl"))
        return ClaimedRun(experiment=asked)
    with _locked(folder.path):
        recorded = recorded_experiment(folder.path)
        given = _read(folder.path, GIVEN) or recorded
        target = merged(_read(folder.path, EDIT) or recorded, given, asked)
        terminal = folder.terminal()
        if terminal is not None and asked.spec.stop != given.spec.stop and not asked.spec.stop.now:
            target = _without_stop_now(target)
        found = changes(recorded, asked if _is_renamed(recorded, asked) else target)
        if refused := _refused(found):
            listed = "\n".join(f"  {describe(change)}" for change in refused)
            raise RunFolderError(f"{folder.path} holds a run of another experiment:\n{listed}\n{_ADVICE}")
        is_reopened = terminal is not None and (bool(found) if "failure" in terminal else not _ends(target, terminal))
        if terminal is not None and not is_reopened:
            return ClaimedRun(experiment=recorded, ignored=tuple(found))
        _require_room(recorded, target, folder.path, folder.record)
        if is_reopened:
            withdraw_end(folder.database, POLICY_NAME)
        if target == asked:
            (folder.path / GIVEN).unlink(missing_ok=True)
        else:
            write_durably(folder.path / GIVEN, dump(asked).encode())
        if found or is_reopened:
            folder.write_experiment(as_given=as_given, resolved=dump(target).encode())
        (folder.path / EDIT).unlink(missing_ok=True)
    return ClaimedRun(experiment=target, changes=tuple(found), is_reopened=is_reopened)


def recorded_experiment(path: Path) -> RLExperiment:
    """Return the experiment of the run in a folder, with every default written out.

    Raises:
        RunFolderError: it cannot be read.
    """
    experiment = _read(path, RESOLVED_EXPERIMENT)
    if experiment is None:
        raise RunFolderError(f"{path} holds a run without {RESOLVED_EXPERIMENT}\n{_FRESH}")
    return experiment


def changes(recorded: RLExperiment, asked: RLExperiment) -> list[FieldEdit]:
    """Return the differences: of the name, which makes it another run, and of the spec's fields.

    A default equals its written value.
    """
    before, after = recorded.metadata.name, asked.metadata.name
    renamed = FieldEdit(path="metadata.name", effect="refuse", before=before, after=after)
    return [*([renamed] if before != after else []), *edits(recorded, asked)]


def describe(change: FieldEdit) -> str:
    """Return the field with both values."""
    return f"{change.path}: {_show(change.before)} -> {_show(change.after)}"


@dataclass(frozen=True, kw_only=True)
class AskedEdit:
    """An edit that `rlsrl edit` has written."""

    changes: tuple[FieldEdit, ...]
    restarted: tuple[str, ...]
    """The roles whose processes are replaced."""
    warnings: tuple[str, ...]
    """What may go wrong."""


def ask(path: Path, record: RunRecord, overrides_of: Callable[[RLExperiment], Sequence[str]]) -> AskedEdit:
    """Write an edit of the run in the folder ``path``: earlier edits that are not applied yet, and new ones.

    Args:
        path: the run folder, absolute.
        record: the run's record.
        overrides_of: returns ``field=value`` for the experiment with the earlier edits, see
            ``rlsrl.api.load.apply_overrides``.

    Raises:
        SpecError: the edited experiment is invalid; lists every problem.
        RunFolderError: a field cannot be edited.
        ConfigurationError: there is no room for the edited replay stores.
    """
    with _locked(path):
        recorded = recorded_experiment(path)
        base = _read(path, EDIT) or recorded
        edited = load_text(dump(base), source=str(path / RESOLVED_EXPERIMENT), overrides=overrides_of(base))
        found = changes(recorded, edited)
        _require_editable(found)
        warnings = _require_room(recorded, edited, path, record)
        before, after = (resolve_locally(each, path, record) for each in (recorded, edited))
        if found:
            if not (path / GIVEN).exists():
                write_durably(path / GIVEN, dump(recorded).encode())
            write_durably(path / EDIT, dump(edited).encode())
        else:
            (path / EDIT).unlink(missing_ok=True)
    plans = {each.role: each for each in role_plans(path, before)}
    restarted = [
        each.role for each in role_plans(path, after) if each.role in plans and each.replaces(plans[each.role])
    ]
    return AskedEdit(changes=tuple(found), restarted=tuple(restarted), warnings=tuple(warnings))


def is_pending(path: Path) -> bool:
    """Return whether the folder has an edit that is not applied yet."""
    return (path / EDIT).exists()


class RunEdits:
    """Applies the edits of a running run, for its controller."""

    def __init__(
        self,
        folder: RunFolder,
        experiment: RLExperiment,
        *,
        note: Callable[[str], None],
        on_applied: Callable[[RLExperiment], None],
    ) -> None:
        """``note`` shows a message, and ``on_applied`` gets each edited experiment."""
        self._folder = folder
        self._experiment = experiment
        self._note = note
        self._on_applied = on_applied
        self._problem = ""

    def take(self) -> RunPlan | None:
        """Apply an edit, if there is one: write the workers' configs and settings. Return what runs from now on.

        An edit that cannot be applied is shown and dropped. One that cannot be written yet is tried again.
        """
        path = self._folder.path
        if not is_pending(path):
            return None
        try:
            with _locked(path, seconds=0.0):  # This thread starts and ends processes, too.
                try:
                    return self._apply(path)
                except (RunFolderError, ConfigurationError) as error:
                    (path / EDIT).unlink()
                    self._note(f"the edit has no effect: {error}")
        except OSError as error:
            if (problem := f"the edit waits: {error}") != self._problem:
                self._note(problem)
            self._problem = problem
        return None

    def _apply(self, path: Path) -> RunPlan | None:
        edited = _read(path, EDIT)
        if edited is None:  # withdrawn at this moment
            return None
        found = changes(self._experiment, edited)
        _require_editable(found)
        resolved = resolve_locally(edited, path, self._folder.record)
        check_and_write(self._folder, resolved)
        write_durably(path / RESOLVED_EXPERIMENT, dump(edited).encode())
        (path / EDIT).unlink()
        self._experiment, self._problem = edited, ""
        self._on_applied(edited)
        for change in found:
            self._note(f"edited: {describe(change)}")
        return run_plan(path, edited, resolved)


def _require_room(before: RLExperiment, after: RLExperiment, path: Path, record: RunRecord) -> list[str]:
    """Check that the edited stores fit, with the user's modules from where the last life had them; return warnings."""
    return require_room_after_edit(before.spec, after.spec, path, modules=Path(record.modules).absolute())


def _require_editable(found: Sequence[FieldEdit]) -> None:
    if refused := _refused(found):
        listed = ", ".join(map(describe, refused))
        raise RunFolderError(f"cannot be edited: {listed}. A new run can have other values: `rlsrl run --fresh`")


def _refused(found: Sequence[FieldEdit]) -> list[FieldEdit]:
    return [change for change in found if change.effect == "refuse"]


def _is_renamed(recorded: RLExperiment, asked: RLExperiment) -> bool:
    return recorded.metadata.name != asked.metadata.name


def _without_stop_now(experiment: RLExperiment) -> RLExperiment:
    stop = experiment.spec.stop.model_copy(update={"now": False})
    return experiment.model_copy(update={"spec": experiment.spec.model_copy(update={"stop": stop})})


def _ends(experiment: RLExperiment, terminal: Mapping[str, Any]) -> bool:
    """Return whether the experiment still ends with the result that the run has."""
    stop, result = experiment.spec.stop, terminal["result"]
    if stop.now:
        return True
    limits = {
        "return_mean": stop.return_mean,
        "env_steps": stop.env_steps,
        "train_steps": stop.train_steps,
        "train_seconds": stop.wall_seconds,
    }
    return any(
        limit is not None and (reached := result.get(name)) is not None and reached >= limit
        for name, limit in limits.items()
    )


def _read(path: Path, name: str) -> RLExperiment | None:
    """Return the experiment in a file of the run folder; None without the file.

    Raises:
        RunFolderError: the file cannot be read.
    """
    try:
        return load_text((path / name).read_bytes(), source=name)
    except FileNotFoundError:
        return None
    except (OSError, SpecError) as error:
        advice = _FRESH if name == RESOLVED_EXPERIMENT else f"To continue without the edit, remove {path / name}."
        raise RunFolderError(
            f"{path} holds a run whose {name} cannot be read by this version: {error}\n{advice}"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, *, seconds: float = LOCK_SECONDS) -> Iterator[None]:
    """Lock the folder for an edit: edits of several processes follow each other.

    Raises:
        TimeoutError: another process has held the lock for ``seconds``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + seconds
    try:
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"another process is editing {path}; `fuser {path}` finds it")
            time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _show(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)
