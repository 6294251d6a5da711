"""``make site`` leads links to their places in the site, and begins lists as Python-Markdown wants them."""

from __future__ import annotations

import pytest
from site_hooks import linked_files, place, source, translated


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[a](docs/python.md#act)", "[a](python.md#act)"),
        ("index.md", "[`a`](CONTRIBUTING.md)", "[`a`](contributing.md)"),
        ("python.md", "[a](../examples/first-run.ipynb)", "[a](files/examples/first-run.ipynb)"),
        ("python.md", "![a](images/ui.png)", "![a](images/ui.png)"),
        ("kubernetes/install.md", "[a](../../charts/README.md)", "[a](../chart.md)"),
        ("kubernetes/install.md", "[a](../replay.md#draws) [b](#values)", "[a](../replay.md#draws) [b](#values)"),
        ("decisions/README.md", "[a](../../README.md)", "[a](../index.md)"),
        ("python.md", "[a](https://example.com/docs)", "[a](https://example.com/docs)"),
        ("python.md", "`[a](../README.md)`", "`[a](../README.md)`"),
        ("python.md", "```bash\na\n- b\n```", "```bash\na\n- b\n```"),
        ("python.md", "**Why**, `a`.\n- b\n- c\n  d\n", "**Why**, `a`.\n\n- b\n- c\n  d\n"),
        ("python.md", "a:\n1. b\n2. c\n", "a:\n\n1. b\n2. c\n"),
        ("python.md", "<!-- smoke: before a -->\n```bash\n```", "```bash\n```"),
    ],
)
def test_a_page_is_translated(page: str, text: str, expected: str) -> None:
    assert translated(page, text) == expected


def test_every_page_has_one_place() -> None:
    for path in ("README.md", "charts/README.md", "docs/python.md", "docs/kubernetes/install.md"):
        assert source(place(path)) == path


def test_files_outside_of_the_pages_are_found() -> None:
    found = set(linked_files())
    assert "examples/first-run.ipynb" in found
    assert not any(path.startswith("docs/") or path.endswith(".md") for path in found)
