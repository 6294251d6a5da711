"""Certificates that servers and clients accept, and their replacement while they run."""

from __future__ import annotations

import queue
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from rlsrl.rpc.channels import CallTarget
from rlsrl.rpc.conversations import Conversation, ConversationServer, ServerStream
from rlsrl.rpc.tls import TLS_FOLDER_VARIABLE, TLS_NAME_VARIABLE, Tls, TlsUnusable, tls_from_environment
from rlsrl.testing.certificates import PEER_NAME, Authority, MountedSecret

TOKEN = "the-token"
METHOD = "/tests/Echo"
DEADLINE = 60.0


@dataclass(frozen=True, kw_only=True)
class World:
    folder: Path
    ours: Authority
    others: Authority

    def secret(self, name: str, authority: Authority, *trusted: Authority, peer_name: str = PEER_NAME) -> MountedSecret:
        return MountedSecret(self.folder / name, authority.issue(peer_name), *trusted)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(folder=tmp_path, ours=Authority.new(tmp_path), others=Authority.new(tmp_path))


Serve = Callable[[Tls | None], ConversationServer]


@pytest.fixture
def strangers() -> list[None]:
    return []


@pytest.fixture
def serve(strangers: list[None]) -> Iterator[Serve]:
    with ExitStack() as stack:

        async def echo(stream: ServerStream) -> None:
            while (message := await stream.read()) is not None:
                stream.send(message)

        def serve(tls: Tls | None) -> ConversationServer:
            server = ConversationServer(
                "127.0.0.1:0",
                token=TOKEN,
                tls=tls,
                method=METHOD,
                converse=echo,
                on_unauthenticated=lambda: strangers.append(None),
            )
            stack.callback(server.close)
            return server

        yield serve


class Client:
    """A conversation that records the received messages."""

    def __init__(self, server: ConversationServer, tls: Tls | None, token: str = TOKEN) -> None:
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._end: Future[Exception | None] = Future()
        self._conversation = Conversation(
            CallTarget(address=server.address, token=token, tls=tls),
            METHOD,
            first=b"hello",
            on_message=self._heard.put,
            on_end=self._end.set_result,
        )

    def say(self, message: bytes) -> None:
        self._conversation.send(message)

    def hear(self) -> bytes:
        """Return the next message."""
        return self._heard.get(timeout=DEADLINE)

    @property
    def has_heard(self) -> bool:
        """Return whether a message waits for ``hear``."""
        return not self._heard.empty()

    def end(self) -> Exception | None:
        self._conversation.close(grace=DEADLINE)
        return self._end.result(DEADLINE)


def refusal(server: ConversationServer, tls: Tls | None, token: str = TOKEN) -> tuple[grpc.StatusCode, str]:
    """Return the error with which server or client refused the other."""
    client = Client(server, tls, token)
    error = client.end()
    assert not client.has_heard
    assert isinstance(error, grpc.RpcError)
    assert isinstance(error, grpc.Call)
    return error.code(), error.details() or ""


