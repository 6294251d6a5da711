"""The parameter database while its object store fails: a real S3 server is killed, frozen or unreachable."""

from __future__ import annotations

import re
import secrets
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from obstore.store import MemoryStore, S3Store
from structlog.testing import capture_logs

from rlsrl.data.version import Version
from rlsrl.parameters.index import Index
from rlsrl.parameters.object_store import ObjectStoreParameterDB
from rlsrl.parameters.objects import Objects, StoreRefused, StoreUnreachable
from rlsrl.parameters.protocols import Corrupt, Parameters, StaleAttempt
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.http_proxy import FaultyProxy, Request
from rlsrl.testing.parameter_dbs import POLICY, got, make_parameters, make_state, push_steps, stored
from rlsrl.testing.s3_server import ACCESS_KEY, CREDENTIALS, REGION, SECRET_KEY, S3Server

LONG = 60.0
"""Seconds that something may take that will happen."""
IMPATIENT = 0.05
"""Seconds for an answer where none comes."""


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def server(s3_server_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """This module's server; a test that kills or freezes the server restores it."""
    with S3Server(s3_server_binary, tmp_path_factory.mktemp("s3-faults") / "buckets") as server:
        yield server


@pytest.fixture
def bucket(server: S3Server) -> str:
    """Return an empty bucket."""
    name = f"bucket-{secrets.token_hex(8)}"
    server.create_bucket(name)
    return name


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.endpoint) as proxy:
        yield proxy


def objects(endpoint: str, bucket: str, *, answer_seconds: float = LONG) -> Objects:
    return Objects.s3(f"s3://{bucket}/run", endpoint=endpoint, region=REGION, answer_seconds=answer_seconds)


def open_db(endpoint: str, bucket: str, *, answer_seconds: float = LONG, **options: Any) -> ObjectStoreParameterDB:
    return ObjectStoreParameterDB(objects(endpoint, bucket, answer_seconds=answer_seconds), **options)


