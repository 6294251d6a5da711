"""The moment when a rank switches to the compiled step, its behaviour if that fails, and the compiling child."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.data.version import Version
from rlsrl.runtime.process import worker_environment
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.contexts import make_context
from rlsrl.testing.rollouts import discrete_env_spec
from rlsrl.testing.waiting import until
from rlsrl.workers import compiling
from rlsrl.workers.build.compile_child import request_for
from rlsrl.workers.compiling import COMPILER_BYTES, START_SECONDS, StepCompiler, compiling_environment
from rlsrl.workers.gang import SoloGang

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: one}
spec:
  environment: {id: CartPole-v1}
  policy: {network: {mlp: {hiddenSizes: [8]}}}
  algorithm: {ppo: {minibatchSize: 16}}
  actors: {environments: 4, rolloutLength: 16}
  stop: {envSteps: 5000}
"""
REQUEST = request_for(
    resolve(load_text(EXPERIMENT), local_placement(run_uid="0f3a", run_folder=Path("/runs/one"))).trainer,
    discrete_env_spec(),
)
VERSION = Version(1, 7)


class FakeLearner:
    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.compiled: list[Mapping[str, Any]] = []
        self.uses_compiled = False

    def compile(self, slots: Mapping[str, Any]) -> None:
        self.compiled.append(slots)
        if self.failure is not None:
            raise self.failure

    def use_compiled(self) -> None:
        assert self.compiled
        self.uses_compiled = True


class FakeChild:
    """A child that ends when the test says so."""

    pid = 4711
    made: list[FakeChild]

    def __init__(self, request: bytes, environment: Mapping[str, str]) -> None:
        self.request, self.environment = request, environment
        self.ended, self.closed, self.message = False, False, None
        FakeChild.made.append(self)

    def wait(self, timeout: float) -> bool:
        return self.ended

    def failure(self) -> str | None:
        return self.message

    def close(self) -> None:
        self.closed = True


class TwoRanks(SoloGang):
    """This rank and another rank, which has compiled or failed."""

    size = 2

    def __init__(self, *, other_compiled: bool) -> None:
        self.other = {"compiled": other_compiled}

    def agree(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [dict(mine), self.other]


class Rank:
    def __init__(
        self,
        folder: Path,
        mode: Any,
        *,
        on_gpu: bool = False,
        memory: tuple[int, int] = (COMPILER_BYTES, 0),
        **environ: str,
    ) -> None:
        self.clock, self.learner = ManualClock(), FakeLearner()
        self.context = make_context("trainer", folder, clock=self.clock)
        self.compiler = StepCompiler(
            mode=mode,
            learner=self.learner,  # type: ignore[arg-type]  # as much of one as is used
            example_batch=lambda: {"a": "batch"},  # type: ignore[dict-item]
            request=REQUEST,
            context=self.context,
            on_gpu=on_gpu,
            environ={"PATH": os.environ["PATH"], "HOME": str(folder), **environ},
            memory=lambda: memory,
            start_child=FakeChild,  # type: ignore[arg-type]  # as much of one as is used
        )

    @property
    def gauge(self) -> float | None:
        return self.context.metrics.registry.get_sample_value("rlsrl_compiled")

    def follow(self, *others: Any, gang: Any = None) -> None:
        self.compiler.follow([self.compiler.stage(), *others], gang or SoloGang(), VERSION)


@pytest.fixture
def make_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rank]:
    FakeChild.made = []
    for name in (compiling.CACHE_VARIABLE, "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "put back afterwards")
    structlog.reset_defaults()
    return lambda mode="background", **options: Rank(tmp_path, mode, **options)


def begun(rank: Rank) -> FakeChild:
    rank.compiler.stage()
    rank.clock.advance(START_SECONDS)
    rank.compiler.stage()
    (child,) = FakeChild.made
    return child


def test_in_the_background_the_child_starts_later_and_the_rank_switches_when_it_is_done(
    make_rank: Callable[..., Rank], tmp_path: Path
) -> None:
    rank = make_rank()
    rank.follow()
    rank.clock.advance(START_SECONDS / 2)
    rank.follow()
    assert (FakeChild.made, rank.gauge) == ([], 0)
    with capture_logs() as logs:
        rank.clock.advance(START_SECONDS / 2)
        rank.follow()
        (child,) = FakeChild.made
        rank.follow()
        assert (rank.compiler.stage(), rank.compiler.blocks_training, rank.learner.compiled) == ("waiting", False, [])
        child.ended = True
        rank.follow()
    assert (rank.learner.compiled, rank.learner.uses_compiled) == ([{"a": "batch"}], True)
    assert (child.closed, rank.compiler.stage(), rank.gauge) == (True, "compiled", 1)
    assert [(each["event"], each.get("step")) for each in logs] == [("compiling", None), ("compiled", 7)]
    rank.follow()
    assert len(rank.learner.compiled) == 1
    line, niceness = child.request.splitlines()
    assert (line.decode(), int(niceness)) == (REQUEST, 19)
    folder = Path(child.environment["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.is_relative_to(tmp_path / ".cache" / "rlsrl")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_upfront_training_waits_for_the_compiled_step(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank("upfront")
    rank.follow()
    (child,) = FakeChild.made
    assert rank.compiler.blocks_training
    assert child.request.splitlines()[1] == b"0"
    child.ended = True
    rank.follow()
    assert (rank.compiler.blocks_training, rank.learner.uses_compiled) == (False, True)


@pytest.mark.parametrize("mode", ["background", "upfront"])
@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"memory": (2**30, 2**28)}, 1.25),
        ({"memory": (2**31, 2**31)}, 3),
        ({"memory": (2**33, 2**28), "on_gpu": True, "LOCAL_WORLD_SIZE": "8"}, 10),
    ],
    ids=["too little", "a large network", "eight children"],
)
def test_with_too_little_memory_nothing_is_compiled(
    make_rank: Callable[..., Rank], mode: str, options: dict[str, Any], needed: float
) -> None:
    rank = make_rank(mode, **options)
    with capture_logs() as logs:
        rank.follow()
        rank.clock.advance(START_SECONDS)
        rank.follow()
    assert (FakeChild.made, rank.compiler.stage(), rank.compiler.blocks_training) == ([], "eager", False)
    (line,) = logs
    assert line["event"] == "not_compiled"
    found = options["memory"][0] / 2**30
    assert line["reason"] == f"{found:.2f} GiB of memory are available, and compiling needs {needed:.2f} GiB"


