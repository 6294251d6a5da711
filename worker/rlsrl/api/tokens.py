"""Tokens that follow from an experiment's token. The operator makes them, and servers of workers check them."""

from __future__ import annotations

import hashlib
import hmac

_READING = b"rlsrl: read stored weights"


def reading_token(token: str) -> str:
    """Return the token that reads the stored weights of the experiment with that token, and allows nothing else.

    It is HMAC-SHA-256 in hexadecimal: it does not tell the experiment's own token.
    """
    return hmac.new(token.encode(), _READING, hashlib.sha256).hexdigest()