def without_repeats(endpoint: str, bucket: str) -> Objects:
    """Return objects whose failed requests are not repeated."""
    store = S3Store(
        bucket,
        config={"endpoint": endpoint, "region": REGION},
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    return Objects(store, root="run", name="without repeats")


def is_commit(request: Request) -> bool:
    return request.method == "PUT" and request.path.endswith("/index.json")


# -- each fault has one clear error ------------------------------------------------------------------------------------


def every_call(db: ObjectStoreParameterDB) -> list[Callable[[], object]]:
    return [
        db.policies,
        lambda: db.get(POLICY),
        lambda: db.versions(POLICY),
        lambda: db.load_state(POLICY),
        lambda: push_steps(db, 9),
        lambda: db.save_state(POLICY, make_state(Version(1, 1))),
        lambda: db.tag(POLICY, "latest", "best"),
        lambda: db.annotate(POLICY, Version(1, 1), {"a": 1}),
        lambda: db.prune(POLICY, keep_last=1),
    ]


def errors_and_logs(call: Callable[[], object], kind: type[OSError]) -> str:
    """Return the text of the call's error. Check that its traceback and the logs contain no secrets."""
    with capture_logs() as logs, pytest.raises(kind) as caught:
        call()
    output = "".join(traceback.format_exception(caught.value)) + repr(logs)
    for hidden in (ACCESS_KEY, SECRET_KEY, "another-key", "AWS4-HMAC"):
        assert hidden not in output
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


def test_an_unreachable_store_is_named(server: S3Server, bucket: str) -> None:
    server.kill()
    try:
        db = open_db(server.endpoint, bucket, answer_seconds=IMPATIENT)
        for call in every_call(db):
            text = errors_and_logs(call, StoreUnreachable)
            assert text == (
                f"object store s3://{bucket}/run at {server.endpoint} cannot be reached: Connection refused"
            )
    finally:
        server.restart()
    patient = open_db(server.endpoint, bucket)
    push_steps(patient, 1)
    assert stored(patient) == ["1.1"]


def test_a_call_to_a_frozen_store_times_out_and_later_calls_succeed(server: S3Server, bucket: str) -> None:
    db = open_db(server.endpoint, bucket, answer_seconds=IMPATIENT)
    push_steps(open_db(server.endpoint, bucket), 1)
    server.freeze()
    try:
        for call in every_call(db):
            assert errors_and_logs(call, StoreUnreachable).endswith("cannot be reached: no answer in time")
    finally:
        server.thaw()
    patient = open_db(server.endpoint, bucket)
    push_steps(patient, 9)
    push_steps(patient, 10)
    assert got(patient).version == Version(1, 10)


@pytest.mark.parametrize(
    ("key", "secret", "code"),
    [(ACCESS_KEY, "wrong", "SignatureDoesNotMatch"), ("another-key", SECRET_KEY, "XAdminUserNotFound")],
    ids=["secret", "access-key"],
)
def test_wrong_credentials_are_refused_and_do_not_appear_in_messages(
    server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, key: str, secret: str, code: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    db = open_db(server.endpoint, bucket)
    for call in every_call(db):
        text = errors_and_logs(call, StoreRefused)
        assert code in text
        assert "check the credentials in the environment (AWS_ACCESS_KEY_ID" in text
        assert f"s3://{bucket}/run at {server.endpoint}" in text


def test_a_missing_bucket_is_named(server: S3Server) -> None:
    db = open_db(server.endpoint, "nobodys-bucket")
    for call in every_call(db):
        text = errors_and_logs(call, StoreRefused)
        assert "s3://nobodys-bucket/run" in text
        assert "404 NoSuchBucket; the bucket does not exist" in text


def test_without_credentials_no_request_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError, match=r"no credentials for s3://bucket/run: set AWS_ACCESS_KEY_ID"):
        objects("http://127.0.0.1:1", "bucket")


class Careless(Objects):
    """A store that ignores the conditions of writes, as some stores do."""

    def replace(self, key: str, data: bytes, *, etag: str | None) -> str:
        self.write(key, data)
        return f"etag-{len(data)}"


def test_a_store_that_ignores_conditions_is_refused() -> None:
    careless = Careless(MemoryStore(), root="run", name="careless")
    with pytest.raises(StoreRefused, match="careless ignores the conditions of conditional writes"):
        push_steps(ObjectStoreParameterDB(careless), 1)
    assert careless.listed("") == []


# -- an outage at every single request ---------------------------------------------------------------------------------

OLD, NEW = Version(1, 2), Version(2, 3)
STEPS: list[tuple[Callable[[ObjectStoreParameterDB], object], Callable[[ObjectStoreParameterDB], bool]]] = [
    (
        lambda db: db.push(
            POLICY,
            make_parameters(NEW),
            tags=["best", "milestone"],
            metadata={"env_steps": 3},
            state=make_state(NEW),
        ),
        lambda db: got(db, "best").version == got(db, "milestone").version == got(db).version == resumable(db) == NEW,
    ),
    (lambda db: db.save_state(POLICY, make_state(NEW)), lambda db: resumable(db) == NEW),
    (
        lambda db: db.annotate(POLICY, NEW, {"a": 1, "b": 2}),
        lambda db: db.versions(POLICY)[-1].metadata == {"env_steps": 3, "a": 1, "b": 2},
    ),
    (lambda db: db.tag(POLICY, NEW, "extra"), lambda db: got(db, "extra").version == NEW),
    (lambda db: db.prune(POLICY, keep_last=1), lambda db: stored(db) == [str(NEW)]),
]
"""What a writer does, and how one sees that it was done."""


def resumable(db: ObjectStoreParameterDB) -> Version | None:
    state = db.load_state(POLICY)
    return None if state is None else state.version


def prepare(db: ObjectStoreParameterDB) -> None:
    """Store the previous gang's two versions, both with states, the older one tagged."""
    for version in (Version(1, 1), OLD):
        db.push(POLICY, make_parameters(version), tags=["best"] if version.step == 1 else [])
        db.save_state(POLICY, make_state(version))
        db.annotate(POLICY, version, {"note": "old"})


def check_whole(db: ObjectStoreParameterDB) -> None:
    for info in db.versions(POLICY):
        np.testing.assert_array_equal(got(db, info.version).vector, make_parameters(info.version).vector)
        if info.has_state:
            assert db.load_state(POLICY, info.version) is not None
        assert all(got(db, tag).version == info.version for tag in info.tags)
    assert got(db).version in (OLD, NEW)
    assert resumable(db) == got(db).version, "training can resume from the stored version"


@contextmanager
def outage(proxy: FaultyProxy, kind: str, number: int) -> Iterator[None]:
    """From the request of that number on, drop requests or their answers."""
    proxy.reset()
    if kind == "before":
        proxy.before = lambda request: request.number < number
    else:
        proxy.after = lambda request: request.number < number
        proxy.before = lambda request: request.number <= number
    yield
    proxy.reset()


@pytest.mark.parametrize("kind", ["before", "after"])
def test_an_outage_at_any_request_leaves_whole_versions_and_the_next_writer_continues(
    server: S3Server, proxy: FaultyProxy, tmp_path: Path, kind: str
) -> None:
    """Drop each request, or each answer, of a push with tags, a state, an annotation, a tag and a prune."""
    num_outages = 0
    for number in range(1000):
        bucket = f"{kind}-{number}"
        folder = server.create_bucket(bucket) / "run"
        direct = open_db(server.endpoint, bucket)
        prepare(direct)
        num_done = 0
        with outage(proxy, kind, number), capture_logs():
            db = ObjectStoreParameterDB(without_repeats(proxy.endpoint, bucket))
            try:
                for take, _ in STEPS:
                    take(db)
                    num_done += 1
            except StoreUnreachable:
                num_outages += 1
            reached = any(request.number >= number for request in proxy.requests)
        check_whole(direct)
        assert all(was_done(direct) for _, was_done in STEPS[:num_done]), (number, num_done)
        for take, was_done in STEPS:
            take(direct)
            assert was_done(direct), number
        push_steps(direct, 4, attempt=2)
        assert direct.prune(POLICY, keep_last=1) == []
        direct.tag(POLICY, "latest", "best", "milestone", "extra")
        direct.save_state(POLICY, make_state(Version(2, 4)))
        assert direct.prune(POLICY, keep_last=1) == [NEW]
        index = Index.decode((folder / POLICY / "index.json").read_bytes(), "index")
        there = {path.relative_to(folder / POLICY).as_posix() for path in (folder / POLICY).rglob("*.*")}
        assert there == {"index.json", *index.keys}, "no unfinished object is left"
        if not reached:
            assert num_done == len(STEPS)
            break
    assert num_outages > 20


def test_a_lost_answer_does_not_repeat_a_change(server: S3Server, bucket: str, proxy: FaultyProxy) -> None:
    """The first replacement of the index happens, and its answer is lost: the writer detects that it happened."""
    lost = threading.Event()

    def lose_once(request: Request) -> bool:
        if is_commit(request) and not lost.is_set():
            lost.set()
            return False
        return True

    db = open_db(proxy.endpoint, bucket)
    proxy.after = lose_once
    push_steps(db, 1)
    assert lost.is_set()
    assert stored(open_db(server.endpoint, bucket)) == ["1.1"]
    assert len([request for request in proxy.requests if "/versions/" in request.path]) == 1


def test_a_killed_and_restarted_server_keeps_every_acknowledged_write(server: S3Server, bucket: str) -> None:
    """A writer pushes all the time and repeats failed pushes."""
    acknowledged: list[int] = []
    ten_more = threading.Semaphore(0)
    stop = threading.Event()

    def write() -> None:
        db = open_db(server.endpoint, bucket, answer_seconds=IMPATIENT)
        step = 0
        while not stop.is_set():
            step += 1
            while True:
                try:
                    db.push(POLICY, make_parameters(Version(1, step), size=20_000), tags=[f"step-{step}"])
                    break
                except StoreUnreachable:
                    continue
            acknowledged.append(step)
            if step % 10 == 0:
                ten_more.release()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        for _ in range(4):
            assert ten_more.acquire(timeout=LONG)
            server.kill()
            server.restart()
        assert ten_more.acquire(timeout=LONG)
        stop.set()
        writing.result(LONG)
    db = open_db(server.endpoint, bucket)
    assert stored(db) == [f"1.{step}" for step in acknowledged]
    for step in acknowledged:
        assert (got(db, f"step-{step}").vector == step).all()


# -- concurrent changes ------------------------------------------------------------------------------------------------


@contextmanager
def held(
    proxy: FaultyProxy, call: Callable[[], object], *, at: Callable[[Request], bool] = is_commit
) -> Iterator[Callable[[], object]]:
    """Hold the call, in a thread, at the request while the body runs. Yield a function that waits for its result."""
    arrived, go_on = threading.Event(), threading.Event()

    def hold(request: Request) -> bool:
        if at(request) and not arrived.is_set():
            arrived.set()
            assert go_on.wait(LONG)
        return True

    proxy.before = hold
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call)
        assert arrived.wait(LONG)
        released = False

        def result() -> object:
            nonlocal released
            released = True
            go_on.set()
            return running.result(LONG)

        try:
            yield result
        finally:
            go_on.set()
        assert released


