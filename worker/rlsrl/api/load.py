"""From a user's YAML to an RLExperiment. An error lists every problem of the document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from pathlib import Path as FilePath
from typing import Any, Self

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlsrl.api.document import Document, Problem, SourcePosition, SpecError, read_document, read_value, write_document
from rlsrl.api.fields import Path, allowed, allowed_at, find, known_part, nearest, parse_path, show_path, show_value
from rlsrl.api.model import RULES
from rlsrl.api.rules import Violation
from rlsrl.api.spec import RLExperiment

__all__ = [
    "Document",
    "GivenExperiment",
    "Problem",
    "SourcePosition",
    "SpecError",
    "apply_overrides",
    "dump",
    "experiment_of",
    "load_file",
    "load_text",
    "load_with_fewest_actors",
    "read_document",
]


AUTO = "auto"
"""The value of ``actors.replicas`` that leaves their number to ``rlsrl run``."""
_REPLICAS, _ENVIRONMENTS = ("spec", "actors", "replicas"), ("spec", "actors", "environments")
_TRAINERS = ("spec", "trainers", "replicas")
_BUFFER_WORKERS = ("spec", "bufferWorkers", "replicas")


@dataclass(frozen=True, kw_only=True)
class GivenExperiment:
    """An experiment as a user gives it: YAML, with changes of some fields."""

    text: bytes
    source: str
    """Names the text in messages: the file's path."""
    overrides: tuple[str, ...] = ()
    """Changes, ``path=value``, in their order."""

    @classmethod
    def of_file(cls, path: FilePath, overrides: Sequence[str] = ()) -> Self:
        """Return what a YAML file contains.

        Raises:
            SpecError: the file cannot be read.
        """
        return cls(text=_text_of(path), source=str(path), overrides=tuple(overrides))

    def load(self, *, auto_actors: Callable[[], int] | None = None) -> RLExperiment:
        """Return the experiment.

        ``auto_actors`` returns the number of actors if the text leaves it open. It is called at most once. None: the
        text may not leave it open.

        Raises:
            SpecError: the text is not a valid RLExperiment; lists every problem.
        """
        return experiment_of(_with_actors(self._document(), auto_actors))

    def load_with_fewest_actors(self) -> RLExperiment:
        """As ``load``, but a number of actors that the text leaves open is the smallest that other fields allow.

        That is 1, or with an algorithm that replays one for each trainer or buffer worker.

        Raises:
            SpecError: the text is not a valid RLExperiment; lists every problem.
        """
        document = self._document()
        found = []
        needed = (_value_at(document.value, path) for path in (_TRAINERS, _BUFFER_WORKERS))
        for number in (1, *(each for each in needed if isinstance(each, int))):
            try:
                return experiment_of(_with_actors(document, lambda number=number: number))  # type: ignore[misc]
            except SpecError as error:
                found.append(error)
        raise min(found, key=lambda error: len(error.problems))

    def _document(self) -> Document:
        return apply_overrides(read_document(self.text, self.source), self.overrides)


def load_file(path: FilePath, overrides: Sequence[str] = ()) -> RLExperiment:
    """Return the experiment in a YAML file, with ``overrides`` (``path=value``) applied.

    Raises:
        SpecError: the file cannot be read or is not a valid RLExperiment; lists every problem.
    """
    return GivenExperiment.of_file(path, overrides).load()


def load_with_fewest_actors(path: FilePath, overrides: Sequence[str] = ()) -> RLExperiment:
    """As ``load_file``, but see ``GivenExperiment.load_with_fewest_actors``.

    Raises:
        SpecError: the file cannot be read or is not a valid RLExperiment; lists every problem.
    """
    return GivenExperiment.of_file(path, overrides).load_with_fewest_actors()


def _text_of(path: FilePath) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SpecError(
            (Problem(place=SourcePosition(source=str(path)), path="", message=f"cannot be read: {reason}"),)
        ) from error


def load_text(text: str | bytes, *, source: str = "experiment", overrides: Sequence[str] = ()) -> RLExperiment:
    """Return the experiment in YAML text; ``source`` names the text in messages.

    Raises:
        SpecError: the text is not a valid RLExperiment; lists every problem.
    """
    return experiment_of(_with_actors(apply_overrides(read_document(text, source), overrides), None))


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """Return the document with each ``path=value`` applied in order.

    ``value`` is YAML; null or an empty value removes the field. The prefix ``spec.`` is optional. An invalid override
    becomes a problem of the document.
    """
    return reduce(_override, overrides, document)


def _with_actors(document: Document, auto_actors: Callable[[], int] | None) -> Document:
    """Return the document with a number in place of ``AUTO``, or with a problem."""
    if _value_at(document.value, _REPLICAS) != AUTO:
        return document
    place = document.place_of(_REPLICAS)
    if auto_actors is None or _value_at(document.value, _ENVIRONMENTS) is None:
        message = (
            "auto is for `rlsrl run`, on one machine"
            if auto_actors is None
            else "auto divides a fixed number of environments over the actors, and actors.environments is not set"
        )
        problem = Problem(
            place=place, path=show_path(_REPLICAS), message=message, value=AUTO, allowed=allowed_at(_REPLICAS)
        )
        return replace(document, problems=(*document.problems, problem))
    number = Document(source=document.source, value=auto_actors(), values={_REPLICAS: place})
    return document.with_value(_REPLICAS, number)


