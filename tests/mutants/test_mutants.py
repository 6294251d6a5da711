"""Known-bad variants of our own code. Each breaks one promise, and each test that is named for it has to notice.

The table is ``mutants.toml``: what goes wrong for users, the text that is replaced and by what, and the tests that fail
then. A mutant is put into a copy of the source trees, and only its tests run against that. A test that cannot be
collected, or whose fixtures break, has noticed nothing: it has to fail by itself.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TREES = ("worker", "operator")
TEST_SECONDS, RUN_SECONDS = 60, 240
TESTS_AT_ONCE = 12


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One replacement of text in one file."""

    name: str
    harm: str
    """What users would meet."""
    file: str
    old: str
    """Stands there exactly once."""
    new: str
    caught_by: tuple[str, ...]
    """Tests, of which each has to fail; of one with parameters, at least one case."""

    def applied(self) -> str:
        """The file's text with the mutant in it."""
        text = (REPOSITORY / self.file).read_text(encoding="utf-8")
        found = text.count(self.old)
        assert found == 1, f"mutant {self.name!r}: its old text is {found} times in {self.file}, not once"
        return text.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    table = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))
    return [Mutant(**{**each, "caught_by": tuple(each["caught_by"])}) for each in table["mutants"]]


MUTANTS = read_mutants()


def run_tests(tests: Sequence[str], trees: Path) -> tuple[int, str]:
    """Run these tests, and the processes that they start, with the source trees of that folder; what came of it."""
    paths = os.pathsep.join(str(trees / tree) for tree in TREES)
    environment = {**os.environ, "PYTHONPATH": paths, "HYPOTHESIS_STORAGE_DIRECTORY": str(trees / "hypothesis")}
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", f"--timeout={TEST_SECONDS}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    # A file, since what a test that is cut short leaves behind would hold a pipe open.
    output = trees / "output.txt"
    with (
        output.open("wb") as file,
        subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            process.wait(RUN_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output.read_text(errors="replace")


def copy_trees(to: Path) -> Path:
    for tree in TREES:
        shutil.copytree(REPOSITORY / tree, to / tree)
    return to


def test_there_are_as_many_as_were_promised_and_each_has_its_own_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_made_of_the_code_as_it_is(mutant: Mutant) -> None:
    assert mutant.new.split() != mutant.old.split()
    ast.parse(mutant.applied())
    for test in mutant.caught_by:
        path, _, name = test.partition("::")
        assert name, f"mutant {mutant.name!r}: {test} names no test"
        assert (REPOSITORY / path).exists(), f"mutant {mutant.name!r}: there is no {path}"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    trees = copy_trees(tmp_path)
    (trees / mutant.file).write_text(mutant.applied(), encoding="utf-8")
    status, output = run_tests(mutant.caught_by, trees)
    lines = output.splitlines()
    assert status == pytest.ExitCode.TESTS_FAILED, f"exit status {status}: {mutant.harm}\n{output}"
    assert not [line for line in lines if line.startswith("ERROR ")], output
    blind = [test for test in mutant.caught_by if not any(line.startswith(f"FAILED {test}") for line in lines)]
    assert not blind, f"{mutant.harm} These did not notice: {', '.join(blind)}\n{output}"


CATCHERS = sorted({test for mutant in MUTANTS for test in mutant.caught_by})


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(CATCHERS), TESTS_AT_ONCE))
def test_without_a_mutant_the_same_tests_pass(first: int, tmp_path: Path) -> None:
    status, output = run_tests(CATCHERS[first : first + TESTS_AT_ONCE], copy_trees(tmp_path))
    assert status == pytest.ExitCode.OK, output