def test_a_gang_that_slept_before_its_write_writes_nothing_after_its_successor(
    server: S3Server, bucket: str, proxy: FaultyProxy
) -> None:
    old, new = open_db(proxy.endpoint, bucket), open_db(server.endpoint, bucket)
    push_steps(new, 1, attempt=1)
    calls: list[Callable[[], object]] = [
        lambda: old.push(POLICY, make_parameters(Version(1, 2)), tags=["best"]),
        lambda: old.save_state(POLICY, make_state(Version(2, 1))),
    ]
    for attempt, call in enumerate(calls, 2):
        old.policies()
        with held(proxy, call) as result:
            push_steps(new, 1, attempt=attempt)
            before = new.versions(POLICY)
            with pytest.raises(StaleAttempt, match=f"attempt {attempt}"):
                result()
        assert new.versions(POLICY) == before
        proxy.reset()
        push_steps(old, 2, attempt=attempt)


def test_two_concurrent_changes_both_happen_and_upload_nothing_twice(
    server: S3Server, bucket: str, proxy: FaultyProxy
) -> None:
    db, other = open_db(proxy.endpoint, bucket), open_db(server.endpoint, bucket)
    push_steps(other, 1)
    with held(proxy, lambda: push_steps(db, 2)) as result:
        other.annotate(POLICY, Version(1, 1), {"return_mean": 475.0})
        other.tag(POLICY, Version(1, 1), "best")
        result()
    first, second = other.versions(POLICY)
    assert (first.metadata, first.tags, second.version) == ({"return_mean": 475.0}, ("best",), Version(1, 2))
    assert len([request for request in proxy.requests if "/versions/" in request.path]) == 1


