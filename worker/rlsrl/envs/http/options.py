"""How an environment server is reached. The module needs no HTTP library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HttpOptions:
    """How an environment server is reached."""

    url: str
    """Its URL, without the protocol's version."""
    timeout_seconds: float = 60.0
    """Seconds for one try of a request."""
    retries: int = 3
    """Further tries of a request."""
    backoff_seconds: float = 0.5
    """Seconds before the first further try. Each pause is twice as long as the one before."""
    max_backoff_seconds: float = 30.0
    """The longest pause, also between two probes of a server that is away."""
    breaker_failures: int = 5
    """Failed tries in a row, of all environments of this process, after which requests fail at once."""
    token_file: str | None = None
    """A file with the token of the server; None: it needs none."""
