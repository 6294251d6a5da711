"""Patterns match code by its structure, exactly once, and their replacements keep what the holes matched."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutations import Change, NoMatchError

MODULE = '''
import os

class Account:
    def take(self, slot, *, mark):
        """Take a slot."""
        if slot.sequence <= mark:  # a comment
            raise ValueError(f"{slot} was taken before")
        self._write(slot)
        self.total += slot.size
        return self.total if mark >= 0 and slot.size and self.total else None

    @property
    def total(self):
        def total():
            return 1
        return total()
'''


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "bank").mkdir()
    (tmp_path / "bank" / "__init__.py").write_text("def opened(): return True\n")
    (tmp_path / "bank" / "books.py").write_text(MODULE)
    return tmp_path


def changed(root: Path, replace: str, by: str, symbol: str = "bank.books.Account.take") -> str:
    _, text = Change(symbol=symbol, replace=replace, by=by).apply([root])
    return text


@pytest.mark.parametrize(
    ("replace", "by", "old", "new"),
    [
        ("$slot.sequence <= $mark", "$mark < $slot.sequence", "slot.sequence <= mark", "mark < slot.sequence"),
        ("self.$total += ...", "self.$total += 1", "+= slot.size", "+= 1"),
        ("... and slot.size and ...", "mark", "mark >= 0 and slot.size and self.total", "mark"),
        ("$total if ... else None", "$total", " if mark >= 0 and slot.size and self.total else None", ""),
        ("$self.$write(slot)", "$self.$write(mark)", "self._write(slot)", "self._write(mark)"),
    ],
)
def test_a_match_is_replaced(root: Path, replace: str, by: str, old: str, new: str) -> None:
    expected = MODULE.replace(old, new, 1)
    assert ast.dump(ast.parse(changed(root, replace, by))) == ast.dump(ast.parse(expected))


def test_statements_are_deleted(root: Path) -> None:
    text = changed(root, "if ... <= ...: raise ValueError(...)", "")
    assert "raise" not in text
    assert "self._write(slot)" in text


def test_a_block_is_never_left_empty(root: Path) -> None:
    assert "pass" in changed(root, "return True", "", symbol="bank.opened")


def test_statements_change_places(root: Path) -> None:
    text = changed(root, "$write\nself.$total += $size", "self.$total += $size\n$write")
    assert text.index("self.total += slot.size") < text.index("self._write(slot)")


@pytest.mark.parametrize(
    ("symbol", "replace", "by", "message"),
    [
        ("bank.books.Account.give", "slot", "mark", "0 definitions of 'give'"),
        ("bank.letters.Account", "slot", "mark", "0 definitions of 'letters'"),
        ("shop.Account", "slot", "mark", "no module of that name"),
        ("bank.books.Account.take", "nothing", "mark", "0 matches"),
        ("bank.books.Account.take", "slot", "mark", r"\d matches"),
        ("bank.books.Account.take", "$slot.sequence", "unknown", "uses unknown, which its module does not"),
        ("bank.books.Account.take", "$slot.sequence", "$slot.unknown", "uses unknown, which its module does not"),
    ],
)
def test_what_does_not_fit_is_refused(root: Path, symbol: str, replace: str, by: str, message: str) -> None:
    with pytest.raises(NoMatchError, match=message):
        changed(root, replace, by, symbol)