def test_an_upload_that_a_concurrent_change_removed_is_repeated(
    server: S3Server, bucket: str, proxy: FaultyProxy
) -> None:
    db, other = open_db(proxy.endpoint, bucket), open_db(server.endpoint, bucket)
    push_steps(other, 1, 2)
    with held(proxy, lambda: push_steps(db, 3)) as result:
        assert other.prune(POLICY, keep_last=1) == [Version(1, 1)]
        result()
    assert stored(other) == ["1.2", "1.3"]
    assert got(other).version == Version(1, 3)
    assert len([request for request in proxy.requests if "/versions/" in request.path]) == 2


@pytest.mark.parametrize("request_of", ["list-type=2", "?delete"])
def test_a_push_survives_a_concurrent_removal(
    server: S3Server, bucket: str, proxy: FaultyProxy, request_of: str
) -> None:
    db, other = open_db(proxy.endpoint, bucket), open_db(server.endpoint, bucket)
    push_steps(db, 1, 2)
    with held(proxy, lambda: db.prune(POLICY, keep_last=1), at=lambda request: request_of in request.path) as result:
        push_steps(other, 3)
        assert result() == ([Version(1, 1), Version(1, 2)] if request_of == "list-type=2" else [Version(1, 1)])
    expected = ["1.3"] if request_of == "list-type=2" else ["1.2", "1.3"]
    assert stored(other) == expected
    for version in expected:
        assert (got(open_db(server.endpoint, bucket), version).vector == int(version[2:])).all()


def test_a_change_that_always_loses_the_race_fails(server: S3Server, bucket: str, proxy: FaultyProxy) -> None:
    other = open_db(server.endpoint, bucket)
    push_steps(other, 1)

    def come_first(request: Request) -> bool:
        if is_commit(request):
            other.annotate(POLICY, Version(1, 1), {"number": request.number})
        return True

    db = open_db(proxy.endpoint, bucket, change_seconds=0.0)
    proxy.before = come_first
    with pytest.raises(TimeoutError, match="others have been changing policy 'default'"):
        push_steps(db, 2)
    assert stored(other) == ["1.1"]


WRITER = """
import sys
from rlsrl.data.version import Version
from rlsrl.parameters.object_store import ObjectStoreParameterDB
from rlsrl.parameters.objects import Objects
from rlsrl.parameters.protocols import StaleAttempt
from rlsrl.testing.parameter_dbs import POLICY, make_parameters, make_state

url, endpoint, region = sys.argv[1:]
db = ObjectStoreParameterDB(Objects.s3(url, endpoint=endpoint, region=region, answer_seconds=60.0))
step = 0
try:
    while True:
        step += 1
        db.push(POLICY, make_parameters(Version(1, step), size=20_000), tags=["newest"])
        print(step, flush=True)
        db.save_state(POLICY, make_state(Version(1, step)))
except StaleAttempt as error:
    print(error)
"""


