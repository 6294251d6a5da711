"""The conformance tests of parameter databases.

A test module subclasses ``ParameterDBConformance`` and adds a fixture ``store`` that returns a new ``StoreUnderTest``.
"""

# ruff: noqa: D102 - these are tests, named for what they say

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from rlsrl.data.version import INITIAL, Version
from rlsrl.parameters.protocols import (
    Corrupt,
    NonFinite,
    ParameterDB,
    Parameters,
    ResumePoint,
    StaleAttempt,
    TrainerState,
    VersionExists,
    VersionNotFound,
)
from rlsrl.testing.clock import ManualClock

POLICY = "default"
"""The policy's name in the tests."""
SHORT = 0.0
"""Seconds to watch if no version will come."""
LONG = 60.0
"""Seconds to watch if a version will come. The deadline is never reached."""


class StoreUnderTest(Protocol):
    """A store under test."""

    @property
    def clock(self) -> ManualClock:
        """The clock of every database that ``open`` returns."""

    def open(self) -> ParameterDB:
        """Return a new database that shares only the store with the others, like one in another process."""

    def corrupt(self, policy: str, version: Version, what: Literal["parameters", "state"]) -> None:
        """Change one bit of a stored array."""


def make_parameters(
    version: Version, *, fill: float | None = None, layout: str = "layout-1", size: int = 16, **statistics: NDArray[Any]
) -> Parameters:
    """Return parameters whose elements are all ``fill``; the version's step by default."""
    vector = np.full(size, version.step if fill is None else fill, dtype=np.float32)
    return Parameters(version=version, vector=vector, layout=layout, statistics=statistics)


def make_state(version: Version, **values: Any) -> TrainerState:
    """Return a small state of that version."""
    return TrainerState(version=version, arrays={"adam/m": np.full(4, version.step, dtype=np.float32)}, values=values)


def push_steps(db: ParameterDB, *steps: int, attempt: int = 1) -> None:
    """Push versions of one attempt."""
    for step in steps:
        db.push(POLICY, make_parameters(Version(attempt, step)))


def stored(db: ParameterDB) -> list[str]:
    """Return the texts of the stored versions, oldest first."""
    return [str(info.version) for info in db.versions(POLICY)]


def got(db: ParameterDB, ref: Version | str = "latest") -> Parameters:
    """Return the parameters, which must exist."""
    parameters = db.get(POLICY, ref)
    assert parameters is not None
    return parameters


def got_state(db: ParameterDB, ref: Version | str = "latest") -> TrainerState:
    """Return the trainer's state, which must exist."""
    state = db.load_state(POLICY, ref)
    assert state is not None
    return state


def bits(arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[Any, ...]]:
    """Return the dtype, shape and bytes of each array."""
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def push_then_save(db: ParameterDB, state: TrainerState) -> None:
    """Push a version, and save its state afterwards."""
    db.push(POLICY, make_parameters(state.version))
    db.save_state(POLICY, state)


def push_with_state(db: ParameterDB, state: TrainerState) -> None:
    """Push a version with its state."""
    db.push(POLICY, make_parameters(state.version), state=state)


_both_ways_of_saving = pytest.mark.parametrize("save", [push_then_save, push_with_state])


