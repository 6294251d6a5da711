"""Each file of a run folder, damaged in each way: the run resumes and says what it lost, or stops and says what to do.

The table calls the checks of ``rlsrl run`` on copies of one real run. One row of each kind runs the command itself.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsrl.api.load import load_file
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.local.edits import claim
from rlsrl.local.folder_check import NothingToResume, check_documents_and_pages, check_versions
from rlsrl.local.run_folder import RunFolder, RunFolderError
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.ledger import LedgerError, settle_ledger
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, LiveRun

Damage = Callable[[Path], None]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flipped(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 0xFF for byte in path.read_bytes()))


def deleted(path: Path) -> None:
    path.unlink()


DAMAGES: tuple[Damage, ...] = (truncated, emptied, zeroed, flipped, deleted)
NOTHING = ""
"""The file is not needed, or is written again as it was."""
FRESH = "error: --fresh"
REMOVE = "error: remove it"
LOST = "lost: training steps lost: "
NEWEST = "<newest>"

OUTCOMES: dict[str, str | dict[str, str]] = {
    "controller.json": FRESH,
    "experiment.resolved.yaml": FRESH,
    "resolved.json": {"deleted": NOTHING, "*": REMOVE},
    "roster.json": FRESH,
    "ledger.json": {"deleted": NOTHING, "*": REMOVE},
    "coordinators.json": {"deleted": NOTHING, "*": REMOVE},
    "ledger/actor-0.page": {"truncated": REMOVE, "flipped": REMOVE, "*": "lost: is missing or empty"},
    "ledger/trainer-0.page": {"truncated": REMOVE, "flipped": REMOVE, "*": "lost: is missing or empty"},
    "parameters/default/versions/<newest>": LOST,
    "parameters/default/states/<newest>": LOST,
    "metrics.jsonl": {"*": "lost: the learning curve begins after step"},
    # The versions' names have the attempts, too.
    "parameters/default/fence.json": NOTHING,
    "parameters/default/writer.lock": NOTHING,
    "lock": NOTHING,
    # `rlsrl run` writes these anew and reads none of them.
    "config/actor.json": NOTHING,
    "config/coordinator.json": NOTHING,
    "config/trainer.json": NOTHING,
    "settings.json": NOTHING,
    "status.json": NOTHING,
    "summary.json": NOTHING,
    "curve.png": NOTHING,
    # For people only: the experiment as it was given.
    "experiment.yaml": NOTHING,
}
"""The outcome of each file, for all damages or by damage: ``error:`` or ``lost:`` and a part of the text."""
OTHER_COPIES = ("ledger/actor-1.page", "parameters/default/versions/", "parameters/default/states/")
"""Files with the same content as a file of the table, of another worker or an older version."""
NOT_READ = ("logs/", "tensorboard/")
"""Folders that rlsrl only writes to."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Return a run that was interrupted after some versions. Its gate is open: if it resumes, it soon finishes."""
    folder = tmp_path_factory.mktemp("damaged")
    gate = folder / "gate"
    desk = Desk(folder, GATED_EXPERIMENT.format(gate=gate))
    with desk.begin() as run:
        run.until(run.is_complete, "all processes at work")
        run.until(lambda: len(run.facts.versions()) > 3, "some versions")
        run.until(lambda: (desk.run_folder / "metrics.jsonl").stat().st_size, "rows of the learning curve")
        run.send(signal.SIGINT)
        assert run.wait() == 130, run.output
    gate.touch()
    return desk


@pytest.fixture
def copied(desk: Desk, tmp_path: Path) -> Desk:
    """Return a copy of the run."""
    copy = Desk(tmp_path, (desk.folder / "live.yaml").read_text())
    shutil.copytree(desk.run_folder, copy.run_folder)
    return copy


def file_of(run: Path, name: str) -> Path:
    path = run / name
    return path if path.name != NEWEST else max(path.parent.glob("*.safetensors"))


def expected(name: str, damage: Damage) -> str:
    outcome = OUTCOMES[name]
    return outcome if isinstance(outcome, str) else outcome.get(damage.__name__, outcome.get("*", NOTHING))


