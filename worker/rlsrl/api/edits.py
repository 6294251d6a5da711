"""The fields that an edit of an experiment changes, and the effect on a running experiment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlsrl.api.fields import FieldInfo, find, parse_path, show_path
from rlsrl.api.load import dump, load_text, read_document
from rlsrl.api.model import OnEdit
from rlsrl.api.spec import RLExperiment


@dataclass(frozen=True, kw_only=True)
class FieldEdit:
    """One changed field."""

    path: str
    """As users write it: ``spec.stop.envSteps``."""
    effect: OnEdit
    """The effect on a running experiment."""
    before: Any
    """None if it was not set."""
    after: Any
    """None if it is not set."""


def edits(before: RLExperiment, after: RLExperiment) -> tuple[FieldEdit, ...]:
    """Return the changed fields of the spec in the order of the reference. A default equals its written value."""
    spec = find(("spec",))
    assert spec is not None, "the document has a spec"
    return tuple(_edits(spec, _plain(before), _plain(after)))


def refused(before: RLExperiment, after: RLExperiment) -> tuple[str, ...]:
    """Return the paths of changed fields that must not be edited."""
    return tuple(edit.path for edit in edits(before, after) if edit.effect == "refuse")


def merged(current: RLExperiment, given: RLExperiment, asked: RLExperiment) -> RLExperiment:
    """Return ``current`` with the changes of the spec from ``given`` to ``asked``.

    So other edits of ``current`` since ``given`` stay, as with `kubectl apply`.

    Raises:
        SpecError: the changes do not fit the other edits.
    """
    wanted = read_document(dump(asked), "experiment").value
    overrides = [f"{edit.path}={json.dumps(_value_at(wanted, edit.path))}" for edit in edits(given, asked)]
    return load_text(dump(current), overrides=overrides)


def _value_at(value: Any, path: str) -> Any:
    for step in parse_path(path):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _plain(experiment: RLExperiment) -> Mapping[str, Any]:
    return experiment.spec.model_dump(mode="json", by_alias=True)


def _edits(field: FieldInfo, before: Any, after: Any) -> Iterator[FieldEdit]:
    if before == after:
        return
    if field.children and isinstance(before, dict) and isinstance(after, dict):
        for child in field.children:
            yield from _edits(child, before.get(child.path[-1]), after.get(child.path[-1]))
    else:
        assert field.on_edit is not None, "every field of the spec has an effect"
        yield FieldEdit(path=show_path(field.path), effect=field.on_edit, before=before, after=after)
