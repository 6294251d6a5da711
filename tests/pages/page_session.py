"""One reader of a page: a folder, a shell and a Python, in which the page's blocks run one after the other."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
from page_blocks import REPOSITORY, BadPage, Block, Statement, statements
from page_documents import check_dockerfile, checked_yaml, readme_experiment
from typing_extensions import override

from rlsrl.testing.closing import ClosedAtExit
from rlsrl.testing.servers import free_address
from rlsrl.testing.waiting import until

STATEMENT_SECONDS = 300.0
"""Deadline of a statement, on a machine with other load. Most take seconds."""
END_SECONDS = 60.0
"""Deadline for the end of a command after Ctrl-C."""
INTERRUPTED = 128 + signal.SIGINT
ANSWER_SECONDS = 5.0
"""Deadline of a server's answer."""
LEFT_SECONDS = 20.0
"""Deadline for processes that end after the command that started them."""
EXECUTION_SECONDS = 1.0
"""Deadline for an execve: a process that shows no variables for longer has none."""
CHECKOUT = ("benchmarks", "charts", "docs", "examples", "hack")
"""Folders of the repository that a reader has in the current folder."""
SMOKE = ((re.compile(r"\brlsrl run [\w./-]+\.yaml"), r"\g<0> --set stop.envSteps=4000"),)
"""Additions to commands that would take long."""
_SERVERS = (["rlsrl", "ui"], ["rlsrl", "serve-environment"])
_FOLLOW = frozenset({"--follow", "--watch", "port-forward"})
"""Words of commands that run until Ctrl-C."""
_SESSION = "RLSRL_PAGE_SESSION"
_ADDRESS = re.compile(r"http://[\w.]+:\d+")
_EXTRAS = re.compile(r"rlsrl\[([\w,]+)\]")
_SHELL = """
set -euo pipefail
trap 'for pid in $(jobs -p); do kill -KILL -- "-$pid"; done 2>/dev/null' EXIT
while IFS= read -r -u {requests} path; do
  . "$path" {requests}<&- {answers}>&-
  echo 0 >&{answers}
done
"""
_PYTHON = """
import os, sys
sys.path.insert(0, "")
namespace = {{"__name__": "__main__"}}
for path in open({requests}):
    folder, path, page = path.rstrip("\\n").split("\\t")
    os.chdir(folder)
    exec(compile(open(path).read(), page, "exec"), namespace)
    sys.stdout.flush()
    os.write({answers}, b"0\\n")
"""


class BlockFailed(AssertionError):
    """A block does not do what its page says. The text has page, line, statement and output."""


@dataclass(frozen=True, kw_only=True)
class _Background:
    """A command that runs beside the next ones."""

    what: str
    """Page, line and command."""
    pid: int
    """The process, and its group."""
    output: Path
    may_end: bool
    """Whether it may end by itself before its page does."""

    @property
    def printed(self) -> str:
        """Its output until now."""
        return self.output.read_text(errors="replace")

    def answers(self) -> bool:
        """Return whether a server answers at the first address that it has printed."""
        found = _ADDRESS.search(self.printed)
        try:
            return found is not None and bool(urllib.request.urlopen(found[0], timeout=ANSWER_SECONDS))
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class _Interpreter(ClosedAtExit):
    """A process that executes one file after the other and answers each with a line."""

    def __init__(self, program: str, command: str, *, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        self._log = log
        text = program.format(requests=requests, answers=answers)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [command, "-c", text],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(requests, answers),
                start_new_session=True,
            )
        os.close(requests)
        os.close(answers)
        self._end = os.pidfd_open(self.process.pid)

    @property
    def output(self) -> str:
        """All output until now."""
        return self._log.read_text(errors="replace")

    def execute(self, request: str, what: str, seconds: float) -> str:
        """Execute one request, and return its output.

        Raises:
            BlockFailed: it failed, or did not end in time.
        """
        start = len(self.output)
        os.write(self._requests, f"{request}\n".encode())
        ready, _, _ = select.select([self._answers, self._end], [], [], seconds)
        if self._answers in ready and os.read(self._answers, 64) == b"0\n":
            return self.output[start:]
        status = f"exit status {self.process.wait()}" if ready else f"no end within {seconds} s"
        raise BlockFailed(f"{what}\n{status}\n{self.output[start:]}")

    @override
    def close(self) -> None:
        for descriptor in (self._requests, self._answers, self._end):
            os.close(descriptor)
        self.process.kill()
        self.process.wait()