def resume(desk: Desk) -> str:
    """Return what `rlsrl run` says of the folder before it starts a process: an error, the losses, or nothing."""
    experiment = load_file(desk.folder / "live.yaml", ())
    try:
        with RunFolder.open(desk.run_folder) as folder:
            claim(folder, experiment, as_given=b"")
            assert not folder.is_finished()
            _, lost = check_versions(folder)
            placement = local_placement(run_uid=folder.record.run_uid, run_folder=folder.path)
            lost += check_documents_and_pages(folder, resolve(experiment, placement).coordinator)
            settle_ledger(folder.ledger)
    except (RunFolderError, ConfigurationError, LedgerError, NothingToResume) as error:
        return f"error: {error}"
    return "".join(f"lost: {text}\n" for text in lost)


def test_the_table_has_every_file_of_a_run(desk: Desk) -> None:
    run = desk.run_folder
    tabled = {file_of(run, name) for name in OUTCOMES}
    files = {path for path in run.rglob("*") if path.is_file()}
    untabled = {str(path.relative_to(run)) for path in files - tabled}
    assert {name for name in untabled if not name.startswith((*OTHER_COPIES, *NOT_READ))} == set()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", OUTCOMES)
def test_a_damaged_file_is_named_or_not_needed(copied: Desk, name: str, damage: Damage) -> None:
    path = file_of(copied.run_folder, name)
    damage(path)
    said = resume(copied)
    outcome = expected(name, damage)
    kind, _, text = outcome.partition(": ")
    assert said.startswith(kind), said
    assert text in said
    assert path.name.removesuffix(".safetensors") in said or outcome == NOTHING
    assert said or outcome == NOTHING
    assert outcome or not said
    assert "\\x" not in said or "begins with" in said, "an error must not quote the file's content"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_without_any_intact_version_stops(copied: Desk, damage: Damage) -> None:
    for path in (copied.run_folder / "parameters").rglob("*.safetensors"):
        damage(path)
    said = resume(copied)
    assert said.startswith("error: ")
    assert "no stored version is intact" in said
    assert "--fresh" in said


def finish(desk: Desk) -> LiveRun:
    with desk.begin() as run:
        assert run.wait() == 0, run.output
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["parameters/default/versions/<newest>", "ledger/trainer-0.page", "metrics.jsonl"])
def test_the_command_says_what_is_lost_and_finishes(copied: Desk, name: str) -> None:
    path = file_of(copied.run_folder, name)
    deleted(path)
    run = finish(copied)
    (warning,) = [line for line in run.output.splitlines() if "warning: " in line]
    assert path.name.removesuffix(".safetensors") in warning
    assert "Traceback" not in run.output
    summary = copied.facts().json("summary.json")
    assert summary["ledger"]["balanced"]


@pytest.mark.slow
def test_the_summary_names_the_damaged_version_and_the_lost_steps(copied: Desk) -> None:
    newest = copied.facts().newest()
    assert newest is not None
    flipped(file_of(copied.run_folder, "parameters/default/versions/<newest>"))
    run = finish(copied)
    (rollback,) = copied.facts().json("summary.json")["rollbacks"]
    assert rollback["newest"] == str(newest.version)
    assert rollback["attempt"] == 2
    assert rollback["lost_steps"] == newest.version.step - int(rollback["version"].partition(".")[2]) > 0
    named = [line for line in run.output.splitlines() if f"since version {newest.version} cannot be used" in line]
    # A run that takes long enough names it in its progress lines, too.
    assert len([line for line in named if " s | " not in line]) == 2, "at the start and in the summary"


@pytest.mark.slow
def test_the_command_does_not_begin_again_without_an_intact_version(copied: Desk) -> None:
    for path in (copied.run_folder / "parameters").rglob("*.safetensors"):
        zeroed(path)
    with copied.begin() as run:
        assert run.wait() == 1, run.output
    assert "no stored version is intact" in run.output
    assert "--fresh" in run.output
    assert "Traceback" not in run.output
    with copied.begin("--fresh") as run:
        assert run.wait() == 0, run.output