class Nameless(Tls):
    """Presents no certificate and trusts the server's."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.newest().authorities)


def test_valid_certificates_and_the_token_are_accepted(world: World, serve: Serve, strangers: list[None]) -> None:
    server = serve(world.secret("server", world.ours, world.ours).tls())
    client = Client(server, world.secret("client", world.ours, world.ours).tls())
    assert client.hear() == b"hello"
    assert client.end() is None
    assert strangers == []


def test_one_certificate_may_serve_all_experiments_of_a_namespace(world: World, serve: Serve) -> None:
    secret = world.secret("both", world.ours, world.ours, peer_name="*.tests.svc")
    client = Client(serve(secret.tls()), secret.tls())
    assert client.hear() == b"hello"
    assert client.end() is None


@pytest.mark.parametrize("who", ["plain", "no certificate", "another authority's certificate"])
def test_clients_without_our_certificate_are_refused(
    world: World, serve: Serve, strangers: list[None], capfd: pytest.CaptureFixture[str], who: str
) -> None:
    server = serve(world.secret("server", world.ours, world.ours).tls())
    nameless = world.secret("nameless", world.ours, world.ours)
    client, reason = {
        "plain": (None, "WRONG_VERSION_NUMBER"),
        "no certificate": (
            Nameless(folder=nameless.folder, peer_name=PEER_NAME),
            "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        ),
        "another authority's certificate": (
            world.secret("client", world.others, world.ours).tls(),
            "CERTIFICATE_VERIFY_FAILED",
        ),
    }[who]
    code, _ = refusal(server, client)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert strangers == [], "it never got as far as showing a token"
    assert reason in capfd.readouterr().err, "the server's log says why"
    good = Client(server, world.secret("good", world.ours, world.ours).tls())
    assert good.hear() == b"hello"
    assert good.end() is None


def test_a_certificate_does_not_replace_the_token(world: World, serve: Serve, strangers: list[None]) -> None:
    server = serve(world.secret("server", world.ours, world.ours).tls())
    code, details = refusal(server, world.secret("client", world.ours, world.ours).tls(), token="another")
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "token" in details
    assert len(strangers) == 1


def test_refused_calls_are_logged_with_their_peer_and_at_most_once_a_minute(
    serve: Serve, strangers: list[None]
) -> None:
    server = serve(None)
    with capture_logs() as logged:
        for _ in range(3):
            refusal(server, None, token="another")
    assert len(strangers) == 3
    (line,) = logged
    assert line.pop("peer").startswith("ipv4:127.0.0.1:")
    assert line == {
        "event": "call_refused",
        "log_level": "warning",
        "method": METHOD,
        "reason": "it has another token",
        "unlogged_before": 0,
    }


@pytest.mark.parametrize(
    ("peer_name", "authority", "reason"),
    [
        ("else-coordinator.tests.svc", "ours", "Hostname Verification Check failed"),
        ("*.else.svc", "ours", "Hostname Verification Check failed"),
        (PEER_NAME, "others", "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_server_of_another_authority_or_name_does_not_get_the_token(
    world: World, serve: Serve, strangers: list[None], peer_name: str, authority: str, reason: str
) -> None:
    server = serve(world.secret("server", getattr(world, authority), world.ours, peer_name=peer_name).tls())
    code, details = refusal(server, world.secret("client", world.ours, world.ours).tls(), token="another")
    assert code is grpc.StatusCode.UNAVAILABLE
    assert reason in details
    assert strangers == []


def test_a_server_without_certificates_does_not_get_the_token(
    world: World, serve: Serve, strangers: list[None]
) -> None:
    code, details = refusal(serve(None), world.secret("client", world.ours, world.ours).tls(), token="another")
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "WRONG_VERSION_NUMBER" in details
    assert strangers == []


def test_certificates_are_replaced_during_conversations(world: World, serve: Serve) -> None:
    mine, theirs = (world.secret(name, world.ours, world.ours) for name in ("mine", "theirs"))
    old = mine.tls()
    server = serve(theirs.tls())
    standing = Client(server, old)
    assert standing.hear() == b"hello"

    late = world.secret("late", world.ours, world.ours).tls()
    for secret in (mine, theirs):  # first both authorities are trusted, then the new one's certificates are shown
        secret.put(world.ours.issue(), world.ours, world.others)
    theirs.put(world.others.issue(), world.ours, world.others)
    newcomer = Client(server, old)
    assert newcomer.hear() == b"hello", "a client that was made before trusts the new authority"
    assert newcomer.end() is None
    mine.put(world.others.issue(), world.others)
    theirs.put(world.others.issue(), world.others)
    newcomer = Client(server, old)
    assert newcomer.hear() == b"hello"
    assert newcomer.end() is None
    assert refusal(server, late)[0] is grpc.StatusCode.UNAVAILABLE, "the old authority is not trusted any more"

    standing.say(b"still here")
    assert standing.hear() == b"still here"
    assert standing.end() is None


def test_unusable_files_are_logged_once_and_the_previous_ones_are_kept(world: World, serve: Serve) -> None:
    secret = world.secret("both", world.ours, world.ours)
    server = serve(secret.tls())
    client = world.secret("client", world.ours, world.ours).tls()
    with capture_logs() as logs:
        (secret.folder / "..data" / "tls.key").write_bytes(world.ours.issue().key)
        for _ in range(3):
            standing = Client(server, client)
            assert standing.hear() == b"hello"
            assert standing.end() is None
    (told,) = [entry for entry in logs if entry["event"] == "certificates_unusable"]
    assert "tls.key" in told["reason"]
    assert "KEY_VALUES_MISMATCH" in told["reason"]


def test_files_read_during_a_replacement_belong_to_one_secret(world: World) -> None:
    pairs = [world.ours.issue(), world.ours.issue()]
    keys = {pair.certificate: pair.key for pair in pairs}
    secret = MountedSecret(world.folder / "both", pairs[0], world.ours)
    tls, enough = secret.tls(), threading.Event()

    def swap() -> None:
        for turn in count():
            secret.put(pairs[turn % 2], world.ours)
            if enough.wait(0.001):  # a reader whose every read fails gives up
                return

    swapping = threading.Thread(target=swap)
    swapping.start()
    last, num_changes = pairs[0].certificate, 0
    while num_changes < 20:
        newest = tls.newest()
        assert newest.key == keys[newest.chain]
        num_changes += newest.chain != last
        last = newest.chain
    enough.set()
    swapping.join()


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("tls.crt", None, "tls.crt: No such file or directory"),
        ("ca.crt", None, "ca.crt: No such file or directory"),
        ("tls.crt", b"", "not a chain and its key"),
        ("tls.key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "not a chain and its key"),
        ("ca.crt", b"nothing", "holds no certificates"),
    ],
)
def test_an_unusable_file_is_named(world: World, file: str, content: bytes | None, complaint: str) -> None:
    secret = world.secret("both", world.ours, world.ours)
    (secret.folder / file).unlink()
    if content is not None:
        (secret.folder / file).write_bytes(content)
    with pytest.raises(TlsUnusable, match=complaint):
        secret.tls()


@pytest.mark.parametrize("file", ["tls.crt", "tls.key", "ca.crt"])
def test_unreadable_files_are_refused_and_the_previous_ones_are_kept(world: World, file: str) -> None:
    secret = world.secret("both", world.ours, world.ours)
    tls = secret.tls()
    before = tls.newest()
    (secret.folder / file).unlink()
    (secret.folder / file).mkdir()
    with capture_logs() as logs:
        assert tls.newest() is before
    assert [entry["event"] for entry in logs] == ["certificates_unusable"]
    with pytest.raises(TlsUnusable):
        secret.tls()


def test_a_key_with_a_password_is_refused_without_a_prompt(world: World) -> None:
    secret = world.secret("both", world.ours, world.ours)
    key = secret.folder / "..data" / "tls.key"
    locked = ["openssl", "pkey", "-aes128", "-passout", "pass:word", "-in", key]
    key.write_bytes(subprocess.run(locked, check=True, capture_output=True).stdout)
    with pytest.raises(TlsUnusable, match="without a password"):
        secret.tls()


def test_the_environment_enables_tls(world: World) -> None:
    secret = world.secret("both", world.ours, world.ours)
    assert tls_from_environment({}) is None
    tls = tls_from_environment({TLS_FOLDER_VARIABLE: str(secret.folder), TLS_NAME_VARIABLE: "name"})
    assert tls is not None
    assert tls.peer_name == "name"
    with pytest.raises(TlsUnusable, match=TLS_NAME_VARIABLE):
        tls_from_environment({TLS_FOLDER_VARIABLE: str(secret.folder)})


def test_keys_do_not_appear_in_repr(world: World) -> None:
    tls = world.secret("both", world.ours, world.ours).tls()
    assert "PRIVATE" not in repr(tls) + repr(tls.newest())
