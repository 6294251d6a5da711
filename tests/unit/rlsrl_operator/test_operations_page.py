"""The table of reasons and the operations page explain exactly what the operator reports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from rlsrl.api.reasons import (
    PHASES,
    QUIET,
    REASONS,
    AcceptedReason,
    ConditionType,
    DurableReason,
    EnvironmentErrorsReason,
    EnvironmentServerReason,
    FinishedReason,
    GangReason,
    NonFiniteReason,
    ProgressReason,
    ReadyReason,
    ResumedReason,
    RollbackReason,
    VolumeReason,
    explain,
)
from rlsrl.api.status import Phase

REPOSITORY = Path(__file__).parents[3]
PAGE = (REPOSITORY / "docs" / "kubernetes" / "operations.md").read_text(encoding="utf-8")
SOURCES = {path: path.read_text(encoding="utf-8") for path in (REPOSITORY / "operator").rglob("*.py")}
ASPECTS: tuple[ConditionType, ...] = get_args(ConditionType)
OF_EACH = (
    AcceptedReason,
    ReadyReason,
    GangReason,
    ProgressReason,
    EnvironmentServerReason,
    EnvironmentErrorsReason,
    NonFiniteReason,
    DurableReason,
    ResumedReason,
    RollbackReason,
    VolumeReason,
    FinishedReason,
)
"""The reasons of each condition, in the same order."""


def section(title: str) -> str:
    """Return the text under a heading, up to the next heading."""
    found = re.split(rf"(?m)^#+ {title}$", PAGE)
    assert len(found) == 2, f"one heading {title}"
    return re.split(r"(?m)^#+ ", found[1])[0]


def first_table(text: str) -> dict[str, list[str]]:
    """Return the other cells of each row by the code word in its first cell."""
    found = re.search(r"(?m)^\| --- .*\n((?:\|.*\n)+)", text)
    assert found is not None, "a table"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]
    return {row[0].strip("`"): row[1:] for row in rows}


def said_in_code(pattern: str) -> set[str]:
    return {word for text in SOURCES.values() for word in re.findall(pattern, text)}


def test_every_phase_is_explained() -> None:
    assert set(first_table(section("Phases"))) == set(PHASES) == set(get_args(Phase))


def test_every_condition_has_a_section() -> None:
    assert re.findall(r"(?m)^### (.*)$", PAGE) == list(ASPECTS)
    assert set(REASONS) == set(ASPECTS)


@pytest.mark.parametrize(("condition_type", "reasons"), list(zip(ASPECTS, OF_EACH, strict=True)))
def test_every_reason_of_a_condition_is_explained(condition_type: ConditionType, reasons: object) -> None:
    table = first_table(section(condition_type))
    assert set(table) == set(REASONS[condition_type]) == set(get_args(reasons))
    for reason, cells in table.items():
        status, meaning, cure = cells
        assert status in ("True", "False"), reason
        assert meaning.endswith(".") and cure.endswith((".", "`")), reason


def test_reasons_of_kubernetes_are_explained_and_unknown_ones_have_a_cure() -> None:
    assert explain("Ready", "ErrImagePull").meaning == "The node cannot pull the image."
    assert explain("GangComplete", "Starting") != explain("Ready", "Starting")
    assert "kubectl describe pod" in explain("Ready", "ContainerStatusUnknown").cure


def test_every_explained_reason_is_used() -> None:
    said = {word for text in SOURCES.values() for word in re.findall(r'"([A-Za-z]+)"', text)}
    assert {reason for reasons in REASONS.values() for reason in reasons} <= said


def test_the_reasons_of_normal_events_are_named() -> None:
    words = set(re.findall(r"`([A-Z][A-Za-z]+)`", section("Events")))
    assert words == QUIET
    assert {reason for reasons in REASONS.values() for reason in reasons} > QUIET


def test_every_line_of_the_log_is_explained() -> None:
    assert set(first_table(section("The operator's log"))) == said_in_code(r'_log\.\w+\(\s*"(\w+)"')
