from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from rlsrl.api.load import load_text
from rlsrl.local.controller import ProcessState
from rlsrl.local.display import LineDisplay, TerminalDisplay, UnbreakableOutput, Viewer, open_display

EXPERIMENT = load_text("""
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: toy}
spec:
  environment: {id: CartPole-v1}
  actors: {environments: 2}
  stop: {envSteps: 100}
""")
PROCESSES = [ProcessState(role="trainer", number=0, state="running", pid=7)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def viewer(*, step_seconds: int = 1, unstored: Sequence[tuple[int, str]] = ()) -> Viewer:
    """Return a viewer whose time moves by ``step_seconds`` a call, with these unstored versions and reasons, then 0."""
    times, given = itertools.count(step=step_seconds), iter(unstored)

    def status() -> tuple[dict[str, Any], float]:
        number, reason = next(given, (0, None))
        return {"totals": {"env_steps": 50, "unstored_versions": number, "unstored_reason": reason}}, 0.0

    return Viewer(EXPERIMENT, status, clock=lambda: float(next(times)))


def test_output_without_a_terminal_is_plain_lines() -> None:
    output = io.StringIO()
    noon = datetime(2026, 1, 2, 12, 30, tzinfo=UTC)
    display = LineDisplay(viewer(step_seconds=30), output, now=lambda: noon)
    display.show(PROCESSES)
    display.note("actor-0 was killed")
    display.close()
    lines = output.getvalue().splitlines()
    assert isinstance(open_display(viewer(), output), LineDisplay)
    assert {line[:26] for line in lines} == {"2026-01-02T12:30:00+00:00 "}
    assert lines[0][26:].startswith("   30.0 s | return - | env steps 50 of 100 | ")
    assert [line[26:] for line in lines[1:]] == ["actor-0 was killed"]
    assert "\x1b" not in output.getvalue()


def test_lines_are_frequent_at_first_and_later_one_a_minute() -> None:
    output = io.StringIO()
    display = LineDisplay(viewer(), output)
    for _ in range(600):
        display.show(PROCESSES)
    shown_at = [float(line.split()[1]) for line in output.getvalue().splitlines()]
    assert shown_at[:5] == [1.0, 6.0, 11.0, 16.0, 21.0]
    gaps = [later - earlier for earlier, later in itertools.pairwise(shown_at)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 60.0


def test_the_last_state_is_printed_also_when_no_line_is_due() -> None:
    output = io.StringIO()
    display = LineDisplay(viewer(), output)
    for _ in range(3):
        display.show(PROCESSES)
    display.show(PROCESSES, last=True)
    assert len(output.getvalue().splitlines()) == 2


def test_a_line_shows_an_alarm_at_once() -> None:
    output = io.StringIO()
    full = "1.4: full, 99 bytes are free"
    unstored = [(0, ""), (0, ""), (1, full), (2, full.replace("99", "98")), (2, f"{full}; training is over"), (0, "")]
    display = LineDisplay(viewer(unstored=unstored), output)
    for _ in range(7):
        display.show(PROCESSES)
    assert display.interval_seconds == 1.0
    texts = ("NOT STORED: the newest", "99 bytes are free", "training is over")
    shown = [(line.split()[1], *(text in line for text in texts)) for line in output.getvalue().splitlines()]
    assert shown == [
        ("1.0", False, False, False),
        ("3.0", True, True, False),
        ("5.0", True, True, True),
        ("6.0", False, False, False),
    ]


def test_an_environment_that_hangs_is_an_alarm() -> None:
    call = {"text": "environment rank 3 has been in step for 6 s (actor-0)"}
    documents, times = iter([[], [call], [call], []]), itertools.count()
    viewer = Viewer(EXPERIMENT, lambda: ({"environment_calls": next(documents)}, 0.0), clock=lambda: float(next(times)))
    output = io.StringIO()
    display = LineDisplay(viewer, output)
    for _ in range(4):
        display.show(PROCESSES)
    assert ["rank 3 has been in step" in line for line in output.getvalue().splitlines()] == [False, True, False]


def test_the_view_is_redrawn_in_place_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output = Terminal()
    display = open_display(viewer(), output)
    display.show(PROCESSES)
    display.note("[bold]not markup[/bold]")
    display.show(PROCESSES)
    display.close()
    assert isinstance(display, TerminalDisplay)
    assert "\x1b[" in output.getvalue()
    assert "50 of 100" in output.getvalue()
    assert "[bold]not markup[/bold]" in output.getvalue()
    assert output.getvalue().count("\x1b[?25l") == output.getvalue().count("\x1b[?25h") == 1, "the cursor is back"


def test_what_a_program_prints_stays_above_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output = Terminal()
    display = open_display(viewer(), output)
    with display.others_print():
        print("my own words")
    display.show(PROCESSES)
    display.close()
    assert output.getvalue().index("my own words") < output.getvalue().index("50 of 100")


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_display(viewer(), Terminal()), LineDisplay)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_broken_output_ends_only_the_display(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")

    class Broken(Terminal):
        def isatty(self) -> bool:
            return terminal

        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self) -> None:
            raise OSError(5, "Input/output error")

    display = open_display(viewer(), Broken())
    display.show(PROCESSES)
    display.note("anything")
    display.close()
    assert isinstance(display, TerminalDisplay if terminal else LineDisplay)


def test_a_closed_output_is_a_broken_one() -> None:
    output = io.StringIO()
    output.close()
    safe: Any = UnbreakableOutput(output)
    Console(file=safe).print("anything")
