from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from rlsrl.envs.factory import EnvironmentSource, make_environment


def test_warnings_are_logged_and_nothing_is_left_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING, logger="mujoco"):
        env = make_environment(EnvironmentSource(id="HalfCheetah-v5"))
        try:
            env.reset(seed=0)
            env.unwrapped.data.qvel[:] = 1e12  # type: ignore[attr-defined]
            env.step(np.zeros(6, np.float32))
        finally:
            env.close()
    assert "The simulation is unstable" in caplog.text
    assert list(tmp_path.iterdir()) == []
