"""Checks whether this machine can run experiments, and names the cure of each problem.

A check is a function without required arguments that returns its finding or raises ``CheckFailed``. Its parameters are
the parts of the machine that it examines, by default this machine's, so that a test can simulate another machine.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlsrl.local.replay_room import Room, StoresUnknown
from rlsrl.local.run_names import RUNS
from rlsrl.rpc.local import connect, create_memory, listen
from rlsrl.runtime.cores import usable_cores
from rlsrl.runtime.extras import EXTRAS, TRAINING, TRAINING_MODULES, NotInstalled, pip_install
from rlsrl.runtime.memory import MEMINFO, available_memory

if TYPE_CHECKING:
    from rlsrl.workers.build.replay_stores import ReplayStores

MIN_PYTHON = (3, 11)
MIN_DISK_BYTES = 1 * 1024**3
"""For a run's weights, logs and events, and the compiler's cache."""
MIN_SHARED_MEMORY_BYTES = 64 * 1024**2
"""A container's default."""
MIN_MEMORY_BYTES = 2 * 1024**3
"""For the trainer, the actors and, for a while, the compiler, which takes about 1 GiB."""
MIN_OPEN_FILES = 1024
IMPORT_SECONDS = 120.0
"""Longest time for importing a package that is not in the disk cache."""
COMPILE_SECONDS = 60.0
PYTHON = (sys.executable,)


class CheckFailed(Exception):
    """A check failed."""

    def __init__(self, finding: str, cure: str) -> None:
        super().__init__(finding)
        self.finding = finding
        self.cure = cure


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check and whether it is required."""

    name: str
    required: bool
    """Whether no experiment runs if it fails."""
    examine: Callable[[], str]
    """Returns the finding; raises ``CheckFailed``."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check."""

    name: str
    required: bool
    passed: bool
    text: str
    cure: str = ""
    """What to do; empty if the check passed."""

    @property
    def is_fatal(self) -> bool:
        """Whether no experiment runs until it is cured."""
        return self.required and not self.passed


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Make the checks one after another and yield each finding at once."""
    for check in checks:
        try:
            text = check.examine()
        except CheckFailed as failed:
            yield Finding(name=check.name, required=check.required, passed=False, text=failed.finding, cure=failed.cure)
        except NotInstalled as error:
            yield Finding(
                name=check.name,
                required=check.required,
                passed=False,
                text=f"unknown: the package {error.name!r} is not installed",
                cure=error.cure,
            )
        else:
            yield Finding(name=check.name, required=check.required, passed=True, text=text)


def check_python(version: Sequence[int] = sys.version_info[:3]) -> str:
    """Return Python's version, which must be new enough."""
    text = ".".join(map(str, version))
    if tuple(version[:2]) < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        raise CheckFailed(
            f"{text} is older than {wanted}", f"install Python {wanted} or newer and create the environment again"
        )
    return text


def check_platform(platform: str = sys.platform) -> str:
    """Return the platform, which must be Linux: workers use abstract sockets, memfds and pidfds."""
    if platform != "linux":
        raise CheckFailed(f"{platform} is not Linux", "run in a Linux container or virtual machine")
    return f"{platform} {os.uname().release}"