@pytest.mark.parametrize("frozen", [False, True], ids=["racing", "frozen"])
def test_after_a_push_of_a_new_gang_the_old_process_writes_nothing(server: S3Server, bucket: str, frozen: bool) -> None:
    """The old process pushes as fast as it can, or is frozen during a push and continues after its replacement."""
    command = [sys.executable, "-c", WRITER, f"s3://{bucket}/run", server.endpoint, REGION]
    db = open_db(server.endpoint, bucket)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as old:
        assert old.stdout is not None
        acknowledged = [int(old.stdout.readline()) for _ in range(5)]
        if frozen:
            old.send_signal(signal.SIGSTOP)
        db.push(POLICY, make_parameters(Version(2, 1)), tags=["newest"])
        before = db.versions(POLICY)
        old.send_signal(signal.SIGCONT)
        *more, last_words = old.stdout.read().splitlines()
    assert old.returncode == 0
    assert "comes too late: attempt 2 has pushed" in last_words
    assert db.versions(POLICY) == before
    assert got(db, "newest").version == Version(2, 1)
    assert [str(Version(1, step)) for step in [*acknowledged, *map(int, more)]] == stored(db)[:-1]


# -- stored objects ----------------------------------------------------------------------------------------------------


def test_large_vectors_are_sent_in_parts(bucket: str, proxy: FaultyProxy) -> None:
    vector = np.random.default_rng(0).standard_normal(10_000_000, dtype=np.float32)
    db = open_db(proxy.endpoint, bucket)
    db.push(POLICY, Parameters(version=Version(1, 1), vector=vector, layout="layout"))
    parts = {match[1] for each in proxy.requests if (match := re.search(r"partNumber=(\d+)", each.path))}
    assert len(parts) == 3
    assert got(db).vector.tobytes() == vector.tobytes()


def test_a_repeated_read_costs_one_request(bucket: str, proxy: FaultyProxy) -> None:
    db = open_db(proxy.endpoint, bucket)
    push_steps(db, 1, 2, 3)
    infos = db.versions(POLICY)
    proxy.reset()
    assert db.versions(POLICY) == infos
    assert [(each.method, each.path) for each in proxy.requests] == [("GET", f"/{bucket}/run/{POLICY}/index.json")]


def test_a_damaged_index_is_rebuilt_from_the_objects(server: S3Server, bucket: str, tmp_path: Path) -> None:
    """Tags and annotations are lost, versions and states are not. The next change writes a new index."""
    db = open_db(server.endpoint, bucket)
    push_steps(db, 1, 2, attempt=3)
    db.save_state(POLICY, make_state(Version(3, 2)))
    db.tag(POLICY, "latest", "best")
    index = server.folder(bucket) / "run" / POLICY / "index.json"
    damaged = bytearray(index.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    index.write_bytes(damaged)
    fresh = open_db(server.endpoint, bucket)
    with capture_logs() as logs:
        assert stored(fresh) == ["3.1", "3.2"]
        assert resumable(fresh) == Version(3, 2)
        assert got(fresh).version == Version(3, 2)
        with pytest.raises(StaleAttempt, match="attempt 3"):
            push_steps(fresh, 1, attempt=2)
    assert [(entry["event"], entry["store"]) for entry in logs] == [
        ("parameters_index_corrupt", objects_name(server, bucket))
    ]
    push_steps(fresh, 3, attempt=3)
    assert stored(open_db(server.endpoint, bucket)) == ["3.1", "3.2", "3.3"]


def objects_name(server: S3Server, bucket: str) -> str:
    return f"s3://{bucket}/run at {server.endpoint}"


def test_a_version_whose_object_is_missing_is_damaged(server: S3Server, bucket: str) -> None:
    db = open_db(server.endpoint, bucket)
    push_steps(db, 1, 2)
    (path,) = (server.folder(bucket) / "run" / POLICY / "versions").glob("000001-000000000002.*")
    path.unlink()
    fresh = open_db(server.endpoint, bucket)
    with capture_logs():
        assert got(fresh).version == Version(1, 1)
        assert stored(fresh) == ["1.1"]
        with pytest.raises(Corrupt, match=r"000002.*is gone"):
            fresh.get(POLICY, Version(1, 2))
        push_steps(fresh, 2)
    assert got(fresh).version == Version(1, 2)
