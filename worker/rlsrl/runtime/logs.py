"""Structured logs: one JSON object per line, with an event name, its keys, and the experiment, role and index."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import structlog

REDACTED = "[redacted]"
_SECRET_MARKS = ("token", "secret", "password", "authorization")


def configure_logging(*, experiment: str, role: str, index: int, path: Path | None = None) -> None:
    """Append this process's logs, of structlog and of the standard library, to ``path``, or write them to stdout.

    Each line has ``timestamp`` (UTC, ISO 8601), ``level``, ``logger``, ``event``, ``experiment``, ``role``, ``index``,
    the event's own keys and, if the event has an exception, ``exception``. A further call replaces the configuration.

    Raises:
        OSError: the file cannot be opened.
    """
    identity = {"experiment": experiment, "role": role, "index": index}
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _bind(identity),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            redact,
            structlog.processors.JSONRenderer(default=str),
        ],
    )
    handler = logging.StreamHandler(sys.stdout) if path is None else logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(formatter)
    _replace_root_handlers(handler)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Return the event with ``REDACTED`` for the value of each key that names a secret, at any depth.

    This is a structlog processor.
    """
    return {key: REDACTED if _is_secret(key) else _redacted(value) for key, value in event.items()}


def _redacted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: REDACTED if _is_secret(key) else _redacted(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(inner) for inner in value]
    return value


def _is_secret(key: Any) -> bool:
    return isinstance(key, str) and any(mark in key.lower() for mark in _SECRET_MARKS)


def _bind(identity: Mapping[str, Any]) -> structlog.typing.Processor:
    """Return a processor that adds ``identity`` to each event. Context variables would not reach other threads."""

    def bind(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {**event, **identity}

    return bind


def _replace_root_handlers(handler: logging.Handler) -> None:
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
