"""What an edit of an experiment touches, and what that does to a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlsrl.api.fields import FieldInfo, find, show_path
from rlsrl.api.model import OnEdit
from rlsrl.api.spec import RLExperiment


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One field that is another now."""

    path: str
    """As a user writes it: ``spec.stop.envSteps``."""
    does: OnEdit
    """What that does to a running experiment."""


def edits(before: RLExperiment, after: RLExperiment) -> tuple[Edit, ...]:
    """The fields of the spec that differ, in the order of the reference; defaults count as written."""
    spec = find(("spec",))
    assert spec is not None, "the document has one"  # noqa: S101 - an invariant of our own
    return tuple(_edits(spec, _plain(before), _plain(after)))


def refused(before: RLExperiment, after: RLExperiment) -> tuple[str, ...]:
    """The fields that cannot be edited and were."""
    return tuple(edit.path for edit in edits(before, after) if edit.does == "refuse")


def _plain(experiment: RLExperiment) -> Mapping[str, Any]:
    return experiment.spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def _edits(field: FieldInfo, before: Any, after: Any) -> Iterator[Edit]:
    if before == after:
        return
    if field.children and isinstance(before, dict) and isinstance(after, dict):
        for child in field.children:
            yield from _edits(child, before.get(child.path[-1]), after.get(child.path[-1]))
    else:
        assert field.on_edit is not None, "every field of the spec says so"  # noqa: S101 - an invariant of our own
        yield Edit(path=show_path(field.path), does=field.on_edit)
