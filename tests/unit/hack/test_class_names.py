"""``hack/class_names.py`` finds public names with two meanings."""

from __future__ import annotations

import class_names


def faults(*modules: str, **allowed: str) -> list[str]:
    found = [each for number, module in enumerate(modules) for each in class_names.definitions(module, f"{number}.py")]
    messages: list[str] = class_names.faults(found, allowed)
    return messages


def test_a_class_name_that_is_defined_twice_is_refused_with_its_places() -> None:
    (message,) = faults("class Row: ...", "import os\nclass Row: ...", "class Column: ...")
    assert "Row is defined more than once" in message
    assert "0.py:1, 1.py:2" in message


def test_a_class_and_an_alias_of_one_name_are_refused() -> None:
    assert len(faults("class Row: ...", "Row = dict[str, int]")) == 1


def test_aliases_of_one_name_are_refused_unless_they_are_defined_alike() -> None:
    assert len(faults("Row = dict[str, int]", "Row = list[int] | None")) == 1
    assert faults("Row = dict[str, int]", "Row = dict[str, int]") == []


def test_private_names_constants_and_nested_classes_are_nobody_elses() -> None:
    private = "class _Row: ...\nROWS = [1] + [2]"
    assert faults(private, private) == []
    assert faults("class Row:\n  class Config: ...", "class Column:\n  class Config: ...") == []


def test_an_exception_has_to_be_needed() -> None:
    assert faults("class Row: ...", "class Row: ...", Row="two tables") == []
    (message,) = faults("class Row: ...", Row="two tables")
    assert "remove it" in message


def test_the_repository_has_no_such_names() -> None:
    assert class_names.main() == 0
