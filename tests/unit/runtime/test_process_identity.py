import os
import subprocess
import sys

from rlsrl.runtime.identity import is_dead, own_process

PRINT_AND_WAIT = (
    "import sys; from rlsrl.runtime.identity import own_process; print(own_process(), flush=True); sys.stdin.read()"
)


def test_a_living_process_is_not_dead() -> None:
    assert not is_dead(own_process())


def test_a_killed_process_is_dead_before_and_after_it_is_reaped() -> None:
    child = subprocess.Popen([sys.executable, "-c", PRINT_AND_WAIT], stdin=-1, stdout=-1, env={"PYTHONPATH": _path()})
    assert child.stdout is not None
    assert child.stdin is not None
    name = child.stdout.readline().decode().strip()
    assert not is_dead(name)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead but not reaped
    assert is_dead(name)
    child.wait()
    assert is_dead(name)
    child.stdin.close()
    child.stdout.close()


def test_a_process_with_a_reused_pid_is_another_process() -> None:
    prefix, _, started = own_process().rpartition("/")
    assert is_dead(f"{prefix}/{int(started) + 1}")


def test_a_process_on_another_host_or_an_invalid_identity_is_not_dead() -> None:
    namespace = own_process().rpartition("/")[0].rpartition("/")[0]
    for name in ("", "x", "other-boot/pid:[1]/1/1", f"{namespace}/x/1", f"{namespace}//"):
        assert not is_dead(name)


def _path() -> str:
    return ":".join(sys.path)
