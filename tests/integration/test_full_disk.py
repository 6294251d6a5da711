"""A full or slow disk costs durability, never the run, and is reported. At its end a run waits until there is room."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, LiveRun
from rlsrl.testing.run_snapshot import take_snapshot

LARGE = "[256, 256]"
ROOM_BYTES = 200_000
"""Smaller than a version of this network, and far larger than the trainer's log."""
DISK_BYTES = 200 * 1024
FREEZABLE_BYTES = 32 * 1024**2
EPISODES = 5000
"""Of an evaluation that takes seconds."""


@pytest.mark.slow
def test_training_continues_and_versions_are_stored_again_once_the_disk_has_space(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate).replace("[16]", LARGE))
    with desk.begin() as run:
        run.until(run.is_complete, "all processes at work")
        run.until(lambda: (run.facts.newest() or 0) and len(run.facts.versions()) > 1, "a version beyond the first")
        (trainer,) = run.workers("trainer")
        # The kernel refuses what lies beyond the limit, in the middle of a write, as it does on a full disk.
        _, hard = resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (ROOM_BYTES, hard))

        def failures() -> list[dict]:
            return run.facts.logged("trainer-0", "checkpoint_failed")

        def steps() -> list[int]:
            """Return the steps of the versions that failed; one that no newer one replaces is tried again."""
            return sorted({int(failure["version"].partition(".")[2]) for failure in failures()})

        run.until(lambda: len(steps()) >= 2, "two versions that the disk did not take: training goes on")
        run.until(lambda: "NOT STORED: the newest" in run.output, "a line about versions that are not stored")
        durable = run.facts.newest()
        assert durable is not None
        families = text_string_to_metric_families(take_snapshot(run).expositions["trainer-0"])
        shown = {sample.name: sample.value for family in families for sample in family.samples}
        assert shown["rlsrl_checkpoints_failed_total"] >= 2
        assert {failure["level"] for failure in failures()} == {"error"}
        assert "File too large" in failures()[0]["exception"]
        assert durable.version.step < steps()[0]
        last = steps()[-1]

        resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (hard, hard))
        newer = run.until(
            lambda: next((info for info in run.facts.versions() if info.version.step > last), None),
            "a version after there is room again",
        )
        assert newer.version.attempt == 1
        assert run.workers("trainer") == [trainer]
        gate.touch()
        assert run.wait() == 0, run.output
    summary = desk.facts().json("summary.json")
    assert summary["restarts"] == {}
    assert summary["ledger"]["balanced"]
    assert not list((desk.run_folder / "parameters").rglob("*.tmp")), "nothing half-written is left"


