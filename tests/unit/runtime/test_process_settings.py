import os
import signal
import subprocess
import sys

import pytest

from rlsrl.runtime.process import die_with_parent, worker_environment

linux = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")

# The child prints once its life is tied to the parent. Both hold standard output, so its end means that both ended.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
child.wait()
"""
CHILD = """
import sys, threading
from rlsrl.runtime.process import die_with_parent
die_with_parent(int(sys.argv[1]))
print("tied", flush=True)
threading.Event().wait()
"""


@linux
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_dies_with_its_parent(ending: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "tied\n"
    parent.send_signal(ending)
    parent.communicate(timeout=30)  # returns when the output ends: the child has ended too
    assert parent.returncode == -ending


@linux
def test_a_worker_whose_parent_is_gone_already_dies_at_once() -> None:
    command = [sys.executable, "-c", CHILD, str(os.getpid() + 1)]
    child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, "")


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_outside_linux_die_with_parent_does_nothing(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    die_with_parent(-1)


def test_the_environment_of_a_worker() -> None:
    base = {"PATH": "/bin", "OMP_NUM_THREADS": "16", "RLSRL_TOKEN": "t"}
    environment = worker_environment(base)
    assert base["OMP_NUM_THREADS"] == "16"
    assert (environment["PATH"], environment["RLSRL_TOKEN"]) == ("/bin", "t")
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        assert environment[variable] == "1"
    assert 1 << 20 < int(environment["MALLOC_MMAP_THRESHOLD_"]) <= 32 << 20, "glibc ignores more than 32 MiB"
    assert int(environment["MALLOC_TRIM_THRESHOLD_"]) > int(environment["MALLOC_MMAP_THRESHOLD_"])
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["RLSRL_PARENT_PID"] == str(os.getpid())


def test_each_thread_of_an_actor_waits_for_its_own_connection() -> None:
    assert worker_environment({}, "actor") == worker_environment({}) | {"GRPC_POLL_STRATEGY": "poll"}
    assert worker_environment({}, "coordinator") == worker_environment({})


# Prints how often gRPC's own threads slept during a round trip of MESSAGES messages.
SLEEPS_OF_GRPC = r"""
import os, re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc
def slept():
    total = 0
    for thread in os.listdir("/proc/self/task"):
        try:
            status = Path("/proc/self/task", thread, "status").read_text()
        except OSError:  # it has just ended
            continue
        if re.match(r"Name:\tevent_engine\n", status):
            total += int(re.search(r"^voluntary_ctxt_switches:\t(\d+)", status, re.M)[1])
    return total
handler = grpc.stream_stream_rpc_method_handler(lambda requests, context: requests)
server = grpc.server(ThreadPoolExecutor(1), handlers=(grpc.method_handlers_generic_handler("s", {"echo": handler}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    answers = channel.stream_stream("/s/echo")(iter([b""] * MESSAGES), wait_for_ready=True, timeout=30)
    assert len(list(answers)) == MESSAGES
    print(slept())
server.stop(None).wait()
"""


@linux
def test_grpc_messages_wake_only_the_threads_that_wait_for_them() -> None:
    messages = 2000

    def sleeps(environment: dict[str, str]) -> tuple[int, str]:
        script = SLEEPS_OF_GRPC.replace("MESSAGES", str(messages))
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        return int(done.stdout), done.stderr

    with_settings, warnings = sleeps(worker_environment(os.environ))
    assert "xperiment" not in warnings, "this gRPC version must know both experiments"
    assert with_settings < messages / 4
    without_settings, _ = sleeps({name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"})
    assert without_settings > messages / 4, "without the setting gRPC wakes its threads; otherwise delete the setting"


# Prints the timer slack in nanoseconds of an existing and of a new thread, and whether the switch interval is short.
PROMPT = """
import ctypes, sys, threading
from rlsrl.runtime.process import wake_threads_promptly
PR_GET_TIMERSLACK = 30
def slack(found):
    found.append(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK))
wake_threads_promptly()
found = []
slack(found)
thread = threading.Thread(target=slack, args=(found,))
thread.start()
thread.join()
print(found, sys.getswitchinterval() < 0.001)
"""


@linux
def test_threads_wake_promptly() -> None:
    child = subprocess.run([sys.executable, "-c", PROMPT], check=True, capture_output=True, text=True, timeout=30)
    assert child.stdout == "[1, 1] True\n"
