"""Checks of the blocks that are documents: experiments and parts of them, values of the chart, Dockerfiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from page_blocks import REPOSITORY, BadPage, Block, blocks_of
from pydantic.alias_generators import to_camel

from rlsrl.api.document import read_document, write_document
from rlsrl.api.load import SpecError, load_text
from rlsrl.api.spec import ExperimentSpec

CHART = REPOSITORY / "charts"
ENVIRONMENTS = frozenset({"id", "factory", "http"})
"""Fields of which an environment has one."""
WHOLE = frozenset({"algorithm", "network"})
"""Fields whose value is replaced, not completed: one key chooses among several."""
INSTRUCTIONS = frozenset({"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "LABEL", "RUN", "USER", "WORKDIR"})

Document = dict[str, Any]


@cache
def readme_experiment() -> str:
    """Return the experiment of the README, which every page supposes in ``experiment.yaml``."""
    return next(block.text for block in blocks_of("README.md") if block.language == "yaml")


def checked_yaml(block: Block, text: str) -> str:
    """Check a block of YAML, and return the content of its file: of a part of an experiment, the whole experiment.

    Raises:
        BadPage: the experiment or the chart refuses it, or it is neither.
    """
    read = read_document(text, block.page)
    if read.problems or not isinstance(read.value, dict):
        raise BadPage(f"{block.place}: no mapping of YAML: {'; '.join(map(str, read.problems))}")
    document: Document = read.value
    if set(document) <= set(_schema()["properties"]):
        _check_values(block, document)
        return text
    if "apiVersion" in document:
        whole = text
    elif set(document) <= {"metadata", "spec"}:
        whole = _completed(document)
    elif set(document) <= set(map(to_camel, ExperimentSpec.model_fields)):
        whole = _completed({"spec": document})
    else:
        raise BadPage(f"{block.place}: neither a part of an experiment nor values of the chart: {', '.join(document)}")
    try:
        load_text(whole)
    except SpecError as error:
        raise BadPage(f"{block.place}: {error}") from error
    return whole


def merged(base: Any, change: Any) -> Any:
    """Return ``base`` with the fields of ``change``."""
    if not isinstance(base, Mapping) or not isinstance(change, Mapping):
        return change
    if ENVIRONMENTS & change.keys():
        base = {name: value for name, value in base.items() if name not in ENVIRONMENTS}
    kept = {name: (None if name in WHOLE else value) for name, value in base.items()}
    return {**base, **{name: merged(kept.get(name), value) for name, value in change.items()}}


def _completed(part: Document) -> str:
    return write_document(merged(read_document(readme_experiment(), "README.md").value, part))


def _schema() -> Document:
    found: Document = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    return found


def _check_values(block: Block, document: Document) -> None:
    values = merged(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")), document)
    errors = list(jsonschema.Draft7Validator(_schema()).iter_errors(values))
    if errors:
        raise BadPage(f"{block.place}: the chart refuses {errors[0].json_path}: {errors[0].message}")


def check_dockerfile(block: Block, folder: Path) -> None:
    """Check instructions, arguments, and that what is copied exists.

    Raises:
        BadPage: docker would refuse the file.
    """
    declared: set[str] = set()
    for line in block.text.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        instruction, *words = line.split()
        if instruction not in INSTRUCTIONS or not words:
            raise BadPage(f"{block.place}: no instruction of a Dockerfile: {line}")
        if unknown := set(re.findall(r"\$\{(\w+)\}", line)) - declared:
            raise BadPage(f"{block.place}: no ARG declares {', '.join(unknown)}: {line}")
        if instruction == "ARG":
            declared.add(words[0].partition("=")[0])
        if instruction == "COPY":
            missing = [source for source in words[:-1] if not (folder / source).exists()]
            if missing:
                raise BadPage(f"{block.place}: not in the project: {', '.join(missing)}")
