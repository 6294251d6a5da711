"""``hack/install_bytes.py`` measures what extras install; what ``make run`` installs stays small."""

from __future__ import annotations

import pytest
from install_bytes import FORMER_BYTES, besides_pytorch, distributions, extras_of, sizes
from packaging.requirements import Requirement


def test_make_run_installs_less_than_half_of_its_former_bytes_besides_pytorch() -> None:
    found = sizes(extras_of("RUN_EXTRAS"))
    besides = besides_pytorch(found)
    assert found["torch"] > 0
    assert {"numpy", "gymnasium", "grpcio", "matplotlib"} <= set(besides)
    assert all(size > 0 for size in besides.values()), besides
    largest = sorted(besides.items(), key=lambda item: item[1], reverse=True)[:5]
    assert sum(besides.values()) < FORMER_BYTES / 2, largest


def test_extras_bring_their_own_requirements_and_markers_decide() -> None:
    assert "mujoco" in distributions([Requirement("gymnasium[mujoco]")])
    assert "mujoco" not in distributions([Requirement("gymnasium")])
    assert distributions([Requirement("gymnasium; python_version < '3'")]) == set()


def test_a_variable_that_the_makefile_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="no variable NO_EXTRAS"):
        extras_of("NO_EXTRAS")
