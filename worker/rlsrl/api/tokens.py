"""Tokens that allow less than an experiment's own. The operator makes them, and servers of workers check them."""

from __future__ import annotations

import hashlib
import hmac

_READING = b"rlsrl: read stored weights"


def reading_token(token: str) -> str:
    """Return the token that reads the stored weights of the experiment with that token, and allows nothing else.

    It is HMAC-SHA-256 in hexadecimal: it does not tell the experiment's own token.
    """
    return hmac.new(token.encode(), _READING, hashlib.sha256).hexdigest()


def viewing_token(viewing_key: str, uid: str) -> str:
    """Return the token that opens the pages of a coordinator over HTTP, and allows nothing else.

    It is HMAC-SHA-256 in hexadecimal. The viewing key opens these pages of all experiments. No experiment's own token
    can be derived from it.

    Args:
        viewing_key: the operator's.
        uid: the experiment's ``metadata.uid``.
    """
    return hmac.new(viewing_key.encode(), uid.encode(), hashlib.sha256).hexdigest()
