from __future__ import annotations

import errno
import os
import resource
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsrl.api.load import load_file
from rlsrl.cli import doctor as command
from rlsrl.cli.doctor import report
from rlsrl.local import doctor
from rlsrl.local.doctor import Check, CheckFailed, Finding, examine
from rlsrl.local.replay_room import Room, StoresUnknown
from rlsrl.testing.rollouts import discrete_env_spec
from rlsrl.workers.build.replay_stores import ReplayStores, stores_of

EXAMPLES = Path(__file__).parents[3] / "examples"
GIB = 1024**3


def raising(error: OSError) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise error

    return fail


def listener(name: str) -> socket.socket:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def meminfo(folder: Path, kib: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal:  99 kB\nMemAvailable:  {kib} kB\n")
    return path


WELL: dict[str, Callable[[Path], str]] = {
    "python": lambda _: doctor.check_python(),
    "platform": lambda _: doctor.check_platform(),
    "package": lambda _: doctor.check_package("json", "local"),
    "compiler": lambda _: doctor.check_compiler(),
    "disk": lambda folder: doctor.check_disk(folder / "not" / "yet", lambda _: 5 * GIB),
    "anonymous memory": lambda _: doctor.check_anonymous_memory(),
    "local sockets": lambda _: doctor.check_local_sockets(),
    "loopback": lambda _: doctor.check_loopback(),
    "cores": lambda _: doctor.check_cores(lambda: 2),
    "memory": lambda folder: doctor.check_memory(meminfo(folder, 8 * 1024**2)),
    "open files": lambda _: doctor.check_open_files(lambda: 1024),
    "unlimited files": lambda _: doctor.check_open_files(lambda: resource.RLIM_INFINITY),
}


@pytest.mark.parametrize("name", WELL)
def test_a_healthy_machine(name: str, tmp_path: Path) -> None:
    assert WELL[name](tmp_path)


def broken_compiler(folder: Path) -> dict[str, str]:
    path = folder / "g++"
    path.write_text("#!/bin/sh\necho 'probe: fatal error: Python.h: No such file' >&2\nexit 1\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}{os.pathsep}/bin"}


PROBLEMS: dict[str, tuple[Callable[[Path], str], str, str]] = {
    "old python": (lambda _: doctor.check_python((3, 10, 14)), "3.10.14 is older than 3.11", "Python 3.11"),
    "another platform": (lambda _: doctor.check_platform("darwin"), "darwin is not Linux", "Linux container"),
    "missing package": (
        lambda _: doctor.check_package("no_such_module_here", "torch"),
        "No module named 'no_such_module_here'",
        "pip install 'rlsrl[torch]'",
    ),
    "missing package of an extra": (
        lambda _: doctor.check_package("json", "rpc", others=["no_such_module_here"]),
        "No module named 'no_such_module_here'",
        "pip install 'rlsrl[rpc]'",
    ),
    "crashing package": (
        lambda _: doctor.check_package("json", "env", program=(sys.executable, "-c", "import os; os.abort()")),
        "exit code -6",
        "rlsrl[env]",
    ),
    "no python to try it with": (
        lambda folder: doctor.check_package("json", "env", program=(str(folder / "none"),)),
        "cannot be imported",
        "rlsrl[env]",
    ),
    "no compiler": (
        lambda folder: doctor.check_compiler({"PATH": str(folder)}),
        "not found: g++, clang++",
        "install g++",
    ),
    "named compiler missing": (
        lambda folder: doctor.check_compiler({"PATH": str(folder), "CXX": "icpx"}),
        "not found: icpx",
        "install g++",
    ),
    "compiler without headers": (
        lambda folder: doctor.check_compiler(broken_compiler(folder)),
        "Python.h: No such file",
        "python3-dev",
    ),
    "full disk": (lambda folder: doctor.check_disk(folder, lambda _: GIB // 2), "0.5 GiB free", "--run-dir"),
    "no /dev/shm": (lambda folder: doctor.check_shared_memory(folder / "shm"), "does not exist", "--shm-size"),
    "no memfd": (
        lambda _: doctor.check_anonymous_memory(raising(OSError(errno.ENOSYS, "Function not implemented"))),
        "Function not implemented",
        "sandbox",
    ),
    "no abstract sockets": (lambda _: doctor.check_local_sockets("x", listener), "Operation not permitted", "sandbox"),
    "no loopback": (lambda _: doctor.check_loopback("192.0.2.1"), "only one trainer", "ip link set lo up"),
    "one core": (lambda _: doctor.check_cores(lambda: 1), "1 core", "2 cores"),
    "little memory": (lambda folder: doctor.check_memory(meminfo(folder, 1024**2)), "1.0 GiB available", "add memory"),
    "few files": (lambda _: doctor.check_open_files(lambda: 256), "at most 256 open files", "ulimit -n 1024"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_each_problem_has_a_cure(name: str, tmp_path: Path) -> None:
    check, finding, cure = PROBLEMS[name]
    with pytest.raises(CheckFailed) as raised:
        check(tmp_path)
    assert finding in raised.value.finding
    assert cure in raised.value.cure


def test_small_shared_memory(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="less than"):
        doctor.check_shared_memory(tmp_path, required=2**80)


def test_a_folder_that_is_not_writable(tmp_path: Path) -> None:
    with pytest.raises(CheckFailed, match="is not writable"):
        doctor.check_disk(tmp_path, lambda _: 5 * GIB, lambda _: False)


def failing() -> str:
    raise CheckFailed("it is broken", "mend it")


def test_findings_come_in_order_with_their_cures() -> None:
    checks = [
        Check(name="a", required=True, examine=lambda: "fine"),
        Check(name="b", required=False, examine=failing),
        Check(name="c", required=True, examine=failing),
    ]
    assert list(examine(checks)) == [
        Finding(name="a", required=True, passed=True, text="fine"),
        Finding(name="b", required=False, passed=False, text="it is broken", cure="mend it"),
        Finding(name="c", required=True, passed=False, text="it is broken", cure="mend it"),
    ]
    assert [finding.is_fatal for finding in examine(checks)] == [False, False, True]


@pytest.mark.parametrize(
    ("required", "exit_code", "said"),
    [(True, 1, "no experiment can run here: part"), (False, 0, "experiments can run here; warnings: 1")],
)
def test_only_required_checks_make_the_command_fail(
    capsys: pytest.CaptureFixture[str], required: bool, exit_code: int, said: str
) -> None:
    assert report((Check(name="part", required=required, examine=failing),)) == exit_code
    output = "".join(capsys.readouterr())
    assert "part: it is broken\n        cure: mend it" in output
    assert said in output


def stores_of_example() -> ReplayStores | None:
    spec = load_file(EXAMPLES / "cartpole-dqn.yaml").spec
    return stores_of(spec, discrete_env_spec(num_features=4, num_actions=2))


def room(num_bytes: int, *, memory: int = 2**40) -> Room:
    return Room(folder=Path("/runs/replay"), num_bytes=num_bytes, is_memory=False, memory=memory)


def unknown() -> ReplayStores:
    raise StoresUnknown("there is no such environment")


def test_replay_stores_must_fit_on_the_disk_and_should_fit_into_memory() -> None:
    assert doctor.check_replay(lambda: None, lambda: room(0)) == "no replay"
    assert doctor.check_replay(stores_of_example, lambda: room(GIB)) == str(stores_of_example())
    assert "of memory are available" in doctor.check_replay(stores_of_example, lambda: room(GIB, memory=1))
    with pytest.raises(CheckFailed, match="at most 0 transitions fit"):
        doctor.check_replay(stores_of_example, lambda: room(0))
    with pytest.raises(CheckFailed, match="there is no such environment"):
        doctor.check_replay(unknown, lambda: room(GIB))


@pytest.mark.parametrize(
    ("free", "exit_code", "said"),
    [(GIB, 0, "ok      replay stores: 100,000 transitions x "), (0, 1, "cartpole-dqn cannot run here: replay stores")],
)
def test_an_experiment_is_checked_with_the_machine(
    free: int, exit_code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "CHECKS", ())
    monkeypatch.setattr(command, "find_stores", lambda spec, modules: stores_of_example())
    monkeypatch.setattr(command, "room_in", lambda folder, role: room(free))
    result = CliRunner().invoke(command.doctor, [str(EXAMPLES / "cartpole-dqn.yaml")])
    assert result.exit_code == exit_code
    assert said in result.output


def test_a_machine_without_loopback_can_train() -> None:
    (loopback,) = (check for check in doctor.CHECKS if check.name == "loopback")
    assert not loopback.required


def test_every_check_has_its_own_name() -> None:
    names = [check.name for check in doctor.CHECKS]
    assert len(set(names)) == len(names)
