"""Looks whether this machine can run experiments, and names the cure of what it finds wrong.

A check is a function without arguments that returns what it found or raises ``Unwell``. What it looks at are its
parameters, with this machine's as defaults, so that a test can show it another machine.
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

from rlsrl.local.run_folder import RUNS
from rlsrl.rpc.local import connect, create_memory, listen

MIN_PYTHON = (3, 11)
MIN_DISK_BYTES = 1 * 1024**3
"""A run's weights, logs and events, and the compiler's cache."""
MIN_SHARED_MEMORY_BYTES = 64 * 1024**2
"""What a container gets when nobody asked for more."""
MIN_MEMORY_BYTES = 2 * 1024**3
"""Trainer, actors and, for a while, the compiler, which alone takes about 1 GiB."""
MIN_OPEN_FILES = 1024
IMPORT_SECONDS = 120.0
"""How long importing a package may take on a machine that has not read it from the disk yet."""
COMPILE_SECONDS = 60.0


class Unwell(Exception):  # noqa: N818 - named for what was found
    """A check failed."""

    def __init__(self, finding: str, cure: str) -> None:
        super().__init__(finding)
        self.finding = finding
        self.cure = cure


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to look at."""

    name: str
    required: bool
    """Whether nothing runs without it."""
    examine: Callable[[], str]
    """Returns what was found; raises ``Unwell``."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check came to."""

    name: str
    required: bool
    well: bool
    text: str
    cure: str = ""
    """What to do; empty where all is well."""

    @property
    def is_fatal(self) -> bool:
        """Whether nothing runs until it is cured."""
        return self.required and not self.well


def examine(checks: Sequence[Check]) -> Iterator[Finding]:
    """Make the checks one after another; findings come as they are made."""
    for check in checks:
        try:
            text = check.examine()
        except Unwell as unwell:
            yield Finding(name=check.name, required=check.required, well=False, text=unwell.finding, cure=unwell.cure)
        else:
            yield Finding(name=check.name, required=check.required, well=True, text=text)


def check_python(version: Sequence[int] = sys.version_info[:3]) -> str:
    """Python is new enough."""
    text = ".".join(map(str, version))
    if tuple(version[:2]) < MIN_PYTHON:
        wanted = ".".join(map(str, MIN_PYTHON))
        raise Unwell(
            f"{text} is older than {wanted}", f"install Python {wanted} or newer and make the environment anew"
        )
    return text


def check_platform(platform: str = sys.platform) -> str:
    """Linux: workers meet through abstract sockets, memfds and pidfds."""
    if platform != "linux":
        raise Unwell(f"{platform} is not Linux", "run in a Linux container or virtual machine")
    return f"{platform} {os.uname().release}"