class PageSession(ClosedAtExit):
    """Runs blocks as a newcomer: with the README's experiment, the examples, and the commands of rlsrl on the PATH."""

    def __init__(
        self, folder: Path, *, environment: Mapping[str, str] | None = None, seconds: float = STATEMENT_SECONDS
    ) -> None:
        """Prepare the folder.

        Args:
            folder: The current folder of the page; it does not exist yet.
            environment: Further environment variables.
            seconds: Deadline of a statement.
        """
        self._seconds = seconds
        self.folder = folder
        self._id = uuid.uuid4().hex
        self._port = free_address().rpartition(":")[2]
        self._own = folder.with_name(f"{folder.name}-session")
        self._background: list[_Background] = []
        self._num_files = 0
        path = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"
        self._environment = {**os.environ, **(environment or {}), "PATH": path, _SESSION: self._id}
        for each in (folder, self._own):
            each.mkdir(exist_ok=True)
        for name in CHECKOUT:
            (folder / name).symlink_to(REPOSITORY / name)
        (folder / ".venv").symlink_to(sys.prefix)
        (folder / "experiment.yaml").write_text(readme_experiment())
        log = self._own / "shell.log"
        self._shell = _Interpreter(_SHELL, "bash", folder=folder, environment=self._environment, log=log)
        self._begun = psutil.Process(self._shell.process.pid).create_time()
        self._python: _Interpreter | None = None

    @property
    def output(self) -> str:
        """All that the blocks have printed."""
        return self._shell.output + (self._python.output if self._python else "")

    @property
    def current_folder(self) -> Path:
        """The shell's current folder."""
        return Path(os.readlink(f"/proc/{self._shell.process.pid}/cwd"))

    def run(self, block: Block) -> None:
        """Run one block.

        Raises:
            BlockFailed: a statement failed.
            BadPage: the block is wrong in itself.
        """
        if block.not_run is not None:
            return
        for command in block.before:
            self._statement(Statement(block.line, command), block)
        if block.beside is None:
            self._run(block)
        else:
            beside = self._begin(block.beside, f"{block.place}: {block.beside}")
            self._run(block)
            self._finish(beside)
        for command in block.after:
            self._statement(Statement(block.line, command), block)

    def _run(self, block: Block) -> None:
        text = block.text.replace("127.0.0.1:8765", f"127.0.0.1:{self._port}")
        for old, new in block.replacements:
            text = text.replace(old, new)
        if block.language == "bash":
            for statement in statements(block):
                self._statement(statement, block)
        elif block.language == "yaml":
            text = checked_yaml(block, text)
            if "kind: RLExperiment" in block.text:
                (self.current_folder / "experiment.yaml").write_text(text)
        elif block.language == "dockerfile":
            check_dockerfile(block, self.current_folder)
        if block.file is not None:
            (self.current_folder / block.file).write_text(text)
        elif block.language == "python":
            self._run_python(block, text)

    def finish(self) -> None:
        """End the commands that still run as Ctrl-C does.

        Raises:
            BlockFailed: one of them had ended before, or did not end well, or a process is left.
        """
        for begun in reversed(self._background):
            self._finish(begun)
        try:
            until(lambda: not self._processes(), "no process is left", timeout=LEFT_SECONDS)
        except TimeoutError:
            left = [f"{process.pid} {' '.join(process.cmdline())}" for process in self._processes()]
            raise BlockFailed("\n".join(["left behind:", *left])) from None

    @override
    def close(self) -> None:
        left = self._processes()
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=END_SECONDS)
        for interpreter in filter(None, (self._python, self._shell)):
            interpreter.close()

    def _processes(self) -> list[psutil.Process]:
        """Return the living processes of the session without its interpreters."""
        own = {each.process.pid for each in (self._shell, self._python) if each is not None}
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.create_time() >= self._begun
                    and _variables(process).get(_SESSION) == self._id
                    and process.pid not in own
                ):
                    found.append(process)
            except psutil.Error:  # ended meanwhile, or another user's
                continue
        return found

    def _file(self, text: str) -> Path:
        self._num_files += 1
        path = self._own / f"{self._num_files}.txt"
        path.write_text(text)
        return path

    def _statement(self, statement: Statement, block: Block) -> None:
        words, what = statement.words, f"{block.page}:{statement.line}: {statement.text}"
        if words[:2] == ["pip", "install"]:
            _check_extras(statement.text, block)
        elif words[:2] in _SERVERS or _FOLLOW & set(words):
            text = self._small(statement.text, block).partition(" #")[0]
            serves = words[:2] in _SERVERS
            if serves:
                text += f" --port {self._port if words[1] == 'serve-environment' else 0}"
            self._background.append(self._begin(text, what, serves=serves, may_end=not serves))
        else:
            self._execute(self._small(statement.text, block), what)

    def _execute(self, text: str, what: str, seconds: float | None = None) -> str:
        return self._shell.execute(str(self._file(f"{text}\n")), what, seconds or self._seconds)

    def _small(self, text: str, block: Block) -> str:
        for old, new in block.replacements:
            text = text.replace(old, new)
        for pattern, new in SMOKE:
            text = pattern.sub(new, text)
        return text

    def _begin(self, command: str, what: str, *, serves: bool = False, may_end: bool = False) -> _Background:
        """Start a command in a process group of its own, and wait until it prints something, or a server answers."""
        output = self._file("")
        number = self._file("")
        background = f"{{ {command}\n}} </dev/null >{output} 2>&1 &"
        self._execute(f"set -m\n{background}\nset +m\necho $! >{number}", what)
        begun = _Background(what=what, pid=int(number.read_text()), output=output, may_end=may_end)
        has_begun = begun.answers if serves else lambda: bool(begun.printed)
        until(lambda: has_begun() or not begun.is_alive, what, timeout=self._seconds)
        if not has_begun() or not (may_end or begun.is_alive):
            raise BlockFailed(f"{what}\nended at once, or printed nothing\n{begun.printed}")
        return begun

    def _finish(self, begun: _Background) -> None:
        """Send Ctrl-C to a command and its children, and wait for its end."""
        when = "after Ctrl-C"
        if begun.is_alive:
            os.killpg(begun.pid, signal.SIGINT)
        elif not begun.may_end:
            when = "before its page did"
        status = self._execute(f"wait {begun.pid} && echo 0 || echo $?", f"{begun.what}\n{when}", END_SECONDS).strip()
        # kubectl's own watches end with 1 after Ctrl-C.
        good = {"0", str(INTERRUPTED), *(["1"] if begun.may_end else [])}
        if when != "after Ctrl-C" or status not in good:
            raise BlockFailed(f"{begun.what}\nended {when}, with status {status}\n{begun.printed}")

    def _run_python(self, block: Block, text: str) -> None:
        if self._python is None:
            log = self._own / "python.log"
            self._python = _Interpreter(
                _PYTHON, sys.executable, folder=self.folder, environment=self._environment, log=log
            )
        numbered = "\n" * (block.line - 1) + text  # so that tracebacks have the page's lines
        request = f"{self.current_folder}\t{self._file(numbered)}\t{block.page}"
        self._python.execute(request, f"{block.place}: python\n{text}", self._seconds)


def _variables(process: psutil.Process) -> dict[str, str]:
    """Return a process's environment variables.

    While a process executes a new program, the kernel shows none for a moment.
    """
    deadline = time.monotonic() + EXECUTION_SECONDS
    while not (variables := process.environ()) and process.exe() and time.monotonic() < deadline:
        time.sleep(0.001)
    return variables


@cache
def _extras() -> frozenset[str]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return frozenset(project["optional-dependencies"])


def _check_extras(text: str, block: Block) -> None:
    """Check what pip would install, without installing: the extras exist.

    Raises:
        BadPage: they do not, or something else is installed.
    """
    found = _EXTRAS.search(text)
    if found is None or not set(found[1].split(",")) <= _extras():
        raise BadPage(f"{block.place}: no extras of rlsrl: {text}; there are {', '.join(sorted(_extras()))}")
