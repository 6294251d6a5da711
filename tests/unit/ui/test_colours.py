"""The colours of the page, in the light and the dark theme: WCAG 2.2 AA, criteria 1.4.3 and 1.4.11."""

from __future__ import annotations

import re
from itertools import product

import pytest

from rlsrl.ui.server import STATIC

TEXT, GRAPHICS = 4.5, 3.0
"""Least contrasts of text, and of shapes that carry information."""


def themes() -> dict[str, dict[str, str]]:
    """Return the colours by name of the light theme, and of the dark one."""
    light, dark, *rest = re.findall(r":root \{(.*?)\}", (STATIC / "style.css").read_text(), re.DOTALL)
    assert rest == []
    return {
        name: dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", text)) for name, text in (("light", light), ("dark", dark))
    }


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``, as WCAG defines it."""
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_is_that_of_the_definition() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_shapes_stand_out(theme: str) -> None:
    colours = themes()[theme]
    pairs = [
        *product(("text", "dim", "accent", "busy", "bad"), ("paper", "panel"), (TEXT,)),
        *product(("busy", "wait", "bad", "accent", "warn", "dim"), ("paper", "panel"), (GRAPHICS,)),
        ("busy", "wait", GRAPHICS),  # parts of one box
        ("paper", "bad", GRAPHICS),  # the cross in a box
    ]
    found = {(one, other): contrast(colours[one], colours[other]) for one, other, _ in pairs}
    assert [
        f"{one} on {other}: {found[one, other]:.2f}" for one, other, least in pairs if found[one, other] < least
    ] == []
