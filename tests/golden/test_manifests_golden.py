"""The operator's manifests for five experiments, as YAML for people to read.

A diff affects new experiments and edits; running experiments keep their manifests. If the diff is intended, write it to
the golden files: ``python -m pytest tests/golden --update-golden``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlsrl.api.load import load_file
from rlsrl.api.status import ExperimentStatus
from rlsrl_operator.lifecycle import for_phase
from rlsrl_operator.manifests import ExperimentContext, Manifest, render, token_secret, volume_claim
from rlsrl_operator.settings import read_settings
from rlsrl_operator.testing import UID, pod

GOLDEN = Path(__file__).parent / "manifests"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
NOW = datetime(2026, 1, 1, tzinfo=UTC)
STATES = {
    "attempt 3": (ExperimentStatus(phase="Running", attempt=3), [pod(attempt=3)]),
    "over, trainers still end": (ExperimentStatus(phase="Succeeded", attempt=3), [pod(attempt=3)]),
    "suspended, trainers still end": (ExperimentStatus(phase="Suspended", attempt=3), [pod(attempt=3)]),
    "suspended, only the coordinator is left": (ExperimentStatus(phase="Suspended", attempt=3), [pod("coordinator")]),
    "suspended": (ExperimentStatus(phase="Suspended", attempt=3), []),
    "queued": (ExperimentStatus(phase="Queued", attempt=3), [pod(attempt=3, held=True, ready=False)]),
    "over": (ExperimentStatus(phase="Succeeded", attempt=3), [pod("coordinator"), pod("actor")]),
}


class Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def context(case: str) -> ExperimentContext:
    own = GOLDEN / case / "settings.yaml"
    return ExperimentContext(
        experiment=load_file(GOLDEN / case / "experiment.yaml"),
        namespace="research",
        uid=UID,
        generation=1,
        settings=read_settings(own if own.exists() else GOLDEN / "settings.yaml"),
    )


def objects(case: str) -> list[Manifest]:
    """Return all objects except the record, in the order in which the operator creates them."""
    about = context(case)
    claim = volume_claim(about)
    secret = token_secret(about, "a-fixed-token", "a-fixed-viewing-token")
    return [secret, *([] if claim is None else [claim]), *render(about)]


def changes(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted({*before, *after}):
            yield from changes(before.get(name), after.get(name), f"{path}.{name}" if path else name)
    elif before != after:
        yield path, after


def changes_by_state() -> dict[str, Any]:
    """Return, by case and state, the fields that differ from the rendered objects."""
    return {
        case: {
            state: {
                f"{manifest['kind']} {manifest['metadata']['name']}": differs
                for manifest in render(context(case))
                if (differs := dict(changes(manifest, for_phase(manifest, status, pods, NOW))))
            }
            for state, (status, pods) in STATES.items()
        }
        for case in CASES
    }


def check(path: Path, made: str, update: bool) -> None:
    if update:
        path.write_text(made, encoding="utf-8")
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    if made != golden:
        diff = difflib.unified_diff(golden.splitlines(), made.splitlines(), "golden file", "now", lineterm="", n=6)
        pytest.fail("\n".join([f"{path.relative_to(GOLDEN)}: {__doc__}", *diff]), pytrace=False)


@pytest.mark.parametrize("case", CASES)
def test_objects_match_the_golden_file(case: str, update_golden: bool) -> None:
    text = yaml.dump_all(objects(case), Dumper=Dumper, sort_keys=False, width=118)
    assert list(yaml.safe_load_all(text)) == objects(case)
    check(GOLDEN / case / "objects.yaml", text, update_golden)


def test_changes_by_state_match_the_golden_file(update_golden: bool) -> None:
    text = yaml.dump(changes_by_state(), Dumper=Dumper, sort_keys=False, width=118)
    check(GOLDEN / "changes_by_state.yaml", text, update_golden)


def test_a_failure_shows_the_diff_and_the_command_that_accepts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "GOLDEN", tmp_path)
    (tmp_path / "objects.yaml").write_text("replicas: 1\n")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)objects.yaml.*--update-golden.*-replicas: 1\n\+replicas: 2"):
        check(tmp_path / "objects.yaml", "replicas: 2\n", update=False)
    check(tmp_path / "objects.yaml", "replicas: 2\n", update=True)
    check(tmp_path / "objects.yaml", "replicas: 2\n", update=False)
