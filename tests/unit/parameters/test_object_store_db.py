from __future__ import annotations

import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError
from obstore.store import MemoryStore
from structlog.testing import capture_logs

from rlsrl.data.version import Version
from rlsrl.parameters.index import Index, new_key
from rlsrl.parameters.object_store import ObjectStoreParameterDB
from rlsrl.parameters.objects import Conflict, Found, Objects, StoreRefused, StoreUnreachable, explain
from rlsrl.parameters.protocols import Corrupt
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.parameter_dbs import POLICY, push_steps, stored


def answer(status: str, code: str | None) -> str:
    """Return obstore's error for a store's answer."""
    body = "" if code is None else f"<Error><Code>{code}</Code><AWSAccessKeyId>secret</AWSAccessKeyId></Error>"
    return f"Error performing PUT http://host/key in 1ms - Server returned non-2xx status code: {status}: {body}"


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (FileNotFoundError(answer("404 Not Found", "NoSuchKey")), FileNotFoundError, "no such object"),
        (FileNotFoundError("No data in memory found"), FileNotFoundError, "no such object"),
        (FileNotFoundError(answer("404 Not Found", "NoSuchBucket")), StoreRefused, "the bucket does not exist"),
        (PreconditionError(answer("404 Not Found", "NoSuchBucket")), StoreRefused, "the bucket does not exist"),
        (PreconditionError(answer("404 Not Found", "NoSuchKey")), Conflict, "store"),
        (PreconditionError(answer("412 Precondition Failed", "PreconditionFailed")), Conflict, "store"),
        (AlreadyExistsError("already exists"), Conflict, "store"),
        (GenericError(answer("409 Conflict", "ConditionalRequestConflict")), Conflict, "store"),
        (PermissionDeniedError(answer("403 Forbidden", "InvalidAccessKeyId")), StoreRefused, "AWS_ACCESS_KEY_ID"),
        (GenericError(answer("301 Moved Permanently", "PermanentRedirect")), StoreRefused, "another region"),
        (GenericError(answer("501 Not Implemented", "NotImplemented")), StoreRefused, "lacks a feature that is needed"),
        (GenericError(answer("503 Slow Down", "SlowDown")), StoreUnreachable, "it answers 503 SlowDown"),
        (GenericError(answer("429 Too Many Requests", None)), StoreUnreachable, "it answers 429"),
        (GenericError('kind: Connect, error: "dns error: unknown name"'), StoreUnreachable, "reached: dns error"),
        (GenericError("kind: Timeout"), StoreUnreachable, "no answer in time"),
        (GenericError("something else"), StoreUnreachable, "the connection failed"),
        (ValueError("invalid configuration\nand more"), StoreRefused, "cannot be used: invalid configuration"),
    ],
)
def test_a_stores_answer_becomes_an_error_in_our_own_words(error: Exception, kind: type[Exception], says: str) -> None:
    told = explain(error, "store")
    assert type(told) is kind
    assert says in str(told)
    assert "secret" not in str(told)
    assert len(str(told).splitlines()) == 1


def test_a_stores_refusal_is_a_configuration_error_and_an_os_error() -> None:
    """A worker with this error at its start exits for good; a checkpoint with this error does not end the run."""
    assert issubclass(StoreRefused, ConfigurationError)
    assert issubclass(StoreRefused, OSError)
    assert not issubclass(StoreUnreachable, ConfigurationError)


class Torn(Objects):
    """A store whose first answer consists of halves of two indices."""

    torn = 0

    def read_changed(self, key: str, etag: str | None) -> Found | None:
        found = super().read_changed(key, etag)
        if found is None or self.torn == 0:
            return found
        self.torn -= 1
        return Found(data=found.data[: len(found.data) // 2], etag=found.etag)


def test_an_index_counts_as_damaged_only_after_two_reads() -> None:
    store = MemoryStore()
    db = ObjectStoreParameterDB(Objects(store, root="", name="memory"))
    push_steps(db, 1)
    db.tag(POLICY, "latest", "best")
    torn = Torn(store, root="", name="torn")
    for times, tags in ((1, ("best",)), (2, ())):
        torn.torn = times
        with capture_logs() as logs:
            (info,) = ObjectStoreParameterDB(torn).versions(POLICY)
        assert info.tags == tags
        assert bool(logs) == (times == 2)


def test_annotations_of_any_length_are_kept_and_long_ones_are_outside_the_index() -> None:
    objects = Objects(MemoryStore(), root="", name="memory")
    db = ObjectStoreParameterDB(objects)
    push_steps(db, 1)
    metadata = {"curve": [0.5] * 100_000, "text": "ü"}
    db.annotate(POLICY, Version(1, 1), metadata)
    assert ObjectStoreParameterDB(objects).versions(POLICY)[0].metadata == metadata
    assert len(objects.read(f"{POLICY}/index.json")) < 10_000
    db.annotate(POLICY, Version(1, 1), {"curve": None})
    assert ObjectStoreParameterDB(objects).versions(POLICY)[0].metadata == {"curve": None, "text": "ü"}
    assert sorted(each.key for each in objects.listed(POLICY) if "json" in each.key) == [f"{POLICY}/index.json"]


def test_a_bucket_may_contain_other_objects() -> None:
    store = MemoryStore()
    shared = Objects(store, root="team", name="memory")
    shared.write("README", b"")
    shared.write("notes/monday.txt", b"")
    shared.write("run/notes/monday.txt", b"")
    db = ObjectStoreParameterDB(Objects(store, root="team/run", name="memory"))
    push_steps(db, 1)
    shared.write(f"run/{POLICY}/versions/notes.txt", b"")
    assert (db.policies(), stored(db)) == ([POLICY], ["1.1"])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"value": {"format": "other"}, "crc32": 1}'])
def test_an_invalid_index_is_corrupt(content: bytes) -> None:
    with pytest.raises(Corrupt, match="the-source"):
        Index.decode(content, "the-source")


def test_keys_are_unique_and_contain_their_path() -> None:
    paths = ("versions/000001-000000000002.safetensors", "versions/000001-000000000002.json")
    for path in paths:
        first, second = new_key(path), new_key(path)
        assert first != second
        assert first.startswith("versions/000001-000000000002.")
