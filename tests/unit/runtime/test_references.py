"""References to user code: callables that are found, and the error of each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.runtime.errors import ConfigurationError, did_you_mean
from rlsrl.runtime.references import load_callable


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_callable_is_found_in_a_module_and_in_a_package(user_folder: Path) -> None:
    write(user_folder, "reference_module.py", "def make(): return 7")
    write(user_folder, "refs_package/__init__.py", "")
    write(user_folder, "refs_package/inner.py", "class Thing:\n    @staticmethod\n    def make(): return 8")
    assert load_callable("reference_module:make", where="factory")() == 7
    assert load_callable("refs_package.inner:Thing", where="factory").__name__ == "Thing"
    assert load_callable("refs_package.inner:Thing.make", where="factory")() == 8


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("reference_bad", "is not of the form 'package.module:callable'"),
        (":make", "is not of the form"),
        ("reference_ok:", "is not of the form"),
        ("reference_ok:a..b", "is not of the form"),
        ("reference_ok:a b", "is not of the form"),
        ("reference_okay:make", r"no module named 'reference_okay' \(did you mean 'reference_ok'\?\)"),
        ("refs_pack.iner:make", r"no module named 'refs_pack.iner' \(did you mean 'refs_pack.inner'\?\)"),
        ("reference_ok.sub:make", "no module named 'reference_ok.sub'"),
        ("nowhere_at_all_q.sub:make", "no module named 'nowhere_at_all_q'"),
        ("reference_ok:mak", r"module 'reference_ok' has no 'mak' \(did you mean 'make'\?\)"),
        ("reference_ok:make.mke", "'make' has no 'mke'"),
        ("reference_ok:number", "is of type int, which cannot be called"),
        ("reference_needy:make", "importing 'reference_needy' needs 'not_installed_anywhere', which is not installed"),
        (
            "reference_broken:make",
            r"importing 'reference_broken' raised ZeroDivisionError: .* \(/.*/reference_broken\.py, line 2\)$",
        ),
        ("reference_exits:make", r"'reference_exits' raised SystemExit: 3 \(/.*/reference_exits\.py, line 2\)$"),
        (
            "reference_syntax:make",
            r"'reference_syntax' raised SyntaxError: .* \(reference_syntax.py, line 1\)$",
        ),
    ],
)
def test_a_mistake_is_named_with_its_cure(user_folder: Path, reference: str, says: str) -> None:
    write(user_folder, "reference_ok.py", "number = 7\ndef make(): pass")
    write(user_folder, "refs_pack/__init__.py", "")
    write(user_folder, "refs_pack/inner.py", "")
    write(user_folder, "reference_needy.py", "import not_installed_anywhere")
    write(user_folder, "reference_broken.py", "import os\n1 / 0")
    write(user_folder, "reference_exits.py", "import sys\nsys.exit(3)")
    write(user_folder, "reference_syntax.py", "def")
    with pytest.raises(ConfigurationError, match=says) as caught:
        load_callable(reference, where="environment factory")
    assert str(caught.value).startswith(f"environment factory {reference!r}")


def test_a_far_candidate_is_not_suggested() -> None:
    assert did_you_mean("CartPole", ["Humanoid", "Ant"]) == ""