def check_package(name: str, extra: str, *, others: Sequence[str] = (), program: Sequence[str] = PYTHON) -> str:
    """Return the package's version, imported in a child process: a build for another processor may crash there.

    ``others`` are modules that are imported with it.
    """
    code = f"import {', '.join([name, *others])}; print(getattr({name}, '__version__', 'there'))"
    cure = pip_install(extra)
    try:
        done = subprocess.run(
            [*program, "-c", code], capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckFailed(f"{name} cannot be imported: {error}", cure) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CheckFailed(f"cannot be imported: {last}", cure)
    return done.stdout.strip().splitlines()[-1]


def check_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """Return the C++ compiler that ``torch.compile`` needs, with its headers and Python's."""
    names = (environ["CXX"],) if environ.get("CXX") else ("g++", "clang++", "c++")
    compiler = next(filter(None, (shutil.which(name, path=environ.get("PATH")) for name in names)), None)
    if compiler is None:
        raise CheckFailed(f"not found: {', '.join(names)}", "install g++ (Debian: apt install g++)")
    source = "#include <Python.h>\n#include <vector>\nint main() { return (int)std::vector<int>(0).size(); }\n"
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, "-x", "c++", f"-I{include}", "-", "-fPIC", "-shared", "-o", str(Path(folder, "probe.so"))]
        try:
            done = subprocess.run(
                command, input=source, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CheckFailed(f"{compiler} does not compile a test program: {error}", "reinstall g++") from error
    if done.returncode != 0:
        why = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise CheckFailed(
            f"{compiler} does not compile a test program: {why.strip()}",
            "install g++ and Python's headers (Debian: g++ python3-dev)",
        )
    return compiler


def check_disk(
    folder: Path = RUNS,
    free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    is_writable: Callable[[Path], bool] = lambda path: os.access(path, os.W_OK | os.X_OK),
) -> str:
    """Return the free space of the disk with the run folders, which must be writable."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    if not is_writable(there):
        raise CheckFailed(f"{there} is not writable", "run from another folder, or give --run-dir")
    available = free(there)
    text = f"{_gib(available)} free in {there}"
    if available < MIN_DISK_BYTES:
        raise CheckFailed(
            f"{text}, less than {_gib(MIN_DISK_BYTES)}", "free some space, or give --run-dir on another disk"
        )
    return text


def check_shared_memory(path: Path = Path("/dev/shm"), required: int = MIN_SHARED_MEMORY_BYTES) -> str:  # noqa: S108 - only read
    """Return the size of /dev/shm, where torch's processes share tensors. rlsrl itself uses anonymous memory."""
    cure = "mount one: docker run --shm-size=1g, or in Kubernetes an emptyDir with medium Memory"
    try:
        usage = os.statvfs(path)
    except OSError as error:
        raise CheckFailed(f"{path} does not exist: {error.strerror}", cure) from error
    size = usage.f_blocks * usage.f_frsize
    if size < required:
        raise CheckFailed(f"{path} has {size // 1024**2} MiB, less than {required // 1024**2}", cure)
    return f"{_gib(size)} in {path}"


def check_anonymous_memory(create: Callable[[str, int], int] = create_memory) -> str:
    """Check that memfds work: samples and weights travel between processes in them."""
    try:
        os.close(create("rlsrl-doctor", 1024**2))
    except OSError as error:
        raise CheckFailed(
            f"memfd_create fails: {error.strerror}", "remove the sandbox's rule against memfd_create"
        ) from error
    return "memfd_create works"


def check_local_sockets(name: str = "", bind: Callable[[str], socket.socket] = listen) -> str:
    """Check that abstract unix sockets work: the workers of one machine connect through them."""
    name = name or f"rlsrl-doctor-{secrets.token_hex(8)}"
    try:
        with bind(name), connect(name, timeout=5.0):
            return "abstract unix sockets work"
    except OSError as error:
        raise CheckFailed(
            f"an abstract unix socket fails: {error.strerror}", "remove the sandbox's rule against unix sockets"
        ) from error


def check_loopback(host: str = "127.0.0.1") -> str:
    """Check that the loopback interface works.

    Workers train without it, over abstract sockets. Metrics pages and the ranks of several trainers need it.
    """
    try:
        with socket.create_server((host, 0)) as server, socket.create_connection(server.getsockname(), timeout=5.0):
            return f"{host} works, port {server.getsockname()[1]} for example"
    except OSError as error:
        raise CheckFailed(
            f"no connection over {host}: {error.strerror or error}; no metrics pages, and only one trainer",
            "enable it: ip link set lo up",
        ) from error


def check_cores(count: Callable[[], int] = usable_cores) -> str:
    """Return the number of cores: the trainer and the actors need one each."""
    cores = count()
    if cores < 2:
        raise CheckFailed("1 core: trainer and actors share it", "give the machine or container at least 2 cores")
    return f"{cores} cores"


def check_memory(meminfo: Path = MEMINFO) -> str:
    """Return the memory available for the worker processes and the compiler."""
    available = available_memory(meminfo=meminfo)
    if available < MIN_MEMORY_BYTES:
        raise CheckFailed(
            f"{_gib(available)} available, less than {_gib(MIN_MEMORY_BYTES)}", "stop other programs, or add memory"
        )
    return f"{_gib(available)} available"


def check_open_files(limit: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]) -> str:
    """Return the limit of open files: each actor uses a few descriptors of its trainer."""
    files = limit()
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        raise CheckFailed(f"at most {files} open files, less than {MIN_OPEN_FILES}", f"ulimit -n {MIN_OPEN_FILES}")
    return "no limit" if files == resource.RLIM_INFINITY else f"up to {files} open files"


def check_replay(stores: Callable[[], ReplayStores | None], room: Callable[[], Room]) -> str:
    """Return the size of an experiment's replay stores, which must fit into their room.

    ``stores`` raises ``StoresUnknown``, as ``replay_room.find_stores`` does.
    """
    try:
        found = stores()
    except StoresUnknown as error:
        raise CheckFailed(str(error), "without an environment the size of the stores is not known: mend it") from error
    if found is None:
        return "no replay"
    available = room()
    if (shortage := available.shortage(found)) is not None:
        raise CheckFailed(shortage, "lower the capacity, free some space, or give --run-dir on another disk")
    return available.warning(found) or str(found)


def _training_packages(extra: str) -> Check:
    """Return the check of the packages of an extra that every training run imports."""
    name, *others = (module for module in TRAINING_MODULES if EXTRAS[module] == extra)
    return Check(name=name, required=True, examine=lambda: check_package(name, extra, others=others))


def _gib(size: int) -> str:
    return f"{size / 1024**3:.1f} GiB"


CHECKS = (
    Check(name="Python", required=True, examine=check_python),
    Check(name="platform", required=True, examine=check_platform),
    *(_training_packages(extra) for extra in TRAINING),
    Check(name="matplotlib", required=False, examine=lambda: check_package("matplotlib", "local")),
    Check(name="C++ compiler", required=False, examine=check_compiler),
    Check(name="cores", required=False, examine=check_cores),
    Check(name="memory", required=False, examine=check_memory),
    Check(name="disk", required=True, examine=check_disk),
    Check(name="shared memory", required=False, examine=check_shared_memory),
    Check(name="anonymous memory", required=True, examine=check_anonymous_memory),
    Check(name="local sockets", required=True, examine=check_local_sockets),
    Check(name="loopback", required=False, examine=check_loopback),
    Check(name="open files", required=False, examine=check_open_files),
)
"""All checks, in order."""