class SmallDisk:
    """A run whose ``parameters/`` are on a small disk of their own, with a version every second."""

    def __init__(self, folder: Path) -> None:
        self.gate = folder / "gate"
        experiment = GATED_EXPERIMENT.format(gate=self.gate).replace("{everySteps: 10}", "{everySeconds: 1}")
        self.desk = Desk(folder, experiment)
        self.path = self.desk.run_folder / "parameters"
        self._filling = self.path / "filling"

    def fill(self) -> None:
        """Leave no free byte."""
        with self._filling.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(512))

    def empty(self) -> None:
        """Make room again."""
        self._filling.unlink()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Let writes hang."""
        subprocess.run(["fsfreeze", "--freeze", str(self.path)], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.path)], check=True)

    def fill_under(self, run: LiveRun) -> str:
        """Fill the disk of a run that stores versions; return the reason in its status once it stores none."""

        def reason() -> str | None:
            self.fill()  # a version that was removed meanwhile has left room
            return self.reason(run)

        run.until(lambda: len(run.facts.versions()) > 1, "a version beyond the first")
        return run.until(reason, "versions that are not stored")

    @staticmethod
    def reason(run: LiveRun) -> str | None:
        """Return why versions are not stored, according to the coordinator; None if they are."""
        return ((run.facts.status() or {}).get("totals") or {}).get("unstored_reason")

    def end_training(self, run: LiveRun) -> None:
        """Let the run reach its goal, and wait until its trainer waits for room."""
        self.gate.touch()
        run.until(lambda: "training is over" in (self.reason(run) or ""), "a trainer that waits for room")


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[SmallDisk]:
    """Yield a disk that ``mount`` makes with these options; skip the test if this user may not."""
    made = SmallDisk(folder)
    made.path.mkdir(parents=True)
    done = subprocess.run(["mount", *options, str(made.path)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this user may not mount a small disk: {done.stderr.strip()}")
    try:
        yield made
    finally:
        subprocess.run(["umount", str(made.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none") as made:
        yield made


@pytest.fixture
def freezable_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Yield a disk of a kind that can be frozen: a file system in a file."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(FREEZABLE_BYTES)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with mounted(tmp_path, "-o", "loop", str(image)) as made:
        (made.path / "lost+found").rmdir()  # a new run's folder is empty
        yield made


@pytest.mark.slow
def test_a_disk_that_hangs_is_named_and_costs_nothing_once_it_answers(freezable_disk: SmallDisk) -> None:
    disk = freezable_disk
    late = re.compile(r"STORED LATE: version 1\.\d+ was due \d+ s ago and is not stored yet")

    def stored_late() -> str | None:
        return ((disk.desk.facts().status() or {}).get("totals") or {}).get("late_version")

    with disk.desk.begin() as run:
        run.until(lambda: len(run.facts.versions()) > 1, "a version beyond the first")
        with disk.frozen():
            run.until(lambda: late.search(run.output), "a line about the late version")
            assert late.search(disk.desk.call("top", "live").stdout)
            # Two versions wait, so training does, too.
            run.until(lambda: "trainer-0 has waited for store for " in run.output, "a line about the stall")
        run.until(lambda: not stored_late(), "versions are stored in time again")
        disk.gate.touch()
        assert run.wait() == 0, run.output
    summary = disk.desk.facts().json("summary.json")
    assert (summary["finished"], summary["restarts"]) == (True, {})
    assert summary["ledger"]["balanced"]


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_last_version_waits_for_room(disk: SmallDisk) -> None:
    with disk.desk.begin() as run:
        reason = disk.fill_under(run)
        assert f"No space left on device: '{disk.path}/default' needs " in reason
        assert " bytes, " in reason
        assert " are free: free " in reason
        run.until(lambda: "NOT STORED: the newest" in run.output, "a line about versions that are not stored")
        assert f"No space left on device: '{disk.path}/default' needs " in run.output
        top = disk.desk.call("top", "live")
        assert "NOT STORED: the newest" in top.stdout
        assert str(disk.path) in top.stdout
        before = (run.facts.status() or {})["totals"]["train_steps"]
        run.until(lambda: ((run.facts.status() or {}).get("totals") or {}).get("train_steps", 0) > before, "training")
        disk.end_training(run)
        run.until(lambda: "training is over, and the trainer tries again until" in run.output, "a line about the wait")
        disk.empty()
        assert run.wait() == 0, run.output
    summary = disk.desk.facts().json("summary.json")
    assert summary["finished"]
    assert summary["restarts"] == {}
    assert summary["ledger"]["balanced"]
    assert summary["ledger"]["lost"]["rolled_back"] == 0


@pytest.mark.slow
def test_a_permanent_version_without_room_is_reported_and_the_next_one_takes_its_place(disk: SmallDisk) -> None:
    with disk.desk.begin("--set", "spec.parameters.tagEverySeconds=2") as run:
        disk.fill_under(run)
        reason = run.until(
            lambda: text if "permanent versions lost: " in (text := disk.reason(run) or "") else None,
            "a permanent version that a newer one replaces",
        )
        assert "becomes permanent instead)" in reason
        disk.empty()

        def replacements() -> list[dict]:
            return run.facts.logged("trainer-0", "permanent_versions_replaced")

        run.until(replacements, "a version that is permanent in place of others")
        (replacement, *_) = replacements()
        tagged = {tag: info.version.step for info in run.facts.versions() for tag in info.tags}
        assert replacement["by"] in tagged
        assert all(tag == f"step-{step}" for tag, step in tagged.items())
        disk.gate.touch()
        assert run.wait() == 0, run.output


@pytest.mark.slow
def test_an_evaluation_without_room_is_named_and_later_ones_are_stored(disk: SmallDisk) -> None:
    """An evaluation takes longer than the next version, so one is always under way."""
    evaluators = f"{{replicas: 1, environments: 1, episodesPerEnvironment: {EPISODES}}}"

    def failed() -> dict | None:
        return (disk.desk.facts().status() or {}).get("failed_evaluations")

    with disk.desk.begin("--set", f"spec.evaluators={evaluators}") as run:
        disk.fill_under(run)
        run.until(lambda: disk.fill() or failed(), "an evaluation that is not stored")
        run.until(lambda: "EVALUATIONS FAILED: the newest" in run.output, "a line about the evaluation")
        top = disk.desk.call("top", "live").stdout
        assert re.search(r"EVALUATIONS FAILED: the newest \d+, the last of evaluator-0: 1\.\d+: .*No space left", top)
        disk.empty()
        run.until(lambda: failed() is None, "an evaluation that is stored")
        disk.gate.touch()
        assert run.wait() == 0, run.output
    summary = disk.desk.facts().json("summary.json")
    assert (summary["finished"], summary["restarts"]) == (True, {})
    assert summary["evaluation"] is not None


def test_a_last_version_without_room_ends_the_run_with_what_to_do(disk: SmallDisk) -> None:
    limit = ("--set", "spec.parameters.retryLastSeconds=3")
    with disk.desk.begin(*limit) as run:
        disk.fill_under(run)
        disk.gate.touch()
        assert run.wait() == 1, run.output
    (error,) = [line for line in run.output.splitlines() if line.startswith("  rlsrl: the last version, 1.")]
    assert "could not be stored for 3 s (parameters.retryLastSeconds): [Errno 28] No space left on device" in error
    assert str(disk.path) in error
    assert " are free: free " in error
    assert "trainer-0 exited with code 4" in run.output
    assert "Traceback" not in run.output
    assert re.search(r"to resume: \S*rlsrl run live.yaml --set spec.parameters.retryLastSeconds=3\n", run.output)
    summary = disk.desk.facts().json("summary.json")
    assert (summary["finished"], summary["restarts"], summary["attempts"]) == (False, {}, 1)
    assert summary["ledger"]["balanced"]
    disk.empty()
    with disk.desk.begin(*limit) as run:
        assert run.wait() == 0, run.output
    assert disk.desk.facts().json("summary.json")["finished"]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_room(disk: SmallDisk, signum: signal.Signals) -> None:
    with disk.desk.begin() as run:
        disk.fill_under(run)
        disk.end_training(run)
        run.send(signum)
        assert run.wait() == 128 + signum, run.output
    (note,) = [line for line in run.output.splitlines() if "trainer-0 exited with code 1 instead of ending" in line]
    assert ": rlsrl: the last version, 1." in note
    assert str(disk.path) in note
    assert " are free: free " in note
    assert re.search(r"to resume: \S*rlsrl run live.yaml\n", run.output)
    assert disk.desk.facts().leftovers() == []
    summary = disk.desk.facts().json("summary.json")
    assert (summary["finished"], summary["restarts"]) == (False, {})
    assert summary["ledger"]["balanced"]


def test_a_run_without_room_for_its_first_version_ends_at_once(disk: SmallDisk) -> None:
    with disk.desk.begin() as run:
        run.until((disk.desk.run_folder / "controller.json").exists, "a run, before its trainer has started")
        disk.fill()
        assert run.wait() == 1, run.output
    assert "the first version could not be stored: [Errno 28] No space left on device" in run.output
    assert str(disk.path) in run.output
    assert disk.desk.facts().json("summary.json")["restarts"] == {}
    assert os.listdir(disk.path / "default" / "states") == []