class ParameterDBConformance:
    """The conformance tests. A subclass adds a fixture ``store``."""

    @pytest.fixture
    def db(self, store: StoreUnderTest) -> ParameterDB:
        return store.open()

    def test_pushed_parameters_are_read_bit_for_bit(self, store: StoreUnderTest) -> None:
        rng = np.random.default_rng(0)
        pushed = Parameters(
            version=Version(3, 7),
            vector=rng.standard_normal(1001, dtype=np.float32),
            layout="abc",
            statistics={
                "observation/mean": rng.standard_normal((2, 3)),
                "observation/count": np.array(2**53 + 1, dtype=np.int64),
                "observation/strided": np.arange(12.0, dtype=np.float32).reshape(3, 4)[:, ::2],
                "reward/empty": np.zeros((0, 3), dtype=np.float16),
                "reward/seen": np.array([True, False]),
                "reward/tiny": np.array([5e-324, -0.0]),
            },
        )
        store.open().push(POLICY, pushed)
        read = got(store.open())
        assert (read.version, read.layout) == (pushed.version, pushed.layout)
        assert bits({"vector": read.vector}) == bits({"vector": pushed.vector})
        assert bits(read.statistics) == bits(pushed.statistics)

    def test_arrays_cannot_change_stored_parameters(self, db: ParameterDB) -> None:
        mine = make_parameters(Version(1, 1), fill=1, mean=np.zeros(2))
        db.push(POLICY, mine)
        mine.vector[:] = 99
        read = got(db)
        for array in (read.vector, *read.statistics.values()):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 5
        np.testing.assert_array_equal(got(db).vector, np.ones(16))

    def test_a_reference_is_a_version_its_text_a_tag_or_latest(self, db: ParameterDB) -> None:
        push_steps(db, 5, 6)
        db.push(POLICY, make_parameters(Version(2, 1500)), tags=["best", "released-1.0"])
        push_steps(db, 1501, attempt=2)
        assert got(db, Version(1, 5)).version == Version(1, 5)
        assert got(db, "1.6").version == Version(1, 6)
        assert got(db, "best").version == got(db, "released-1.0").version == Version(2, 1500)
        assert got(db, "latest").version == got(db).version == Version(2, 1501)

    def test_versions_are_ordered_by_attempt_then_step_as_numbers(self, db: ParameterDB) -> None:
        for attempt, step in [(1, 9), (1, 10), (1, 2), (9, 3), (10, 1), (10, 0)]:
            db.push(POLICY, make_parameters(Version(attempt, step)))
        assert stored(db) == ["1.2", "1.9", "1.10", "9.3", "10.0", "10.1"]
        assert got(db).version == Version(10, 1)

    def test_a_version_is_described(self, store: StoreUnderTest, db: ParameterDB) -> None:
        store.clock.advance(12.5)
        pushed_at = store.clock.time()
        db.push(POLICY, make_parameters(Version(1, 3), size=100), tags=["z", "a"], metadata={"env_steps": 4096})
        store.clock.advance(1.0)
        db.push(POLICY, make_parameters(Version(1, 4)))
        db.save_state(POLICY, make_state(Version(1, 3)))
        first, second = store.open().versions(POLICY)
        assert (first.policy, first.version, first.tags) == (POLICY, Version(1, 3), ("a", "z"))
        assert (first.created_at, second.created_at) == (pushed_at, pushed_at + 1.0)
        assert (first.num_parameters, second.num_parameters) == (100, 16)
        assert first.nbytes >= 400 > second.nbytes - 400
        assert (first.has_state, second.has_state) == (True, False)
        assert (first.metadata, second.metadata) == ({"env_steps": 4096}, {})

    @pytest.mark.parametrize(
        "other",
        [
            make_parameters(Version(1, 1), fill=2),
            make_parameters(Version(1, 1), layout="layout-2"),
            make_parameters(Version(1, 1), size=17),
            make_parameters(Version(1, 1), mean=np.zeros(2)),
        ],
        ids=["weights", "layout", "size", "statistics"],
    )
    def test_a_version_never_changes(self, store: StoreUnderTest, db: ParameterDB, other: Parameters) -> None:
        push_steps(db, 1)
        for writer in (db, store.open()):
            with pytest.raises(VersionExists, match=r"1\.1"):
                writer.push(POLICY, other)
        read = got(db)
        assert (read.layout, dict(read.statistics)) == ("layout-1", {})
        np.testing.assert_array_equal(read.vector, np.ones(16))

    def test_a_repeated_push_adds_its_tags_and_changes_nothing_else(
        self, store: StoreUnderTest, db: ParameterDB
    ) -> None:
        db.push(POLICY, make_parameters(Version(1, 1)), metadata={"env_steps": 1})
        created_at = db.versions(POLICY)[0].created_at
        store.clock.advance(5.0)
        store.open().push(POLICY, make_parameters(Version(1, 1)), tags=["best"], metadata={"env_steps": 2})
        (info,) = db.versions(POLICY)
        assert (info.tags, info.created_at, info.metadata) == (("best",), created_at, {"env_steps": 1})

    def test_a_succeeded_attempt_cannot_push(self, store: StoreUnderTest) -> None:
        old, new = store.open(), store.open()
        push_steps(old, 1, 2, attempt=1)
        push_steps(new, 1, 2, attempt=2)
        new.prune(POLICY, keep_last=1)
        for db in (old, new, store.open()):
            with pytest.raises(StaleAttempt, match="attempt 2"):
                push_steps(db, 3, attempt=1)
            with pytest.raises(StaleAttempt, match="attempt 2"):
                push_steps(db, 2, attempt=1)
        push_steps(new, 3, attempt=2)
        assert stored(new) == ["2.2", "2.3"]

    def test_a_succeeded_attempt_cannot_save_a_state(self, db: ParameterDB) -> None:
        push_steps(db, 1, attempt=1)
        db.save_state(POLICY, make_state(Version(1, 1)))
        push_steps(db, 1, attempt=2)
        with pytest.raises(StaleAttempt, match="attempt 2"):
            db.save_state(POLICY, make_state(Version(1, 1), late=True))
        assert got_state(db, "1.1").values == {}

    def test_a_version_is_pushed_with_its_state(self, store: StoreUnderTest, db: ParameterDB) -> None:
        version = Version(1, 4)
        state = make_state(version, a=1)
        db.push(POLICY, make_parameters(version), tags=["best"], metadata={"env_steps": 9}, state=state)
        reader = store.open()
        (info,) = reader.versions(POLICY)
        assert (info.version, info.has_state, info.tags, info.metadata) == (version, True, ("best",), {"env_steps": 9})
        np.testing.assert_array_equal(got(reader).vector, make_parameters(version).vector)
        loaded = got_state(reader)
        assert (loaded.version, loaded.values) == (version, {"a": 1})
        assert bits(loaded.arrays) == bits(state.arrays)

    @_both_ways_of_saving
    def test_a_state_saved_again_is_replaced(
        self, db: ParameterDB, save: Callable[[ParameterDB, TrainerState], None]
    ) -> None:
        for number in (1, 2):
            save(db, make_state(Version(1, 1), number=number))
        assert got_state(db).values == {"number": 2}

    @_both_ways_of_saving
    def test_only_the_last_few_states_are_kept(
        self, db: ParameterDB, save: Callable[[ParameterDB, TrainerState], None]
    ) -> None:
        for step in range(1, 6):
            save(db, make_state(Version(1, step)))
        assert [info.version.step for info in db.versions(POLICY) if info.has_state] == [3, 4, 5]

    def test_a_state_of_another_version_is_refused_and_nothing_is_stored(self, db: ParameterDB) -> None:
        push_steps(db, 1)
        with pytest.raises(ValueError, match=r"state of version 1\.3 cannot be pushed with version 1\.2"):
            db.push(POLICY, make_parameters(Version(1, 2)), state=make_state(Version(1, 3)))
        assert stored(db) == ["1.1"]
        assert db.load_state(POLICY) is None

    def test_a_push_that_is_refused_leaves_no_state(self, db: ParameterDB) -> None:
        push_steps(db, 1, attempt=1)
        push_steps(db, 1, attempt=2)
        with pytest.raises(StaleAttempt):
            db.push(POLICY, make_parameters(Version(1, 2)), state=make_state(Version(1, 2)))
        with pytest.raises(VersionExists):
            db.push(POLICY, make_parameters(Version(2, 1), fill=9), state=make_state(Version(2, 1)))
        assert db.load_state(POLICY) is None

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_non_finite_parameters_are_never_stored(self, db: ParameterDB, bad: float) -> None:
        push_steps(db, 1)
        vector = np.zeros(8, dtype=np.float32)
        vector[3] = bad
        with pytest.raises(NonFinite, match="vector"):
            db.push(POLICY, Parameters(version=Version(1, 2), vector=vector, layout="layout-1"))
        with pytest.raises(NonFinite, match="variance"):
            db.push(POLICY, make_parameters(Version(1, 2), variance=np.array([1.0, bad])))
        assert stored(db) == ["1.1"]

    @pytest.mark.parametrize("vector", [np.zeros((2, 2), np.float32), np.zeros(4)], ids=["matrix", "float64"])
    def test_a_vector_is_flat_float32(self, store: StoreUnderTest, vector: NDArray[Any]) -> None:
        with pytest.raises(ValueError, match="flat float32"):
            store.open().push(POLICY, Parameters(version=Version(1, 1), vector=vector, layout="layout-1"))

    def test_newer_than_returns_only_newer_versions(self, db: ParameterDB) -> None:
        assert db.get(POLICY, newer_than=INITIAL) is None
        push_steps(db, 4, 5)
        db.tag(POLICY, Version(1, 4), "best")
        newest = db.get(POLICY, newer_than=Version(1, 4))
        assert newest is not None
        assert newest.version == Version(1, 5)
        assert db.get(POLICY, newer_than=Version(1, 5)) is None
        assert db.get(POLICY, newer_than=Version(2, 0)) is None
        assert db.get(POLICY, "best", newer_than=Version(1, 4)) is None
        assert db.get(POLICY, "best", newer_than=Version(1, 3)) is not None

    def test_errors_about_missing_names_list_the_stored_ones(self, db: ParameterDB) -> None:
        with pytest.raises(VersionNotFound, match="stored policies: none"):
            db.get(POLICY)
        db.push(POLICY, make_parameters(Version(1, 1)), tags=["best"])
        push_steps(db, 20)
        with pytest.raises(VersionNotFound, match="'default'"):
            db.get("defalt")
        with pytest.raises(VersionNotFound, match="did you mean 'best'"):
            db.get(POLICY, "bets")
        with pytest.raises(VersionNotFound, match=r"stored: 1\.1, 1\.20 \(nearest: 1\.20\)"):
            db.get(POLICY, Version(1, 18))
        with pytest.raises(VersionNotFound):
            db.get(POLICY, "1.2", newer_than=INITIAL)

    @pytest.mark.parametrize("name", ["", ".hidden", "a/b", "..", "white space", "x" * 64, "ü"])
    def test_names_are_safe_as_file_names(self, db: ParameterDB, name: str) -> None:
        push_steps(db, 1)
        with pytest.raises(ValueError, match="allowed"):
            db.push(name, make_parameters(Version(1, 1)))
        with pytest.raises(ValueError, match="allowed"):
            db.tag(POLICY, "latest", name)
        with pytest.raises(ValueError, match="allowed"):
            db.push(POLICY, make_parameters(Version(1, 2)), tags=["good", name])
        assert stored(db) == ["1.1"]

    @pytest.mark.parametrize("name", ["latest", "1.1", "7.1500"])
    def test_a_tag_cannot_look_like_another_reference(self, db: ParameterDB, name: str) -> None:
        push_steps(db, 1)
        with pytest.raises(ValueError, match="already name versions"):
            db.tag(POLICY, "latest", name)

    def test_policies_have_separate_versions_and_tags(self, db: ParameterDB) -> None:
        db.push("opponent", make_parameters(Version(5, 1)), tags=["best"])
        push_steps(db, 1, attempt=1)
        assert db.policies() == [POLICY, "opponent"]
        assert stored(db) == ["1.1"]
        with pytest.raises(VersionNotFound):
            db.get(POLICY, "best")

    def test_a_misspelt_policy_is_not_created(self, db: ParameterDB) -> None:
        attempts: list[Callable[[], Any]] = [
            lambda: db.tag(POLICY, "latest", "best"),
            lambda: db.annotate(POLICY, Version(1, 1), {}),
            lambda: db.save_state(POLICY, make_state(Version(1, 1))),
        ]
        for attempt in attempts:
            with pytest.raises(VersionNotFound):
                attempt()
        assert db.prune(POLICY, keep_last=1) == []
        assert (db.policies(), db.versions(POLICY), db.load_state(POLICY)) == ([], [], None)

    def test_a_tag_moves_and_untagged_versions_can_be_pruned(self, store: StoreUnderTest, db: ParameterDB) -> None:
        push_steps(db, 1, 2, 3, 4)
        db.tag(POLICY, Version(1, 1), "best", "first")
        db.tag(POLICY, "1.2", "best")
        assert got(store.open(), "best").version == Version(1, 2)
        db.prune(POLICY, keep_last=1)
        assert stored(db) == ["1.1", "1.2", "1.4"]
        db.tag(POLICY, "latest", "best", "first")
        db.prune(POLICY, keep_last=1)
        assert stored(db) == ["1.4"]
        with pytest.raises(VersionNotFound, match=r"no version 1\.2"):
            db.tag(POLICY, Version(1, 2), "best")

    def test_prune_keeps_the_newest_tagged_and_latest_versions(self, store: StoreUnderTest, db: ParameterDB) -> None:
        push_steps(db, 1, 2, 3, 4, 5)
        db.tag(POLICY, Version(1, 2), "milestone")
        assert db.prune(POLICY, keep_last=2) == [Version(1, 1), Version(1, 3)]
        assert stored(store.open()) == ["1.2", "1.4", "1.5"]
        assert db.prune(POLICY, keep_last=0) == [Version(1, 4)]
        assert stored(db) == ["1.2", "1.5"]
        assert db.prune(POLICY, keep_last=0) == []
        assert db.prune(POLICY, keep_last=10) == []
        with pytest.raises(ValueError, match="keep_last is -1"):
            db.prune(POLICY, keep_last=-1)

    def test_prune_deletes_the_state_and_metadata_of_a_version(self, db: ParameterDB) -> None:
        push_steps(db, 1, 2)
        for step in (1, 2):
            db.save_state(POLICY, make_state(Version(1, step)))
            db.annotate(POLICY, Version(1, step), {"return_mean": 1.0})
        assert db.prune(POLICY, keep_last=1) == [Version(1, 1)]
        push_steps(db, 1)
        first, second = db.versions(POLICY)
        assert (first.has_state, first.metadata) == (False, {})
        assert (second.has_state, second.metadata) == (True, {"return_mean": 1.0})
        assert db.load_state(POLICY, Version(1, 1)) is None

    def test_prune_keeps_the_version_from_which_a_run_resumes(self, db: ParameterDB) -> None:
        push_steps(db, 1, 2, 3)
        db.save_state(POLICY, make_state(Version(1, 2)))
        assert db.prune(POLICY, keep_last=1) == [Version(1, 1)]
        assert got_state(db).version == Version(1, 2)

    def test_prune_keeps_the_newest_version_that_is_not_corrupt(self, store: StoreUnderTest, db: ParameterDB) -> None:
        push_steps(db, 1, 2, 3)
        store.corrupt(POLICY, Version(1, 3), "parameters")
        db.prune(POLICY, keep_last=1)
        assert got(db).version == Version(1, 2)

    def test_annotations_add_and_replace_keys(self, store: StoreUnderTest, db: ParameterDB) -> None:
        db.push(POLICY, make_parameters(Version(1, 1)), metadata={"env_steps": 10, "nested": {"a": (1, 2)}})
        db.annotate(POLICY, Version(1, 1), {"return_mean": 475.25, "env_steps": 11})
        store.open().annotate(POLICY, Version(1, 1), {"terminal": {"reason": "goal"}, "return_mean": None})
        (info,) = store.open().versions(POLICY)
        assert info.metadata == {
            "env_steps": 11,
            "nested": {"a": [1, 2]},
            "return_mean": None,
            "terminal": {"reason": "goal"},
        }
        with pytest.raises(VersionNotFound, match=r"1\.2"):
            db.annotate(POLICY, Version(1, 2), {"return_mean": 1.0})

    @pytest.mark.parametrize(
        ("value", "names"),
        [(float("nan"), "nan"), ({1: "a"}, "key 1"), (np.float32(1.0), "float32"), (object(), "object")],
    )
    def test_metadata_must_be_json(self, db: ParameterDB, value: Any, names: str) -> None:
        push_steps(db, 1)
        metadata: dict[str, Any] = {"good": 1, "deep": [value]}
        refused: list[Callable[[], None]] = [
            lambda: db.annotate(POLICY, Version(1, 1), metadata),
            lambda: db.push(POLICY, make_parameters(Version(1, 2)), metadata=metadata),
            lambda: db.save_state(POLICY, make_state(Version(1, 1), good=1, deep=[value])),
        ]
        for refuse in refused:
            with pytest.raises(ValueError, match=rf"deep\[0\].*{names}"):
                refuse()
        (info,) = db.versions(POLICY)
        assert (info.metadata, info.has_state) == ({}, False)

    def test_a_state_is_read_bit_for_bit(self, store: StoreUnderTest, db: ParameterDB) -> None:
        push_steps(db, 1, 2)
        arrays: dict[str, NDArray[Any]] = {
            "adam/m": np.random.default_rng(1).standard_normal(33, dtype=np.float32),
            "generator/torch": np.frombuffer(bytes(range(256)), dtype=np.uint8),
            "limiter": np.array(0.1),
            "nothing": np.zeros(0, dtype=np.int64),
        }
        values = {
            "optimizer_steps": 2**60,
            "marks": {"0": [1, 4]},
            "ledger": {"trained": 0.1, "ok": True, "none": None},
        }
        db.save_state(POLICY, TrainerState(version=Version(1, 1), arrays=arrays, values=values))
        state = got_state(store.open(), "1.1")
        assert (state.version, state.values) == (Version(1, 1), values)
        assert bits(state.arrays) == bits(arrays)
        assert db.load_state(POLICY, Version(1, 2)) is None
        with pytest.raises(VersionNotFound):
            db.load_state(POLICY, Version(1, 3))

    def test_resuming_skips_versions_with_corrupt_state_or_parameters(
        self, store: StoreUnderTest, db: ParameterDB
    ) -> None:

        def resumed() -> Version | None:
            state = store.open().load_state(POLICY)
            return state.version if state is not None else None

        assert resumed() is None
        push_steps(db, 1, 2, 3, 4)
        assert resumed() is None
        for step in (1, 2, 3):
            db.save_state(POLICY, make_state(Version(1, step)))
        assert resumed() == Version(1, 3)
        store.corrupt(POLICY, Version(1, 3), "state")
        assert resumed() == Version(1, 2)
        with pytest.raises(Corrupt, match="000003"):
            db.load_state(POLICY, Version(1, 3))
        store.corrupt(POLICY, Version(1, 2), "parameters")
        assert resumed() == Version(1, 1)
        store.corrupt(POLICY, Version(1, 1), "state")
        assert resumed() is None

    def test_the_resume_point_says_why_newer_versions_cannot_be_used(
        self, store: StoreUnderTest, db: ParameterDB
    ) -> None:
        assert db.resume_point(POLICY) == ResumePoint(version=None, unusable={})
        for step in (1, 2, 3):
            db.push(POLICY, make_parameters(Version(1, step)), state=make_state(Version(1, step)))
        assert db.resume_point(POLICY) == ResumePoint(version=Version(1, 3), unusable={})
        push_steps(db, 4)
        store.corrupt(POLICY, Version(1, 3), "state")
        point = store.open().resume_point(POLICY)
        assert (point.version, point.lost_steps) == (Version(1, 2), 2)
        assert [*point.unusable] == [Version(1, 4), Version(1, 3)]
        assert "missing" in point.unusable[Version(1, 4)]
        assert "000003" in point.unusable[Version(1, 3)]
        store.corrupt(POLICY, Version(1, 2), "parameters")
        store.corrupt(POLICY, Version(1, 1), "state")
        point = store.open().resume_point(POLICY)
        assert point.version is None
        assert [version.step for version in point.unusable] == [4, 3, 2, 1]

    def test_damage_names_the_versions_that_fail_verification(self, store: StoreUnderTest, db: ParameterDB) -> None:
        assert db.damage(POLICY) == {}
        for step in (1, 2, 3):
            db.push(POLICY, make_parameters(Version(1, step)), state=make_state(Version(1, step)))
        assert db.damage(POLICY) == {}
        store.corrupt(POLICY, Version(1, 1), "state")
        store.corrupt(POLICY, Version(1, 3), "parameters")
        damage = store.open().damage(POLICY)
        assert [*damage] == [Version(1, 1), Version(1, 3)]
        assert ("000001" in damage[Version(1, 1)], "000003" in damage[Version(1, 3)]) == (True, True)

    def test_latest_skips_corrupt_versions_and_a_named_one_raises(self, store: StoreUnderTest, db: ParameterDB) -> None:
        push_steps(db, 1, 2, 3)
        store.corrupt(POLICY, Version(1, 3), "parameters")
        assert got(db).version == Version(1, 2)
        assert db.get(POLICY, newer_than=Version(1, 2)) is None
        for ref in (Version(1, 3), "1.3"):
            with pytest.raises(Corrupt, match="000003"):
                db.get(POLICY, ref)
        db.tag(POLICY, "latest", "best")
        assert got(db, "best").version == Version(1, 2)
        for step in (1, 2):
            store.corrupt(POLICY, Version(1, step), "parameters")
        with pytest.raises(Corrupt, match="000003"):
            db.get(POLICY)

    def test_a_repeated_push_repairs_a_corrupt_version(self, store: StoreUnderTest, db: ParameterDB) -> None:
        push_steps(db, 1, 2)
        db.save_state(POLICY, make_state(Version(1, 2)))
        store.corrupt(POLICY, Version(1, 2), "parameters")
        push_steps(db, 2)
        assert got(db).version == Version(1, 2)
        assert got_state(db).version == Version(1, 2)

    def test_readers_read_whole_versions_while_a_writer_pushes_and_prunes(self, store: StoreUnderTest) -> None:
        num_versions = 40
        writer = store.open()
        push_steps(writer, 0)
        done = threading.Event()

        def write() -> None:
            try:
                for step in range(1, num_versions):
                    writer.push(POLICY, make_parameters(Version(1, step), size=5000), tags=["newest"])
                    writer.save_state(POLICY, make_state(Version(1, step)))
                    writer.prune(POLICY, keep_last=1)
            finally:
                done.set()

        def read() -> int:
            db = store.open()
            newest = tagged = INITIAL
            num_reads = 0
            while True:
                last = done.is_set()
                parameters, state = got(db), db.load_state(POLICY)
                assert parameters.version >= newest
                assert (parameters.vector == parameters.version.step).all()
                if parameters.version.step > 1:
                    assert state is not None
                    tagged, before = got(db, "newest").version, tagged
                    assert tagged >= before
                newest = parameters.version
                num_reads += 1
                if last:
                    assert newest == Version(1, num_versions - 1)
                    return num_reads

        with ThreadPoolExecutor(3) as pool:
            reads = [pool.submit(read) for _ in range(2)]
            pool.submit(write).result(LONG)
            assert all(future.result(LONG) > 0 for future in reads)

    def test_one_of_two_racing_writers_of_a_version_wins(self, store: StoreUnderTest) -> None:
        def push(fill: int) -> bool:
            db = store.open()
            start.wait()
            try:
                db.push(POLICY, make_parameters(Version(1, 1), fill=fill, size=5000))
            except VersionExists:
                return False
            return True

        start = threading.Barrier(4, timeout=LONG)
        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(push, range(4)))
        assert won.count(True) == 1
        assert (got(store.open()).vector == won.index(True)).all()
