"""Text that is refreshed: in place on a terminal, appended elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator

import click

INTERVAL_SECONDS = 2.0
_HOME_AND_CLEAR = "\x1b[H\x1b[J"


def show_live(draw: Callable[[], tuple[str, bool]], *, interval: float = INTERVAL_SECONDS) -> None:
    """Show the text of ``draw`` until its second value is True (the last text) or the user interrupts.

    On a terminal the text is cut to the terminal's size. Elsewhere unchanged text is not repeated.
    """
    before = None
    while True:
        text, last = draw()
        if sys.stdout.isatty() and not (last and before is None):
            click.echo(_HOME_AND_CLEAR + _cut(text))
        elif text != before:
            click.echo(text if before is None else f"\n{text}")
        if last:
            return
        before = text
        time.sleep(interval)


@contextlib.contextmanager
def quiet_interrupt() -> Iterator[None]:
    """End the command on Ctrl-C without a message, with the exit status of a shell."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _cut(text: str) -> str:
    width, height = shutil.get_terminal_size()
    return "\n".join(line[:width] for line in text.splitlines()[: height - 1])