@pytest.mark.parametrize(("on_gpu", "children"), [(False, 0), (True, 1)])
def test_each_gpu_rank_has_a_child(make_rank: Callable[..., Rank], on_gpu: bool, children: int) -> None:
    rank = make_rank("upfront", on_gpu=on_gpu, LOCAL_RANK="1")
    stage = rank.compiler.stage()
    assert (stage, len(FakeChild.made)) == ("waiting" if on_gpu else "ready", children)


def test_off_compiles_nothing(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank("off")
    with capture_logs() as logs:
        rank.follow()
    assert (FakeChild.made, logs, rank.compiler.blocks_training, rank.gauge) == ([], [], False, 0)


def not_compiled(logs: list[Any]) -> list[str]:
    return [each["reason"] for each in logs if each["event"] == "not_compiled"]


@pytest.mark.parametrize("mode", ["background", "upfront"])
def test_without_a_compiler_training_goes_on_and_logs_it_once(make_rank: Callable[..., Rank], mode: str) -> None:
    rank = make_rank(mode, PATH="/nowhere")
    with capture_logs() as logs:
        for _ in range(3):
            rank.follow()
            rank.clock.advance(START_SECONDS)
    assert not_compiled(logs) == ["there is no C++ compiler g++"]
    assert (FakeChild.made, rank.compiler.stage(), rank.compiler.blocks_training) == ([], "eager", False)


def test_a_failed_child_leaves_training_eager(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    child = begun(rank)
    child.ended, child.message = True, "CppCompileError: no such instruction"
    with capture_logs() as logs:
        for _ in range(3):
            rank.follow()
    assert not_compiled(logs) == ["CppCompileError: no such instruction"]
    assert (child.closed, rank.learner.compiled, rank.gauge) == (True, [], 0)


def test_a_failed_compilation_in_the_rank_leaves_training_eager(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    begun(rank).ended = True
    rank.learner.failure = RuntimeError("\nno room\nand pages more")
    with capture_logs() as logs:
        for _ in range(3):
            rank.follow()
    assert not_compiled(logs) == ["RuntimeError: no room"]
    assert (rank.compiler.stage(), rank.learner.uses_compiled, rank.gauge) == ("eager", False, 0)


def test_ranks_wait_for_each_other(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    begun(rank).ended = True
    gang = TwoRanks(other_compiled=True)
    rank.follow("waiting", gang=gang)
    assert rank.learner.compiled == []
    rank.follow("ready", gang=gang)
    assert rank.learner.uses_compiled


def test_one_failed_rank_keeps_all_ranks_eager(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    begun(rank).ended = True
    with capture_logs() as logs:
        rank.follow("ready", gang=TwoRanks(other_compiled=False))
    assert len(rank.learner.compiled) == 1
    assert (rank.learner.uses_compiled, rank.compiler.stage(), rank.gauge) == (False, "eager", 0)
    assert not_compiled(logs) == [], "the other rank logs the reason"


def test_a_failed_rank_ends_the_other_ranks_children(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    child = begun(rank)
    rank.follow("eager", gang=TwoRanks(other_compiled=False))
    assert (child.closed, rank.compiler.stage()) == (True, "eager")


def test_only_the_first_rank_of_a_machine_has_a_child(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank(LOCAL_RANK="1")
    assert rank.compiler.stage() == "ready"
    rank.clock.advance(START_SECONDS)
    rank.follow("waiting", gang=TwoRanks(other_compiled=True))
    assert (FakeChild.made, rank.learner.compiled) == ([], [])


def test_the_end_of_training_ends_the_child(make_rank: Callable[..., Rank]) -> None:
    rank = make_rank()
    child = begun(rank)
    rank.compiler.close()
    assert child.closed
    rank.compiler.close()


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HOME": "{}/home"}, "{}/home/.cache/rlsrl"),
        ({"HOME": "{}/home", "XDG_CACHE_HOME": "{}/xdg"}, "{}/xdg/rlsrl"),
        ({"HOME": "{}/home", "TORCHINDUCTOR_CACHE_DIR": "{}/mine"}, "{}/mine"),
    ],
)
def test_the_cache_folder(tmp_path: Path, environ: Mapping[str, str], folder: str) -> None:
    variables = {name: value.format(tmp_path) for name, value in environ.items()}
    made = compiling_environment({"PATH": os.environ["PATH"], **variables})
    assert Path(made["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(folder.format(tmp_path))
    assert Path(made["TORCHINDUCTOR_CACHE_DIR"]).is_dir()


def test_without_a_cache_folder_the_error_says_what_to_set() -> None:
    with pytest.raises(OSError, match="set XDG_CACHE_HOME or HOME"):
        compiling_environment({"PATH": os.environ["PATH"]})


TRAINER = """
import json, os, sys, threading
from rlsrl.runtime.process import PARENT_VARIABLE, die_with_parent
from rlsrl.workers import compiling
die_with_parent(int(os.environ[PARENT_VARIABLE]))
environ = {**os.environ, "PYTHONPATH": os.environ["CHILD_PYTHONPATH"]}
child = compiling._Child(f"{sys.argv[1]}\\n19\\n".encode(), environ)
print(child.pid, flush=True)
if sys.argv[2] == "wait":
    child.wait(300)
    print(json.dumps(child.failure()), flush=True)
threading.Event().wait()
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Return an environment whose C++ compiler is a shell script."""

    def make(script: str) -> dict[str, str]:
        path = tmp_path / "g++"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o700)
        return {**os.environ, "CXX": str(path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}

    return make


Trainer = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    """Start a process with a compiling child, whose pid is its first line of output."""
    with contextlib.ExitStack() as processes:

        def start(environ: Mapping[str, str], what: str, *, child_path: str = "") -> subprocess.Popen[str]:
            path = os.pathsep.join(filter(None, [child_path, *sys.path]))
            process = subprocess.Popen(
                [sys.executable, "-c", TRAINER, REQUEST, what],
                env={**worker_environment(environ), "CHILD_PYTHONPATH": path},
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.callback(process.communicate)
            processes.callback(process.kill)
            return process

        yield start


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


@contextlib.contextmanager
def child_of(process: subprocess.Popen[str]) -> Iterator[int]:
    """The pid of the trainer's child, which is killed at the end if it still lives."""
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def test_child_and_compiler_die_with_the_trainer(
    tmp_path: Path, compiler: Callable[[str], dict[str, str]], trainer: Trainer
) -> None:
    hanging = compiler(f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 3600")
    process = trainer(hanging, "sleep")
    with child_of(process) as child:
        helper = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the compiler"))
        assert os.getpriority(os.PRIO_PROCESS, child) == 19
        process.kill()
        process.wait()
        until(lambda: gone(child) and gone(helper), "child and compiler are gone", timeout=30.0)


def test_a_child_that_imports_torch_dies_with_the_trainer(tmp_path: Path, trainer: Trainer) -> None:
    (tmp_path / "torch.py").write_text(
        f"import pathlib, threading\npathlib.Path({str(tmp_path)!r}, 'importing').touch()\nthreading.Event().wait()\n"
    )
    process = trainer(os.environ, "sleep", child_path=str(tmp_path))
    with child_of(process) as child:
        until((tmp_path / "importing").exists, "the child imports torch")
        process.kill()
        process.wait()
        until(lambda: gone(child), "the child is gone", timeout=30.0)


@pytest.mark.slow
def test_a_compiler_that_fails_is_named(compiler: Callable[[str], dict[str, str]], trainer: Trainer) -> None:
    failing = compiler("[ $1 = --version ] && exec echo g++ 12.2.0; echo 'no such instruction' >&2; exit 1")
    process = trainer(failing, "wait")
    assert process.stdout is not None
    process.stdout.readline()
    message = json.loads(process.stdout.readline())
    assert "CppCompileError" in message


@pytest.mark.slow
def test_a_second_process_uses_the_first_ones_cache(
    tmp_path: Path, compiler: Callable[[str], dict[str, str]], trainer: Trainer
) -> None:
    environ = compiler(f'echo "$@" >> {tmp_path}/calls; exec {shutil.which("g++")} "$@"')
    compiled = []
    for _ in range(2):
        process = trainer(environ, "wait")
        assert process.stdout is not None
        process.stdout.readline()
        assert json.loads(process.stdout.readline()) is None
        calls = (tmp_path / "calls").read_text().splitlines()
        compiled.append([call for call in calls if ".cpp" in call])
        (tmp_path / "calls").unlink()
    assert compiled[0]
    assert compiled[1] == []
