"""Pages name existing things: linked files and headings, targets of make, commands and their options."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from page_blocks import blocks_of

from rlsrl.api.load import load_file
from rlsrl.api.roles import ROLES
from rlsrl.api.spec import AlgorithmSpec
from rlsrl.cli import main
from rlsrl.cli.init import templates

REPOSITORY = Path(__file__).parents[2]
MOST_WORDS = 12
"""The most words of our own that readers have to learn."""
PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "charts" / "README.md"],
)
EXAMPLES = sorted(
    path for path in (REPOSITORY / "examples").rglob("*.yaml") if "\nkind: RLExperiment\n" in path.read_text("utf-8")
)
CODE_SPAN = re.compile(r"`[^`\n]*`")


def prose(page: Path) -> str:
    """Return the page without code spans."""
    return CODE_SPAN.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the headings as link anchors."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def command_lines(page: Path) -> Iterator[str]:
    """Yield the lines of blocks of bash, with continuation lines joined."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for block in re.findall(r"(?ms)^```bash\n(.*?)^```$", text):
        yield from (line.strip() for line in block.splitlines())


def calls(line: str) -> Iterator[list[str]]:
    """Yield the words of each call of rlsrl in a line, alone or as kubectl's plugin."""
    for part in re.split(r"&&|\||;", line):
        words = shlex.split(part, comments=True) if part.count("'") % 2 == 0 else []
        if words[:2] == ["kubectl", "rlsrl"]:
            yield words[2:]
        elif words[:1] == ["rlsrl"]:
            yield words[1:]


def first_cells(page: str, heading: str) -> list[str]:
    """Return the first cells of the rows of the tables below a heading."""
    section = (REPOSITORY / page).read_text(encoding="utf-8").partition(f"# {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"(?m)^\| ([^|]*) \|", section)
    headers = re.findall(r"(?m)^\| ([^|]*) \|.*\n\| ---", section)
    return [cell for cell in cells if cell != "---" and cell not in headers]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8")))
    named = {
        target
        for page in PAGES
        for text in (page.read_text(encoding="utf-8"), *(f"`{line}" for line in command_lines(page)))
        for words in re.findall(r"`make ((?:[a-z0-9-]+ ?)+)", text)
        for target in words.split()
    }
    assert named <= targets
    assert {"setup", "lint", "test", "images", "docs"} <= named


def test_named_extras_exist() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        extra
        for page in PAGES
        for words in re.findall(r"rlsrl\[([a-z,]+)\]", page.read_text(encoding="utf-8"))
        for extra in words.split(",")
    }
    assert named <= set(project["optional-dependencies"])
    assert {"ui", "video"} <= named


def test_every_extra_is_on_the_page_about_installation() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    named = {extra for span in re.findall(r"`([a-z0-9,-]+)`", page) for extra in span.split(",")}
    assert set(project["optional-dependencies"]) <= named


def test_the_glossary_has_a_dozen_words_at_most() -> None:
    words = first_cells("docs/glossary.md", "Glossary")
    assert "**gang**" in words
    assert len(words) <= MOST_WORDS, words
    assert words == sorted(words)


def test_the_readme_says_what_each_role_does() -> None:
    assert {cell.split()[0] for cell in first_cells("README.md", "Roles")} == {role.name for role in ROLES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_the_examples_are_valid(example: Path) -> None:
    load_file(example)


def test_the_page_about_algorithms_has_each_algorithm() -> None:
    assert [cell.strip("`") for cell in first_cells("docs/algorithms.md", "Algorithms")] == [*AlgorithmSpec.blocks()]


def test_the_page_about_environments_shows_the_environment_that_init_writes() -> None:
    (shown,) = (block.text for block in blocks_of("docs/your-own-environment.md") if block.file == "my_env.py")
    assert shown == templates(has_algorithm=False)["my_env.py"]


def test_commands_in_pages_have_existing_options() -> None:
    found = [(page, words) for page in PAGES for line in command_lines(page) for words in calls(line)]
    assert len(found) >= 10
    for page, words in found:
        command: click.Command = main
        with click.Context(main) as context:
            while isinstance(command, click.Group):
                name = words.pop(0)
                inner = command.get_command(context, name)
                assert inner is not None, f"{page.name}: {name}"
                command = inner
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, f"{page.name}: {words}"