def check_package(name: str, extra: str, *, program: Sequence[str] = (sys.executable,)) -> str:
    """The package can be imported, tried in another process: a build for another processor crashes there, not here."""
    code = f"import {name}; print(getattr({name}, '__version__', 'there'))"
    cure = f"pip install 'rlsrl[{extra}]'"
    try:
        done = subprocess.run(
            [*program, "-c", code], capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unwell(f"importing {name} did not end: {error}", cure) from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Unwell(f"cannot be imported: {last}", cure)
    return done.stdout.strip().splitlines()[-1]


def check_compiler(environ: Mapping[str, str] = os.environ) -> str:
    """A C++ compiler with its headers and Python's: what ``torch.compile`` needs for the processor."""
    names = (environ["CXX"],) if environ.get("CXX") else ("g++", "clang++", "c++")
    compiler = next(filter(None, (shutil.which(name, path=environ.get("PATH")) for name in names)), None)
    if compiler is None:
        raise Unwell(f"there is no {' and no '.join(names)}", "install g++ (Debian: apt install g++)")
    source = "#include <Python.h>\n#include <vector>\nint main() { return (int)std::vector<int>(0).size(); }\n"
    include = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, "-x", "c++", f"-I{include}", "-", "-fPIC", "-shared", "-o", str(Path(folder, "probe.so"))]
        try:
            done = subprocess.run(
                command, input=source, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unwell(f"{compiler} did not end: {error}", "install g++ anew") from error
    if done.returncode != 0:
        why = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise Unwell(
            f"{compiler} compiles nothing: {why.strip()}", "install g++ and Python's headers (Debian: g++ python3-dev)"
        )
    return compiler


def check_disk(folder: Path = RUNS, free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free) -> str:
    """Room and permission to write where runs are kept."""
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    if not os.access(there, os.W_OK | os.X_OK):
        raise Unwell(f"{there} cannot be written", "run from another folder, or give --run-dir")
    available = free(there)
    text = f"{_gib(available)} free in {there}"
    if available < MIN_DISK_BYTES:
        raise Unwell(f"{text}, less than {_gib(MIN_DISK_BYTES)}", "free some space, or give --run-dir on another disk")
    return text


def check_shared_memory(path: Path = Path("/dev/shm")) -> str:  # noqa: S108 - looked at, not used
    """Room where torch's own processes share tensors; rlsrl's memory is anonymous and not there."""
    cure = "mount one: docker run --shm-size=1g, or in Kubernetes an emptyDir with medium Memory"
    try:
        usage = os.statvfs(path)
    except OSError as error:
        raise Unwell(f"{path} is not there: {error.strerror}", cure) from error
    size = usage.f_blocks * usage.f_frsize
    if size < MIN_SHARED_MEMORY_BYTES:
        raise Unwell(f"{path} has {size // 1024**2} MiB, less than {MIN_SHARED_MEMORY_BYTES // 1024**2}", cure)
    return f"{_gib(size)} in {path}"


def check_anonymous_memory(create: Callable[[str, int], int] = create_memory) -> str:
    """Memory without a name, in which samples and weights travel between processes."""
    try:
        os.close(create("rlsrl-doctor", 1024**2))
    except OSError as error:
        raise Unwell(f"memfd_create fails: {error.strerror}", "lift the sandbox's rule against it") from error
    return "memfd_create works"


def check_local_sockets(name: str = "", bind: Callable[[str], socket.socket] = listen) -> str:
    """Abstract unix sockets, by which the workers of one machine meet."""
    name = name or f"rlsrl-doctor-{secrets.token_hex(8)}"
    try:
        with bind(name), connect(name, timeout=5.0):
            return "abstract unix sockets work"
    except OSError as error:
        raise Unwell(
            f"an abstract unix socket fails: {error.strerror}", "lift the sandbox's rule against unix sockets"
        ) from error


def check_loopback(host: str = "127.0.0.1") -> str:
    """A port on the loopback interface, where status and metrics are served."""
    try:
        with socket.create_server((host, 0)) as server, socket.create_connection(server.getsockname(), timeout=5.0):
            return f"{host} works, port {server.getsockname()[1]} for example"
    except OSError as error:
        raise Unwell(
            f"no connection over {host}: {error.strerror or error}",
            "bring it up: ip link set lo up",
        ) from error


def check_cores(count: Callable[[], int] = lambda: len(os.sched_getaffinity(0))) -> str:
    """A core for the trainer and one for the actors."""
    cores = count()
    if cores < 2:
        raise Unwell("1 core: trainer and actors take turns on it", "give the machine or container at least 2 cores")
    return f"{cores} cores"


def check_memory(meminfo: Path = Path("/proc/meminfo")) -> str:
    """Memory for the worker processes and the compiler."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    if available < MIN_MEMORY_BYTES:
        raise Unwell(
            f"{_gib(available)} available, less than {_gib(MIN_MEMORY_BYTES)}", "end other programs, or add memory"
        )
    return f"{_gib(available)} available"


def check_open_files(limit: Callable[[], int] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]) -> str:
    """Descriptors: each actor takes a few of its trainer's."""
    files = limit()
    if files != resource.RLIM_INFINITY and files < MIN_OPEN_FILES:
        raise Unwell(f"at most {files} open files, less than {MIN_OPEN_FILES}", f"ulimit -n {MIN_OPEN_FILES}")
    return "no limit" if files == resource.RLIM_INFINITY else f"up to {files} open files"


def _gib(size: int) -> str:
    return f"{size / 1024**3:.1f} GiB"


CHECKS = (
    Check(name="Python", required=True, examine=check_python),
    Check(name="platform", required=True, examine=check_platform),
    Check(name="torch", required=True, examine=lambda: check_package("torch", "torch")),
    Check(name="gymnasium", required=True, examine=lambda: check_package("gymnasium", "env")),
    Check(name="grpc", required=True, examine=lambda: check_package("grpc", "rpc")),
    Check(name="matplotlib", required=False, examine=lambda: check_package("matplotlib", "local")),
    Check(name="C++ compiler", required=False, examine=check_compiler),
    Check(name="cores", required=False, examine=check_cores),
    Check(name="memory", required=False, examine=check_memory),
    Check(name="disk", required=True, examine=check_disk),
    Check(name="shared memory", required=False, examine=check_shared_memory),
    Check(name="anonymous memory", required=True, examine=check_anonymous_memory),
    Check(name="local sockets", required=True, examine=check_local_sockets),
    Check(name="loopback", required=True, examine=check_loopback),
    Check(name="open files", required=False, examine=check_open_files),
)
"""Everything that is looked at, in order."""
