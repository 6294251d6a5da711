"""The store's errors on the wire: the client raises the same error that the service caught."""

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
"""Trailing metadata of a call that failed in the store; the value is a key of ``_KINDS``."""
ERRNO_KEY = "rlsrl-errno"
"""Trailing metadata with the errno of an OSError that has one."""
MAX_TEXT = 2000
"""Longest error text on the wire, in characters: it travels in an HTTP/2 header, whose size is limited."""


class TransferRefused(ParameterError):
    """A transfer is over the size limit or malformed; the text says which rule it breaks."""


class ServiceUnavailable(ParameterError, ConnectionError):
    """The service did not answer before the deadline, or this end was closed. A change may or may not have happened."""


class ServiceRefused(ParameterError):
    """The service answers but refuses the call: the token is not this experiment's, or the call is unknown."""


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
"""Kinds of error by name. Subclasses come before their base classes."""

_FINAL_CODES = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""Status codes of gRPC itself that another attempt cannot change."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of a call because of an error, as gRPC needs it."""

    kind: str
    """A key of ``_KINDS``, or ``bug``."""
    code: grpc.StatusCode
    text: str
    metadata: tuple[tuple[str, str], ...]
    expected: bool
    """True for errors that a store may raise; any other error is a bug."""


def failure_of(error: Exception) -> Failure:
    """Return how a call ends that raised this error."""
    for kind, (error_type, code) in _KINDS.items():
        if isinstance(error, error_type):
            metadata, text = [(KIND_KEY, kind)], str(error)
            if isinstance(error, OSError) and error.errno is not None:
                metadata.append((ERRNO_KEY, str(error.errno)))
                # The client's OSError adds this prefix to its text again.
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
    """Return the error that ended a call; None if the call did not reach the service and may be repeated."""
    call = cast("grpc.Call", failed)  # a call's RpcError is also the call
    metadata = {key: value for key, value in call.trailing_metadata() or () if isinstance(value, str)}
    kind = metadata.get(KIND_KEY, "")
    if kind in _KINDS:
        error_type, _ = _KINDS[kind]
        if ERRNO_KEY in metadata:
            return OSError(int(metadata[ERRNO_KEY]), call.details() or os.strerror(int(metadata[ERRNO_KEY])))
        return error_type(call.details())
    return ServiceRefused(describe(failed)) if call.code() in _FINAL_CODES else None
