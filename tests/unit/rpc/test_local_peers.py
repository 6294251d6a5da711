"""Both ends of an abstract socket trust only processes of their own user."""

import os
import select
import subprocess
import sys
import uuid

import pytest

from rlsrl.rpc.local import accept, connect, listen

DEADLINE = 30.0
OTHER_UID = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@pytest.fixture
def name() -> str:
    return f"rlsrl-test-{uuid.uuid4()}"


def start_as_other_user(program: str, name: str) -> subprocess.Popen[str]:
    """Start a process as another user; it runs a program with ``s``, a new socket, and ``name``."""
    prelude = (
        f"import os, socket, sys; os.setuid({OTHER_UID}); name = chr(0) + sys.argv[1]; "
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); "
    )
    command = [sys.executable, "-S", "-c", prelude + program, name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_of_one_user_connect(name: str) -> None:
    with listen(name) as listener, connect(name, DEADLINE) as ours, accept(listener) as theirs:
        ours.send(b"hello")
        assert select.select([theirs], [], [], DEADLINE)[0]
        assert theirs.recv(16) == b"hello"


@needs_root
def test_a_client_sends_nothing_to_another_users_name(name: str) -> None:
    with start_as_other_user("s.bind(name); s.listen(); print(flush=True); sys.stdin.read()", name) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "\n"
        with pytest.raises(PermissionError, match=f"belongs to a process of uid {OTHER_UID}"):
            connect(name, DEADLINE)
        stranger.communicate(timeout=DEADLINE)


@needs_root
def test_a_connection_of_another_user_is_refused(name: str) -> None:
    with listen(name) as listener, start_as_other_user("s.connect(name); print(s.recv(16))", name) as stranger:
        assert select.select([listener], [], [], DEADLINE)[0]
        with pytest.raises(ConnectionAbortedError, match=f"uid {OTHER_UID}"):
            accept(listener)
        assert stranger.communicate(timeout=DEADLINE)[0] == "b''\n"
