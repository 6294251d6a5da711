"""``hack/sizes.py`` finds functions and classes above their limits."""

from __future__ import annotations

import sizes


def faults(module: str, **larger: str) -> list[str]:
    messages: list[str] = sizes.faults(sizes.sizes(module, "a.py"), larger)
    return messages


def lines(number: int) -> str:
    return "\n".join("    x = 1" for _ in range(number))


def test_a_function_of_more_than_60_lines_is_refused_with_its_place() -> None:
    assert faults(f"def f():\n{lines(59)}") == []
    (message,) = faults(f"import os\nasync def f():\n{lines(60)}")
    assert message.startswith("a.py:2: f has 61 lines, the limit is 60")


def test_a_class_of_more_than_300_lines_is_refused_unless_it_is_listed() -> None:
    assert faults(f"class C:\n{lines(299)}") == []
    assert len(faults(f"class C:\n{lines(300)}")) == 1
    assert faults(f"class C:\n{lines(300)}", C="a reason") == []


def test_an_exception_has_to_be_needed() -> None:
    (message,) = faults("class C: ...", C="a reason")
    assert "remove it" in message