def _value_at(value: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def experiment_of(document: Document) -> RLExperiment:
    """Return the document as an experiment.

    Raises:
        SpecError: the document is not a valid RLExperiment; lists every problem in the order of the text.
    """
    problems = list(document.problems)
    if not document.unreadable:
        try:
            experiment = RLExperiment.model_validate(document.value, by_alias=True, by_name=False)
        except ValidationError as error:
            known = {problem.path for problem in problems}
            found = chain.from_iterable(_explained(document, details) for details in error.errors(include_url=False))
            problems += [problem for problem in found if problem.path not in known]
        else:
            if not problems:
                return experiment
    problems.sort(key=lambda problem: (problem.place.line, problem.place.column))
    identity = [problem for problem in problems if problem.path in ("apiVersion", "kind") and problem.value is not None]
    is_something_else = len(identity) == 2
    raise SpecError(tuple(identity if is_something_else else problems))


def dump(experiment: RLExperiment) -> str:
    """Return the experiment as YAML with every default written out. ``load_text`` reads it back."""
    return write_document(_without_nulls((), experiment.model_dump(mode="json", by_alias=True)))


def _without_nulls(path: Path, value: Any) -> Any:
    """Drop fields that are not set. Nulls in free JSON stay."""
    if isinstance(value, list):
        return [_without_nulls((*path, index), each) for index, each in enumerate(value)]
    if not _has_fields(path):
        return value
    return {name: _without_nulls((*path, name), member) for name, member in value.items() if member is not None}


def _has_fields(path: Path) -> bool:
    field = find(path)
    return field is not None and "properties" in field.schema


def _override(document: Document, override: str) -> Document:
    source = f"--set {override}"
    text, equals, value = override.partition("=")
    path = parse_path(text.strip())
    if not equals or not text.strip():
        problem = Problem(
            place=SourcePosition(source=source),
            path="",
            message="is not of the form path=value",
            allowed="for example algorithm.ppo.epochs=2",
        )
    elif find(path) is None:
        problem = _unknown_field(SourcePosition(source=source), path)
    elif (whole := _list_on(path)) is not None:
        problem = Problem(
            place=SourcePosition(source=source),
            path=show_path(path),
            message=f"is a part of the list {show_path(whole)}",
            allowed=f"the whole list: {show_path(whole)}=[...]",
        )
    else:
        steps = tuple(str(step) for step in path)
        return document.with_value(steps, read_value(value, source, steps))
    return replace(document, problems=(*document.problems, problem))


def _list_on(path: Path) -> Path | None:
    """Return the path of a list that a path leads into, if it does."""
    for length, step in enumerate(path[1:], start=1):
        field = find(path[:length])
        if isinstance(step, int) or (field is not None and field.schema.get("type") == "array"):
            return path[:length]
    return None


def _explained(document: Document, details: ErrorDetails) -> Iterator[Problem]:
    """Translate one of pydantic's errors into problems of the document."""
    path = tuple(step for step in details["loc"] if step != "[key]")
    match details["type"]:
        case "missing":
            yield Problem(
                place=document.place_of(path[:-1], key=True),
                path=show_path(path),
                message="is required and missing",
                allowed=allowed_at(path),
            )
        case "extra_forbidden":
            yield _unknown_field(document.place_of(path, key=True), path, details["input"])
        case kind if kind == RULES:
            violations: tuple[Violation, ...] = details["ctx"][RULES]
            for violation in violations:
                at = (*path, *violation.at)
                yield Problem(
                    place=document.place_of(at, key=not violation.at),
                    path=show_path(at),
                    message=violation.message,
                    value=details["input"] if not violation.at else None,
                    allowed=violation.allowed,
                )
        case "too_short" if len(details["input"]) >= details["ctx"]["min_length"]:
            return  # pydantic counts only the valid entries; the wrong ones have problems of their own
        case kind:
            is_key = details["loc"][-1:] == ("[key]",)
            value = details["input"]
            yield Problem(
                place=document.place_of(path, key=is_key),
                path=show_path(path),
                message=f"{'key' if is_key else 'value'} {show_value(value)} {_WRONG.get(kind, 'has the wrong type')}",
                value=value,
                allowed=_allowed_key(path) if is_key else allowed_at(path),
                nearest=_unquoted_choice(details) or _unquoted_text(details, path),
            )


_WRONG = {
    "greater_than": "is out of range",
    "greater_than_equal": "is out of range",
    "less_than": "is out of range",
    "less_than_equal": "is out of range",
    "literal_error": "is not one of the choices",
    "string_pattern_mismatch": "does not have the right form",
    "string_too_long": "is too long",
    "too_long": "has too many entries",
    "too_short": "has too few entries",
}
"""What is wrong with a value, by pydantic's type of error. Every other type of error concerns the value's type."""


def _unquoted_choice(details: ErrorDetails) -> str:
    """Return the choice that YAML reads as a boolean without quotes, or an empty text."""
    value = details["input"]
    words = (("on", "yes") if value else ("off", "no")) if isinstance(value, bool) else ()
    expected = details.get("ctx", {}).get("expected", "")
    return next((f'"{word}", with quotes' for word in words if f"'{word}'" in expected), "")


def _unquoted_text(details: ErrorDetails, path: Path) -> str:
    """Return how to write a text that YAML reads as a number without quotes, or an empty text."""
    value, field = details["input"], find(path)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if details["type"] != "string_type" or not is_number or field is None:
        return ""
    examples = field.schema.get("examples", [value])
    return f'a text, with quotes, such as "{examples[0]}"'


def _unknown_field(place: SourcePosition, path: Path, value: Any = None) -> Problem:
    known = known_part(path)
    meant = nearest(path)
    return Problem(
        place=place,
        path=show_path(path),
        message=f"is not a field of {show_path(known)}",
        value=value,
        allowed=allowed_at(known),
        nearest=show_path(meant) if meant else "",
    )


def _allowed_key(path: Path) -> str:
    field = find(path[:-1])
    return allowed({"type": "string", **(field.schema.get("propertyNames", {}) if field else {})})
