import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsrl.api.document import MAX_BYTES, MAX_DEPTH, Document, Problem, SourcePosition, read_document, write_document
from rlsrl.api.load import SpecError, experiment_of, load_text

EXAMPLE = (Path(__file__).parents[3] / "examples" / "cartpole.yaml").read_text(encoding="utf-8")

SCALARS: list[tuple[str, Any]] = [
    # as kubectl reads them
    ("1", 1), ("-7", -7), ("+7", 7), ("1_000", 1000), ("0x10", 16), ("0b11", 3), ("0o17", 15), ("017", 15), ("0", 0),
    ("1.5", 1.5), ("1e-3", 1e-3), ("1E5", 1e5), ("1e3", 1000.0), (".5", 0.5), ("-1.", -1.0), ("08", 8.0),
    ("true", True), ("Yes", True), ("on", True), ("no", False), ("OFF", False),
    ("null", None), ("~", None), ('""', ""), ("'1'", "1"), ("!!str 1", "1"), ("!!float 1", 1.0),
    ("2001-01-01", "2001-01-01"), ("1:30", "1:30"), ("1e", "1e"), ("1.2.3", "1.2.3"), ("tan h", "tan h"), ("=", "="),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_are_read_as_kubectl_reads_them(text: str, value: Any) -> None:
    document = read_document(f"key: {text}", "file")

    assert document.problems == ()
    assert document.value == {"key": value}
    assert type(document.value["key"]) is type(value)


def test_every_key_and_value_has_a_line_number() -> None:
    document = read_document("a:\n  b: [1, {c: 2}]\n", "file")

    assert document.place_of(("a", "b", 1, "c")) == SourcePosition(source="file", line=2, column=14)
    assert document.place_of(("a", "b", 1, "c"), key=True) == SourcePosition(source="file", line=2, column=11)
    assert document.place_of(("a", "missing")) == SourcePosition(source="file", line=1, column=1)
    assert str(document.place_of(("a", "b", 0))) == "file:2:7"


UNREADABLE = [
    # text, path, line, message
    ("", "", 1, "empty"),
    ("# a comment\n---\n", "", 1, "empty"),
    (b"\xff\xfe", "", 1, "not UTF-8"),
    ("a: \x00", "", 1, "not YAML"),
    ("a: [1, 2", "", 1, "not YAML"),
    ("a: 1\n b: 2", "", 2, "indent the line as far as its siblings"),
    ("a:\n  b: 1\n c: 2", "", 3, "indent the line as far as its siblings"),
    ("a:\n\tb: 1", "", 2, "with spaces, not with tabs"),
    ("a: *nobody", "", 1, "not YAML"),
    ('a: "\\UFFFFFFFF"', "", 1, "not YAML"),
    ("%YAML 1." + "9" * 5000 + "\n---\na: 1", "", 1, "not YAML"),
    ("[" * (MAX_DEPTH + 1), "", 1, "nested"),
    ("a: " + "x" * MAX_BYTES, "", 1, "longer"),
    ("a: 1\n---\nb: 2", "", 3, "second document"),
    ("a: 1\na: 2", "a", 2, "twice, first at line 1"),
    ("a:\n  1: 2", "a", 2, "not a string"),
    ("a:\n  [1]: 2", "a", 2, "not a string"),
    ("a: &x {b: 1}\nc:\n  <<: *x", "c", 3, "merge"),
    ("a: &x [*x]", "a[0]", 1, "inside the value that it refers to"),
    ("a: .inf", "a", 1, "finite"),
    ("a: 1e999", "a", 1, "finite"),
    ("a: 9223372036854775808", "a", 1, "64 bits"),
    ("a: " + "9" * 5000, "a", 1, "64 bits"),
    ("a: !!python/object/apply:os.system [x]", "a", 1, "not supported"),
    ("a: !!python/name:os.system x", "a", 1, "not supported"),
    ("a: !!set {x}", "a", 1, "not supported"),
    ("a: !!binary aGk=", "a", 1, "not supported"),
    ("a: !!int x", "a", 1, "invalid literal"),
    ('a: "\\ud800"', "a", 1, "surrogate"),
    ('"\\ud800": a', "", 1, "not a string"),
]


@pytest.mark.parametrize(("text", "path", "line", "message"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_value_that_json_lacks_is_a_problem_with_a_line_number(
    text: str | bytes, path: str, line: int, message: str
) -> None:
    problems = read_document(text, "file").problems

    assert [(problem.path, problem.place.line) for problem in problems if message in problem.message] == [(path, line)]


def test_the_expansion_of_aliases_is_bounded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]

    problems = read_document("\n".join(lines), "file").problems

    assert [problem.message for problem in problems if "100000 values" in problem.message]


def test_each_use_of_an_alias_is_read() -> None:
    assert read_document("a: &x [1]\nb: *x\nc: *x", "file").value == {"a": [1], "b": [1], "c": [1]}


def test_all_problems_of_a_text_are_reported_together() -> None:
    text = "a: .nan\nb: {1: 2}\na: 3\nc: !!set {x}\n---\nd: 1"

    assert [problem.place.line for problem in read_document(text, "file").problems] == [1, 2, 3, 4, 6]


TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT | st.sampled_from([text for text, _ in SCALARS]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["a", "n", "1e3", "0o7", "yes", "2001-01-01", "<<", "é"]), JSON, min_size=1))
@settings(max_examples=100, deadline=None)
def test_a_written_document_is_read_back(value: dict[str, Any]) -> None:
    document = read_document(write_document(value), "file")

    assert document.problems == ()
    assert document.value == value
    assert json.dumps(document.value) == json.dumps(value)  # 1.0 stays a float


def check_any_text(text: str | bytes) -> None:
    """Check that any text gives an experiment, or printable problems with a line number."""
    document = read_document(text, "file")
    assert isinstance(document, Document)
    problems: tuple[Problem, ...] = ()
    try:
        experiment_of(document)
    except SpecError as error:
        problems = error.problems
        if not problems:
            raise
    for problem in problems:
        assert problem.message
        assert problem.place.line >= 1
        str(problem).encode()
        assert "\x1b" not in str(problem)


@given(st.text() | st.binary() | st.text(alphabet="{}[]:,&*!|>-?#%@'\"\\ \n\tabUx0189.~<="))
@settings(max_examples=400, deadline=None)
def test_no_text_causes_a_traceback(text: str | bytes) -> None:
    check_any_text(text)


TOKENS = re.findall(r"\s+|[\w./-]+|.", EXAMPLE)
FRAGMENTS = st.sampled_from(
    [*TOKENS, "[", "{", "]", "}", "- ", ": ", "\n", "  ", "&a", "*a", "!!int", "!!map", "|", ">", "'", '"', "<<: *a",
     "null", "1e999", "-1", "---\n", "\t", "\x1b", "\u2028", "\ufeff", "?", "%YAML 9.9\n", '"\\ud800"', "spec:", "[[]]"]
) | st.text(max_size=3)  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, len(TOKENS) - 1), st.integers(0, 3), FRAGMENTS), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_mutation_of_an_experiment_causes_a_traceback(mutations: list[tuple[int, int, str]]) -> None:
    tokens = list(TOKENS)
    for position, removed, fragment in mutations:
        tokens[position : position + removed] = [fragment]
    check_any_text("".join(tokens))


def test_a_byte_order_mark_is_accepted() -> None:
    assert load_text(b"\xef\xbb\xbf" + EXAMPLE.encode()) == load_text(EXAMPLE)
