"""What ``make site`` changes in the pages on their way to mkdocs; the pages themselves are those that GitHub shows.

- Pages outside of ``docs/`` get a place in the site: the README is its front page.
- Links are relative to the repository. Links to other files outside of ``docs/`` lead to copies of these files.
- Python-Markdown wants an empty line before a list, which GitHub does not.
- The comments that the tests of pages read are left out.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = "docs"
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "charts/README.md": "chart.md",
}
"""Pages outside of ``docs/``, and their places in the site."""
FILES = "files"
"""The folder of the site with copies of other files."""
_FENCE = re.compile(r"(?ms)^```.*?^```$")
_CODE = re.compile(rf"{_FENCE.pattern}|`[^`\n]*`")
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")
_LIST = re.compile(r"(?m)^(?![-*] |\d+\. | |#|\||<|$)(.+)\n(?=(?:[-*]|\d+\.) )")
_COMMENT = re.compile(r"(?m)^<!-- smoke: .* -->\n")


def place(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    if path in OUTSIDE:
        return OUTSIDE[path]
    return path.removeprefix(f"{DOCS}/") if path.startswith(f"{DOCS}/") else f"{FILES}/{path}"


def source(page: str) -> str:
    """Return the path within the repository of a page of the site."""
    return next((path for path, there in OUTSIDE.items() if there == page), f"{DOCS}/{page}")


def translated(page: str, text: str) -> str:
    """Return a page of the site, from its text in the repository."""
    folder = posixpath.dirname(source(page))

    def link(found: re.Match[str]) -> str:
        there = place(posixpath.normpath(posixpath.join(folder, found[2])))
        relative = posixpath.relpath(there, posixpath.dirname(page) or ".")
        return f"{found[1]}{relative}{found[3] or ''}{found[4]}"

    text = _outside(_CODE, _COMMENT.sub("", text), lambda prose: _LINK.sub(link, prose))
    return _outside(_FENCE, text, lambda prose: _LIST.sub(r"\1\n\n", prose))


def _outside(code: re.Pattern[str], text: str, change: Callable[[str], str]) -> str:
    """Change what is no code."""
    ends = [0, *(end for found in code.finditer(text) for end in found.span()), len(text)]
    parts = [text[begin:end] for begin, end in pairwise(ends)]
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def linked_files() -> Iterator[str]:
    """Yield the files outside of ``docs/``, and no pages of the site, to which pages lead."""
    for path in [*OUTSIDE, *(str(page.relative_to(REPOSITORY)) for page in (REPOSITORY / DOCS).rglob("*.md"))]:
        text = _CODE.sub("", (REPOSITORY / path).read_text(encoding="utf-8"))
        for found in _LINK.finditer(text):
            there = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
            if place(there).startswith(FILES) and (REPOSITORY / there).is_file():
                yield there


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside of ``docs/``."""
    from mkdocs.structure.files import File

    for path in {*OUTSIDE, *linked_files()}:
        files.append(File.generated(config, place(path), abs_src_path=str(REPOSITORY / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Translate a page."""
    return translated(page.file.src_uri, markdown)
