"""The parser of pages: blocks, directives, statements; and the checks of documents."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_blocks import PAGES, BadPage, Block, blocks_of, parse, statements
from page_documents import check_dockerfile, checked_yaml

from rlsrl.api.load import load_text

PAGE = """\
# A page

<!-- smoke: replace "--episodes 100" with '--episodes 1' -->
<!-- smoke: before mkdir runs -->
<!-- smoke: while rlsrl run experiment.yaml -->
```bash
rlsrl eval runs/a \\
  --episodes 100    # a comment

for each in 1 2; do
  echo $each
done
cat <<END
text
END
```

- a list
    with more of its item

```text
output
```

<!-- smoke: not run: online service; a registry -->
<!-- smoke: file Dockerfile -->
```dockerfile
FROM a
```
"""


def block_of(text: str, language: str = "yaml") -> Block:
    return Block(page="page.md", line=7, language=language, text=text)


def test_blocks_have_places_languages_and_directives() -> None:
    commands, output, dockerfile = parse("page.md", PAGE)
    assert (commands.place, commands.language) == ("page.md:7", "bash")
    assert commands.replacements == (("--episodes 100", "--episodes 1"),)
    assert commands.before == ("mkdir runs",)
    assert commands.beside == "rlsrl run experiment.yaml"
    assert (output.language, output.text) == ("text", "output\n")
    assert dockerfile.not_run == "online service; a registry"
    assert dockerfile.file == "Dockerfile"


def test_statements_of_several_lines_stay_whole() -> None:
    commands, *_ = parse("page.md", PAGE)
    assert [(each.line, each.text.splitlines()[0]) for each in statements(commands)] == [
        (7, "rlsrl eval runs/a \\"),
        (10, "for each in 1 2; do"),
        (13, "cat <<END"),
    ]
    assert next(statements(commands)).words == ["rlsrl", "eval", "runs/a", "--episodes", "100"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- smoke: sometimes -->\n```bash\n```\n", "page.md:1: unknown directive 'sometimes'; known: replace"),
        ("<!-- smoke: replace a by b -->\n```bash\n```\n", "unknown directive"),
        ("<!-- smoke: replace a with b -->\n```bash\nc\n```\n", "page.md:3: the block lacks what is to be replaced: a"),
        ("<!-- smoke: not run: it fails -->\n```bash\n```\n", "the reason begins with one of GPU, cloud"),
        ("<!-- smoke: before a -->\n\n```bash\n```\n", "page.md:1: a directive needs a block on the next line"),
        ("text\n<!-- smoke: before a -->\n", "page.md:2: a directive needs a block"),
        ("```\n```\n", "page.md:2: the language of a fence is ''"),
        ("```yml\n```\n", "allowed: bash, dockerfile, python, text, yaml"),
        ("```bash\necho\n", "page.md:1: the fence has no end"),
        ("- a\n\n  ```bash\n  ```\n", "page.md:3: a fence begins at the begin of its line"),
        ("text\n\n    echo\n", "page.md:3: code by indentation"),
    ],
)
def test_a_page_that_cannot_be_followed_is_an_error(text: str, message: str) -> None:
    with pytest.raises(BadPage) as caught:
        list(parse("page.md", text))
    assert message in str(caught.value)


def test_a_block_that_bash_does_not_accept_is_an_error() -> None:
    with pytest.raises(BadPage, match=r"page.md:7: bash does not accept this: echo \(1\)"):
        list(statements(block_of("echo (1)\n", "bash")))


def test_blocks_that_call_a_cluster_are_known() -> None:
    for text, needs in {
        "kubectl get rlx\n": True,
        "helm template charts/ | kubectl apply -f -\n": True,
        "for i in 1 2; do\n  kubectl get pods\ndone\n": True,
        "rlsrl run experiment.yaml   # or kubectl apply\n": False,
    }.items():
        assert block_of(text, "bash").needs_cluster == needs, text


def test_every_page_can_be_followed() -> None:
    assert {"README.md", "charts/README.md", "docs/python.md", "docs/kubernetes/install.md"} <= set(PAGES)
    blocks = [block for page in PAGES for block in blocks_of(page)]
    assert len(blocks) > 60
    assert all(list(statements(block)) for block in blocks if block.language == "bash")


@pytest.mark.parametrize(
    "text",
    [
        "spec:\n  environment:\n    http: {url: 'http://127.0.0.1:1'}\n",
        "algorithm:\n  dqn: {}\npacing: {trainStepsPerEnvStep: 0.5}\n",
        "metadata:\n  labels: {a: b}\n",
        "images: {registry: registry.example.com}\n",
    ],
)
def test_valid_documents(text: str) -> None:
    checked_yaml(block_of(text), text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spec:\n  actors: {enviroments: 3}\n", "enviroments"),
        ("algorithm:\n  ppo: {learningRate: fast}\n", "learningRate"),
        ("images: {registry: 3}\n", "the chart refuses $.images.registry: 3 is not of type 'string'"),
        ("image: {registry: a}\n", "page.md:7: neither a part of an experiment nor values of the chart: image"),
        ("a: [\n", "page.md:7: no mapping of YAML"),
        ("kind: RLExperiment\napiVersion: rlsrl.dev/v1alpha1\n", "metadata"),
    ],
)
def test_invalid_documents(text: str, message: str) -> None:
    with pytest.raises(BadPage) as caught:
        checked_yaml(block_of(text), text)
    assert message in str(caught.value)


def test_a_completed_experiment_has_the_fields_of_the_readme() -> None:
    text = "spec:\n  environment: {http: {url: 'http://127.0.0.1:1'}}\n"
    spec = load_text(checked_yaml(block_of(text), text)).spec
    assert spec.environment.id is None
    assert spec.stop.return_mean == 475


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ARG BASE\nFROM ${BASE}\nCOPY a /b\n", ""),
        ("FROM ${BASE}\n", "no ARG declares BASE"),
        ("FRO a\n", "no instruction of a Dockerfile: FRO a"),
        ("FROM a\nCOPY missing /b\n", "not in the project: missing"),
    ],
)
def test_dockerfiles(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    if not message:
        check_dockerfile(block_of(text, "dockerfile"), tmp_path)
        return
    with pytest.raises(BadPage, match=message):
        check_dockerfile(block_of(text, "dockerfile"), tmp_path)
