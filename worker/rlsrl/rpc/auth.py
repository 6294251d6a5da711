"""The experiment's token. Every call carries the token, and every server checks it before anything else."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from rlsrl.api.pods import VIEWING_TOKEN_KEY

TOKEN_VARIABLE = "RLSRL_TOKEN"
TOKEN_FILE_VARIABLE = "RLSRL_TOKEN_FILE"


class TokenMissing(Exception):
    """Neither environment variable gives a token."""


def new_token() -> str:
    """Return a new token: 32 random bytes, URL-safe."""
    return secrets.token_urlsafe(32)


def token_from_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Return this process's token: the value of ``RLSRL_TOKEN``, or the content of the file ``RLSRL_TOKEN_FILE``.

    Raises:
        TokenMissing: neither variable is set, or the token is empty.
    """
    token = environ.get(TOKEN_VARIABLE, "")
    if not token and (path := environ.get(TOKEN_FILE_VARIABLE)):
        token = Path(path).read_text(encoding="ascii").strip()
    if not token:
        raise TokenMissing(
            f"no token: set {TOKEN_VARIABLE}, or {TOKEN_FILE_VARIABLE} to the path of a file that holds it"
        )
    return token


def viewing_token_from_environment(environ: Mapping[str, str] = os.environ) -> str:
    """Return the viewing token beside the file of the token; empty without one.

    Experiments of earlier operators and runs on one machine have none.
    """
    if not (path := environ.get(TOKEN_FILE_VARIABLE)):
        return ""
    try:
        return Path(path).with_name(VIEWING_TOKEN_KEY).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""


def token_matches(shown: str, expected: str) -> bool:
    """Return whether the tokens are equal, in a time that does not depend on where they differ."""
    return hmac.compare_digest(shown.encode(), expected.encode())
