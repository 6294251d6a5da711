"""What the command line says when the user is to act: one clear error, exit code 2, no traceback."""

from __future__ import annotations

import click


class UserError(click.ClickException):
    """Something the user can put right; the message says what and how."""

    exit_code = 2
