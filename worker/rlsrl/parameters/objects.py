"""Objects under one prefix of an S3-compatible store: reads, writes, conditional writes, and clear errors.

This is the only importer of obstore. Every request has a deadline and a bounded number of retries. Errors never quote
the store's texts, which contain access keys and signed requests.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotModifiedError, PreconditionError
from obstore.store import S3Store

from rlsrl.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from obstore.store import ObjectStore, S3Config

PART_BYTES = 16 * 1024 * 1024
"""Larger objects are sent in parts of this size, several at a time."""

_CONNECT_SECONDS = 5.0
_REQUEST_FACTOR = 20
"""A whole request, body included, may take this many times ``answer_seconds``."""
_MAX_RETRIES = 5
_MAX_BACK_OFF_SECONDS = 1.0
_PARTS_AT_ONCE = 4
_CREDENTIALS = (
    ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI",),
)
"""Environment variables that give credentials together: access key, Kubernetes service account, container role."""


class StoreRefused(OSError, ConfigurationError):
    """The store refused the request: credentials, permissions, or a missing bucket. A retry cannot help."""


class StoreUnreachable(ConnectionError):
    """The store gave no answer in time, or only server errors. The request may have been carried out."""


class Conflict(Exception):
    """A conditional write's condition does not hold: another writer came first.

    The other writer may be an earlier attempt of the same write whose answer was lost.
    """


@dataclass(frozen=True, kw_only=True)
class Found:
    """An object, as it was read."""

    data: bytes
    etag: str
    """Opaque; changes with every write of the object."""


@dataclass(frozen=True, kw_only=True)
class Listed:
    """An object in a listing."""

    key: str
    size: int
    last_modified: datetime


class Objects:
    """Objects by key under a root. Any thread may call any method.

    If the store fails, each method raises StoreRefused or StoreUnreachable with a text that names the store.
    """

    def __init__(self, store: ObjectStore, *, root: str, name: str) -> None:
        """``root`` is the prefix of every key; error texts use ``name`` for the store."""
        self._store = store
        self._root = f"{root.strip('/')}/".removeprefix("/")
        self.name = name

    @classmethod
    def s3(
        cls,
        url: str,
        *,
        endpoint: str | None,
        region: str | None,
        answer_seconds: float,
    ) -> Self:
        """Return the objects in an S3 bucket. This does not connect yet.

        Args:
            url: ``s3://bucket`` or ``s3://bucket/prefix``.
            endpoint: The store's URL; None for AWS_ENDPOINT_URL if it is set, else for Amazon's.
            region: None for AWS_REGION if it is set, else for us-east-1.
            answer_seconds: How long one request may wait for its answer, and how long failed requests are retried.

        Raises:
            ConfigurationError: the environment has no credentials.
        """
        if not any(all(os.environ.get(name) for name in names) for names in _CREDENTIALS):
            raise ConfigurationError(
                f"no credentials for {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment "
                "(or what a Kubernetes service account sets: AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN)"
            )
        bucket, _, root = url.removeprefix("s3://").partition("/")
        config: S3Config = {}
        if endpoint is not None:
            config["endpoint"] = endpoint
        if region is not None:
            config["region"] = region
        store = S3Store(
            bucket,
            config=config,
            client_options={
                "allow_http": (endpoint or "").startswith("http://"),
                "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, answer_seconds)),
                "read_timeout": timedelta(seconds=answer_seconds),
                "timeout": timedelta(seconds=_REQUEST_FACTOR * answer_seconds),
            },
            retry_config={
                "max_retries": _MAX_RETRIES,
                "retry_timeout": timedelta(seconds=answer_seconds),
                "backoff": {"max_backoff": timedelta(seconds=_MAX_BACK_OFF_SECONDS)},
            },
        )
        return cls(store, root=root, name=url if endpoint is None else f"{url} at {endpoint}")

    def read(self, key: str, limit: int | None = None) -> bytes:
        """Return the object's bytes, at most the first ``limit`` (1 or more).

        Raises:
            FileNotFoundError: the object does not exist.
        """
        with self._translated_errors():
            if limit is not None:
                return bytes(obstore.get_range(self._store, self._root + key, start=0, end=limit))
            return bytes(obstore.get(self._store, self._root + key).bytes())

    def read_changed(self, key: str, etag: str | None) -> Found | None:
        """Return the object; None if it still has this ``etag``.

        Raises:
            FileNotFoundError: the object does not exist.
        """
        with self._translated_errors():
            try:
                result = obstore.get(
                    self._store, self._root + key, options={} if etag is None else {"if_none_match": etag}
                )
                return Found(data=bytes(result.bytes()), etag=self._etag(result.meta["e_tag"]))
            except NotModifiedError:
                return None

    def write(self, key: str, data: bytes) -> None:
        """Create or replace the object as a whole, in parts if it is large. It is durable after the return."""
        with self._translated_errors():
            obstore.put(self._store, self._root + key, data, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE)

    def replace(self, key: str, data: bytes, *, etag: str | None) -> str:
        """Replace the object if it still has this ``etag``; with None, create the object if it does not exist.

        Returns:
            The new etag.

        Raises:
            Conflict: the object has another etag, or exists.
        """
        with self._translated_errors():
            mode: Any = "create" if etag is None else {"e_tag": etag}
            result = obstore.put(self._store, self._root + key, data, mode=mode)
            return self._etag(result["e_tag"])

    def remove(self, keys: Sequence[str]) -> None:
        """Remove the objects. Missing ones are ignored."""
        with self._translated_errors():
            obstore.delete(self._store, [self._root + key for key in keys])

    def listed(self, folder: str) -> list[Listed]:
        """Return the objects under the folder, at any depth."""
        with self._translated_errors():
            chunks = obstore.list(self._store, self._root + folder)
            return [
                Listed(
                    key=meta["path"].removeprefix(self._root), size=meta["size"], last_modified=meta["last_modified"]
                )
                for chunk in chunks
                for meta in chunk
            ]

    def folders(self) -> list[str]:
        """Return the first parts of the keys that have several parts."""
        with self._translated_errors():
            found = obstore.list_with_delimiter(self._store, self._root or None)
            return [prefix.removeprefix(self._root) for prefix in found["common_prefixes"]]

    def require_conditional_writes(self) -> None:
        """Check that the store obeys the conditions of conditional writes. Some stores ignore them.

        Raises:
            StoreRefused: the store ignores them: two writers would overwrite each other's changes.
        """
        key = f"condition-{secrets.token_hex(8)}"
        etag = self.replace(key, b"1", etag=None)
        self.replace(key, b"2", etag=etag)
        kept = 0
        for outdated in (None, etag):
            try:
                self.replace(key, b"3", etag=outdated)
            except Conflict:
                kept += 1
        self.remove([key])
        if kept < 2:
            raise StoreRefused(
                f"object store {self.name} ignores the conditions of conditional writes (If-None-Match, If-Match), "
                "which keep a trainer that was replaced from writing: use a store that has them"
            )

    def _etag(self, etag: str | None) -> str:
        if etag is None:
            raise StoreRefused(f"object store {self.name} gives no ETag, which conditional writes need")
        return etag

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Raise the store's errors as ours. Tracebacks leave out the cause, which contains access keys."""
        try:
            yield
        except (StoreRefused, Conflict):
            raise
        except (BaseError, OSError, ValueError) as error:
            raise explain(error, self.name) from None


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_SYSTEM_ERROR = re.compile(r'\b(?:message|error): "([^"]{1,200})"')
_ADVICE = {
    "NoSuchBucket": "the bucket does not exist",
    "InvalidBucketName": "the bucket's name is invalid",
    "PermanentRedirect": "the bucket is in another region",
    "AuthorizationHeaderMalformed": "the bucket is in another region, or the access key is malformed",
    "NotImplemented": "it lacks a feature that is needed, perhaps conditional writes",
}


