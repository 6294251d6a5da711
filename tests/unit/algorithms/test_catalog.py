"""Each block of ``spec.algorithm`` has its module, and no other module names an algorithm."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import rlsrl
import rlsrl_operator
from rlsrl.api.document import SpecError
from rlsrl.api.load import load_text
from rlsrl.api.spec import AlgorithmSettings, AlgorithmSpec

REPOSITORY = Path(__file__).parents[3]
DOCUMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: a}
spec:
  environment: {id: CartPole-v1}
  actors: {environments: 8, rolloutLength: 32}
  algorithm: {ppo: {}}
  stop: {trainSteps: 10}
"""
NAMES = tuple(name for name in AlgorithmSpec.exactly_one if name != "custom")
"""The built-in algorithms."""
KNOWING = ("rlsrl/api/", "rlsrl/testing/", *(f"rlsrl/algorithms/{name}" for name in NAMES))
"""The specs, what tests use, and the algorithms themselves."""
SOURCES = {
    str(path.relative_to(Path(package.__file__).parents[1])): path
    for package in (rlsrl, rlsrl_operator)
    for path in sorted(Path(package.__file__).parent.rglob("*.py"))
}


@pytest.mark.parametrize("name", NAMES)
def test_each_block_has_its_module(name: str) -> None:
    module = import_module(f"rlsrl.algorithms.{name}")
    assert callable(module.build)
    assert callable(module.coefficients)
    settings = AlgorithmSpec.model_validate({name: {}}).chosen
    assert isinstance(settings, AlgorithmSettings)
    assert settings.minibatch_rows > 0
    assert settings.passes > 0


@pytest.mark.parametrize(
    "name", [name for name, block in AlgorithmSpec.blocks().items() if name == "custom" or not block.replay_path]
)
def test_each_block_of_an_algorithm_that_trains_on_batches_is_checked_against_the_batch(name: str) -> None:
    document = load_text(DOCUMENT).model_dump(by_alias=True, exclude_none=True)
    block: dict[str, Any] = {"factory": "mine:Mine", "needs": {"minibatchSize": 300}}
    document["spec"]["algorithm"] = {name: block if name == "custom" else {"minibatchSize": 300}}
    with pytest.raises(SpecError, match=rf"algorithm\.{name}\..*minibatchSize: 300 does not divide a batch of 256"):
        load_text(json.dumps(document))


def test_the_contract_of_imports_names_each_module() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (each for each in contracts if each.get("id") == "algorithms")
    assert set(contract["forbidden_modules"]) == {f"rlsrl.algorithms.{name}" for name in AlgorithmSpec.exactly_one}


def names_in(code: str) -> Iterator[str]:
    """Yield the words of names and texts, docstrings aside."""
    tree = ast.parse(code)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.alias(name=text):
                yield from _words(text)
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text):
                yield from _words(text)
            case ast.ImportFrom(module=str(text)):
                yield from _words(text)
            case ast.Constant(value=str(text)) if id(node) not in docstrings:
                yield from _words(text)


def _words(text: str) -> list[str]:
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return [word.lower() for word in re.findall(r"[A-Za-z]+", apart)]


@pytest.mark.parametrize("path", [path for path in SOURCES if not path.startswith(KNOWING)])
def test_no_other_module_names_an_algorithm(path: str) -> None:
    assert not set(NAMES) & set(names_in(SOURCES[path].read_text()))


def test_a_name_is_found_wherever_it_stands() -> None:
    for code in ("import rlsrl.algorithms.ppo", "PpoSpec", "x.ppo", 'f"algorithm.ppo.{x}"', "def ppo(): pass"):
        assert "ppo" in set(names_in(code)), code
    assert "ppo" not in set(names_in('"""As in PPO."""'))
