"""Errors that the user can correct: one clear message, exit code 2, no traceback."""

from __future__ import annotations

import click


class UserError(click.ClickException):
    """The user can correct this. The message says what and how."""

    exit_code = 2
