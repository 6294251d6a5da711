"""The code blocks of the pages for users, each with the directives that the tests of pages follow.

A directive is an HTML comment on a line before the block, which readers do not see:

``<!-- smoke: replace OLD with NEW -->``
    The test runs the block with NEW in the place of OLD. Quotes as in a shell.
``<!-- smoke: before COMMAND -->``
    The test runs COMMAND first: what the page supposes.
``<!-- smoke: after COMMAND -->``
    The test runs COMMAND then: what the block makes possible.
``<!-- smoke: while COMMAND -->``
    COMMAND runs beside the block, and gets Ctrl-C after it.
``<!-- smoke: file NAME -->``
    The block is the content of that file in the current folder. A part of an experiment is completed first.
``<!-- smoke: not run: REASON -->``
    No test runs the block. REASON begins with one of ``REASONS``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
WITHOUT_BLOCKS_OF_USERS = {"failures.md", "python-reference.md", "roadmap.md", "untested.md"}
PAGES = (
    "README.md",
    "charts/README.md",
    *sorted(
        str(page.relative_to(REPOSITORY))
        for folder in ("docs", "docs/kubernetes")
        for page in (REPOSITORY / folder).glob("*.md")
        if page.name not in WITHOUT_BLOCKS_OF_USERS
    ),
)
"""The pages for users, relative to the repository."""
LANGUAGES = frozenset({"bash", "dockerfile", "python", "text", "yaml"})
"""Languages of fences. ``text`` is output, which no test runs."""
REASONS = ("GPU", "cloud", "cluster add-on", "online service", "package download", "second cluster")
"""What a mark may begin with."""
MOST_MARKS = 10
"""The most blocks of all pages that no test runs."""
_FENCE = "```"
_DIRECTIVE = re.compile(r"<!-- smoke: (.*) -->")
_CLUSTER = re.compile(r"(?m)(?:^|[|&;]) *(?:kubectl|helm) ")


class BadPage(ValueError):
    """A page that the tests cannot follow. The text names the page and the line."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    """The line of the page that has the block's first line."""
    language: str
    text: str
    replacements: tuple[tuple[str, str], ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    beside: str | None = None
    file: str | None = None
    not_run: str | None = None
    """The reason of a mark."""

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"

    @property
    def needs_cluster(self) -> bool:
        """Whether the block calls a cluster."""
        return self.language == "bash" and _CLUSTER.search(self.text) is not None


@dataclass
class _Directives:
    """The directives between two blocks."""

    line: int = 0
    replacements: list[tuple[str, str]] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    beside: str | None = None
    file: str | None = None
    not_run: str | None = None

    def add(self, text: str, place: str) -> None:
        """Add one directive.

        Raises:
            BadPage: it has another form than those above.
        """
        name, _, rest = text.partition(" ")
        words = shlex.split(rest)
        if name == "replace" and len(words) == 3 and words[1] == "with":
            self.replacements.append((words[0], words[2]))
        elif name == "before" and rest:
            self.before.append(rest)
        elif name == "after" and rest:
            self.after.append(rest)
        elif name == "while" and rest:
            self.beside = rest
        elif name == "file" and len(words) == 1:
            self.file = rest
        elif name == "not" and rest.startswith("run: "):
            self.not_run = rest.removeprefix("run: ")
            if not self.not_run.startswith(REASONS):
                raise BadPage(f"{place}: not run: {self.not_run}: the reason begins with one of {', '.join(REASONS)}")
        else:
            known = "replace OLD with NEW, before COMMAND, after COMMAND, while COMMAND, file NAME, not run: REASON"
            raise BadPage(f"{place}: unknown directive {text!r}; known: {known}")


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page of the repository."""
    return list(parse(page, (REPOSITORY / page).read_text(encoding="utf-8")))


def parse(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a page in their order.

    Raises:
        BadPage: a fence without one of ``LANGUAGES``, indented code, or a directive that is unknown or has no block.
    """
    lines = text.splitlines()
    directives, fence, in_list, number = _Directives(), 0, False, 0
    while number < len(lines):
        line = lines[number]
        number += 1
        place = f"{page}:{number}"
        if line.startswith(_FENCE):
            fence = number
            while number < len(lines) and lines[number] != _FENCE:
                number += 1
            if number == len(lines):
                raise BadPage(f"{place}: the fence has no end")
            yield _block(page, line.removeprefix(_FENCE), lines[fence:number], fence, directives)
            number += 1
            directives = _Directives()
        elif found := _DIRECTIVE.fullmatch(line):
            directives.line = number
            directives.add(found[1], place)
        elif directives.line:
            raise BadPage(f"{page}:{directives.line}: a directive needs a block on the next line")
        elif line.lstrip().startswith(_FENCE):
            raise BadPage(f"{place}: a fence begins at the begin of its line")
        elif line.startswith("    ") and not in_list:
            raise BadPage(f"{place}: code by indentation; write a fence with a language")
        if line.strip() and not line.startswith(" "):
            in_list = re.match(r"[-*] |\d+\. ", line) is not None
    if directives.line:
        raise BadPage(f"{page}:{directives.line}: a directive needs a block on the next line")


def _block(page: str, language: str, lines: list[str], fence: int, directives: _Directives) -> Block:
    place = f"{page}:{fence + 1}"
    if language not in LANGUAGES:
        raise BadPage(f"{place}: the language of a fence is {language!r}; allowed: {', '.join(sorted(LANGUAGES))}")
    text = "\n".join(lines) + "\n"
    for old, _ in directives.replacements:
        if old not in text:
            raise BadPage(f"{place}: the block lacks what is to be replaced: {old}")
    return Block(
        page=page,
        line=fence + 1,
        language=language,
        text=text,
        replacements=tuple(directives.replacements),
        before=tuple(directives.before),
        after=tuple(directives.after),
        beside=directives.beside,
        file=directives.file,
        not_run=directives.not_run,
    )


@dataclass(frozen=True)
class Statement:
    """One statement of a shell, of one or more lines."""

    line: int
    """The first line within the page."""
    text: str

    @property
    def words(self) -> list[str]:
        """Return the words without comments."""
        return shlex.split(self.text.replace("\\\n", " "), comments=True)


def statements(block: Block) -> Iterator[Statement]:
    """Yield the statements of a block of bash.

    Raises:
        BadPage: bash does not accept the block.
    """
    begun: list[str] = []
    for number, line in enumerate(block.text.splitlines(), block.line):
        if not begun and (not line.strip() or line.lstrip().startswith("#")):
            continue
        begun.append(line)
        if _is_whole("\n".join(begun)):
            yield Statement(number - len(begun) + 1, "\n".join(begun))
            begun = []
    if begun:
        raise BadPage(f"{block.page}:{block.line}: bash does not accept this: {' '.join(begun)}")


def _is_whole(text: str) -> bool:
    if text.endswith("\\"):
        return False
    done = subprocess.run(["bash", "-n"], input=f"{text}\n", capture_output=True, text=True, check=False)
    return done.returncode == 0 and not done.stderr  # a here-document without its end is a warning
