"""Errors of the store on their way to a client: raised there as they were here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import grpc

from rlsrl.parameters.protocols import (
    Corrupt,
    NonFinite,
    ParameterError,
    StaleAttempt,
    VersionExists,
    VersionNotFound,
)
from rlsrl.runtime.coordination import describe

KIND_KEY = "rlsrl-error"
"""Trailing metadata of a call that the store refused: one of ``_KINDS``."""
ERRNO_KEY = "rlsrl-errno"
"""Trailing metadata beside it, where the system gave a number."""
MAX_TEXT = 2000
"""Characters of an error's text that travel: it goes in a header, which has a limit."""


class TransferRefused(ParameterError):  # noqa: N818 - named for what was done
    """What was sent is too long or not what both ends agreed on; the text says in what."""


class ServiceUnavailable(ParameterError, ConnectionError):  # noqa: N818 - named for the fact
    """Nobody answered before the call's deadline, or this end was closed. Whether a change was made is not known."""


class ServiceRefused(ParameterError):  # noqa: N818 - named for what the service did
    """The service answers and does not serve us: another token, or it has no such call."""


_KINDS: Mapping[str, tuple[type[Exception], grpc.StatusCode]] = {
    "VersionNotFound": (VersionNotFound, grpc.StatusCode.NOT_FOUND),
    "VersionExists": (VersionExists, grpc.StatusCode.ALREADY_EXISTS),
    "StaleAttempt": (StaleAttempt, grpc.StatusCode.FAILED_PRECONDITION),
    "NonFinite": (NonFinite, grpc.StatusCode.INVALID_ARGUMENT),
    "Corrupt": (Corrupt, grpc.StatusCode.DATA_LOSS),
    "TransferRefused": (TransferRefused, grpc.StatusCode.INVALID_ARGUMENT),
    "ParameterError": (ParameterError, grpc.StatusCode.INTERNAL),
    "ValueError": (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
    "TimeoutError": (TimeoutError, grpc.StatusCode.ABORTED),
    "OSError": (OSError, grpc.StatusCode.INTERNAL),
}
"""Kinds of error by name, the more special before the more general."""

_FINAL_CODES = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""Answers of gRPC itself that trying again cannot change."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a call ends because of an error."""

    kind: str
    """One of few names."""
    code: grpc.StatusCode
    text: str
    metadata: tuple[tuple[str, str], ...]
    expected: bool
    """Whether the error is one that a store may raise; any other is our mistake."""


def failure_of(error: Exception) -> Failure:
    """How a call ends that raised this."""
    for kind, (error_type, code) in _KINDS.items():
        if isinstance(error, error_type):
            metadata, text = [(KIND_KEY, kind)], str(error)
            if isinstance(error, OSError) and error.errno is not None:
                metadata.append((ERRNO_KEY, str(error.errno)))
                # The number comes first in the text of such an error, and will again.
                text = text.removeprefix(f"[Errno {error.errno}] ")
            return Failure(kind=kind, code=code, text=text[:MAX_TEXT], metadata=tuple(metadata), expected=True)
    text = f"the parameter service failed: {error!r}"
    return Failure(
        kind="bug",
        code=grpc.StatusCode.INTERNAL,
        text=text[:MAX_TEXT],
        metadata=((KIND_KEY, "ParameterError"),),
        expected=False,
    )


def error_of(failed: grpc.RpcError) -> Exception | None:
    """The error that ended a call, to be raised; None if the call did not get through and may be made again."""
    call = cast("grpc.Call", failed)  # what gRPC raises from a call is both
    metadata = {key: value for key, value in call.trailing_metadata() or () if isinstance(value, str)}
    kind = metadata.get(KIND_KEY, "")
    if kind in _KINDS:
        error_type, _ = _KINDS[kind]
        if ERRNO_KEY in metadata:
            return OSError(int(metadata[ERRNO_KEY]), call.details() or os.strerror(int(metadata[ERRNO_KEY])))
        return error_type(call.details())
    return ServiceRefused(describe(failed)) if call.code() in _FINAL_CODES else None
