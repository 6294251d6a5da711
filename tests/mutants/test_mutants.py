"""Known-bad variants of our own code. Each breaks one promise, and every test named for it must notice.

The table is ``mutants.toml``: the harm to users, the symbol and its change (``mutations.py``), and the tests that fail
then. A mutant is put into a copy of the source trees, and only its tests run against that copy. A test that cannot be
collected, or whose fixtures break, has noticed nothing: the test itself must fail.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mutations import Change

REPOSITORY = Path(__file__).parents[2]
TREES = ("worker", "operator")
TEST_SECONDS, RUN_SECONDS = 120, 300
TESTS_AT_ONCE = 12


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one symbol."""

    name: str
    harm: str
    """What users would meet."""
    change: Change
    caught_by: tuple[str, ...]
    """Tests that must all fail; of a test with parameters, at least one case."""

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Mutant:
        replace, by = (table["delete"], "") if "delete" in table else (table["replace"], table["by"])
        change = Change(symbol=table["symbol"], replace=replace, by=by)
        return cls(name=table["name"], harm=table["harm"], change=change, caught_by=tuple(table["caught_by"]))

    def applied(self) -> tuple[Path, str]:
        """Return the changed file, relative to the repository, and its text."""
        file, text = self.change.apply([REPOSITORY / tree for tree in TREES])
        return file.relative_to(REPOSITORY), text


def read_mutants() -> list[Mutant]:
    table = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text(encoding="utf-8"))
    return [Mutant.read(mutant) for mutant in table["mutants"]]


MUTANTS = read_mutants()


def run_tests(tests: Sequence[str], trees: Path) -> tuple[int, str]:
    """Run these tests, and the processes that they start, with the source trees of that folder; (status, output)."""
    paths = os.pathsep.join(str(trees / tree) for tree in TREES)
    environment = {**os.environ, "PYTHONPATH": paths, "HYPOTHESIS_STORAGE_DIRECTORY": str(trees / "hypothesis")}
    options = ["-q", "-p", "no:cacheprovider", "--tb=short", f"--timeout={TEST_SECONDS}"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    # A file: a process that outlives its test would hold a pipe open.
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


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15


@pytest.fixture(scope="module")
def known_tests() -> frozenset[str]:
    """All test functions, those of conformance suites included."""
    folders = (REPOSITORY / "tests", REPOSITORY / "worker" / "rlsrl" / "testing")
    files = (path for folder in folders for path in folder.rglob("*.py"))
    return frozenset(name for path in files for name in re.findall(r"def (test_\w+)", path.read_text("utf-8")))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant: Mutant, known_tests: frozenset[str]) -> None:
    file, text = mutant.applied()
    original = (REPOSITORY / file).read_text(encoding="utf-8")
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(original))
    for test in mutant.caught_by:
        path, _, name = test.partition("::")
        assert (REPOSITORY / path).exists(), f"mutant {mutant.name!r}: there is no {path}"
        function = name.partition("[")[0].rpartition("::")[2]
        assert function in known_tests, f"mutant {mutant.name!r}: there is no test {function!r}"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    trees = copy_trees(tmp_path)
    file, text = mutant.applied()
    (trees / file).write_text(text, encoding="utf-8")
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