def explain(error: Exception, name: str) -> Exception:
    """Return our error for an error of obstore: FileNotFoundError, Conflict, StoreRefused or StoreUnreachable.

    Of the store's answer, the text quotes only the status and the error code. ``name`` is the store's.
    """
    text = str(error)
    status, code = _match(_STATUS, text), _match(_CODE, text)
    if code in (None, "NoSuchKey", "PreconditionFailed", "ConditionalRequestConflict"):
        if isinstance(error, AlreadyExistsError | PreconditionError) or status in ("409", "412"):
            return Conflict(name)
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(f"object store {name} has no such object")
    if status is None and not isinstance(error, BaseError):
        return StoreRefused(f"object store {name} cannot be used: {text.partition(chr(10))[0]}")
    if status is None:
        return StoreUnreachable(f"object store {name} cannot be reached: {_transport_problem(text)}")
    answer = f"{status} {code}" if code is not None else status
    if (status[0] == "5" and status != "501") or status in ("408", "429"):
        return StoreUnreachable(f"object store {name} fails: it answers {answer}")
    advice = _ADVICE.get(code or "")
    if advice is None:
        advice = "check the credentials in the environment (AWS_ACCESS_KEY_ID and the others) and what they allow"
    return StoreRefused(f"object store {name} refuses: it answers {answer}; {advice}")


def _transport_problem(text: str) -> str:
    if "kind: Timeout" in text or "TimedOut" in text:
        return "no answer in time"
    return (_match(_SYSTEM_ERROR, text) or "the connection failed").partition(":")[0]


def _match(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return found[1] if found else None
