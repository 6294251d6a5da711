"""A session of a page fails where the page does, and leaves no process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from page_blocks import BadPage, Block, parse
from page_session import BlockFailed, PageSession

SERVER = """
import http.server, sys
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
print(f"at http://127.0.0.1:{server.server_address[1]}", flush=True)
try:
    server.serve_forever()
except KeyboardInterrupt:
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def session(tmp_path: Path) -> Iterator[PageSession]:
    with PageSession(tmp_path / "reader") as session:
        (session.folder / "server.py").write_text(SERVER)
        yield session


def blocks(*texts: str, language: str = "bash", directive: str = "") -> Iterator[Block]:
    head = f"<!-- smoke: {directive} -->\n" if directive else ""
    yield from parse("page.md", "\n".join(f"{head}```{language}\n{text}\n```\n" for text in texts))


def run(session: PageSession, *texts: str, language: str = "bash", directive: str = "") -> None:
    for block in blocks(*texts, language=language, directive=directive):
        session.run(block)


def test_a_shell_remembers_and_a_python_too(session: PageSession) -> None:
    run(session, "mkdir a && cd a\nA=1\nexport B=2", "test $A$B = 12\ntest $(basename $PWD) = a\nrlsrl --version")
    later = "assert (c, os.environ.get('A'), os.path.basename(os.getcwd())) == (3, None, 'a')"
    run(session, "import os\nc = 3", later, language="python")
    session.finish()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("true\nfalse", 3),
        ("true\n\nfalse && true", 4),
        ("false | true", 2),
        ("echo $UNKNOWN", 2),
        ("for each in 1 2; do\n  false\ndone", 2),
        ("true\nexit 0", 3),
    ],
)
def test_a_command_that_fails_is_named(session: PageSession, text: str, line: int) -> None:
    with pytest.raises(BlockFailed, match=rf"(?s)page.md:{line}: .*\nexit status \d"):
        run(session, f"{text}\n")


def test_the_output_is_shown(session: PageSession) -> None:
    with pytest.raises(BlockFailed, match="no such thing"):
        run(session, "echo before\necho no such thing >&2 && false")


def test_an_error_of_python_is_shown_with_the_line_of_the_page(session: PageSession) -> None:
    with pytest.raises(BlockFailed, match=r'(?s)File "page.md", line 3.*ZeroDivisionError'):
        run(session, "a = 0\n1 / a", language="python")


def test_directives_are_followed(session: PageSession) -> None:
    run(session, "cat found", directive="before echo 1 >found")
    run(session, "test a = b", directive="replace 'a = b' with 'b = b'")
    run(session, "A = 1", language="python", directive="file module.py")
    run(session, "import module\nassert module.A == 1", language="python")
    with pytest.raises(BlockFailed, match=r"page.md:3: false"):
        run(session, "true", directive="after false")


def test_a_command_beside_a_block_gets_ctrl_c(session: PageSession) -> None:
    run(session, "true", directive="while python server.py 0")
    session.finish()
    with pytest.raises(BlockFailed, match=r"(?s)ended after Ctrl-C, with status 7.*at http"):
        run(session, "true", directive="while python server.py 7")


def test_a_server_answers_until_the_page_ends(session: PageSession) -> None:
    (session.folder / "runs").mkdir()
    run(session, "rlsrl ui   # a page", "true")
    session.finish()


@pytest.mark.parametrize("command", ["rlsrl ui", "rlsrl serve-environment --id Unknown-v0"])
def test_a_server_that_ends_at_once_fails(session: PageSession, command: str) -> None:
    with pytest.raises(BlockFailed, match=r"(?s)ended at once, or printed nothing\n.*Error"):
        run(session, command)


def test_a_process_that_is_left_fails_and_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("page_session.LEFT_SECONDS", 0.1)
    with PageSession(tmp_path / "reader") as session:
        run(session, "setsid sleep 1000 & echo $! >pid")
        pid = int((session.folder / "pid").read_text())
        with pytest.raises(BlockFailed, match=r"left behind:\n.*sleep 1000"):
            session.finish()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_executes_programs_is_left_at_any_moment(tmp_path: Path) -> None:
    (tmp_path / "again").write_text('#!/bin/sh\nexec "$0"\n')
    (tmp_path / "again").chmod(0o755)
    with PageSession(tmp_path / "reader") as session:
        run(session, f"setsid {tmp_path / 'again'} & echo $! >pid")
        pid = int((session.folder / "pid").read_text())
        for _ in range(500):
            assert pid in {process.pid for process in session._processes()}


def test_a_statement_without_an_end_fails(session: PageSession, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BlockFailed, match=r"no end within 0.1 s"):
        session._shell.execute(str(session._file("sleep 1000\n")), "a page", 0.1)


def test_runs_of_pages_are_short(session: PageSession) -> None:
    (session.folder / "rlsrl").write_text('#!/bin/sh\necho "$@"\n')
    (session.folder / "rlsrl").chmod(0o755)
    run(
        session, 'PATH=$PWD:$PATH\ntest "$(rlsrl run a.yaml --seed 1)" = "run a.yaml --set stop.envSteps=4000 --seed 1"'
    )


def test_extras_are_checked_instead_of_installed(session: PageSession) -> None:
    run(session, "pip install 'rlsrl[ui,video]'")
    with pytest.raises(BadPage, match="no extras of rlsrl"):
        run(session, "pip install 'rlsrl[iu]'")
