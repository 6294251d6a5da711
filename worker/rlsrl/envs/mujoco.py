"""Sends MuJoCo's warnings to the logs. By default MuJoCo appends them to ``MUJOCO_LOG.TXT`` in the working folder."""

from __future__ import annotations

import logging
import sys


def log_mujoco_warnings() -> None:
    """Log MuJoCo's warnings by ``logging`` from now on, if this process has imported MuJoCo. Idempotent.

    Call it before a model is loaded: loading can warn, too.
    """
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None:
        mujoco.set_mju_user_warning(logging.getLogger("mujoco").warning)
