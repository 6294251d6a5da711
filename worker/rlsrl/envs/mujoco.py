"""MuJoCo's warnings, into the logs. Left alone it appends them to ``MUJOCO_LOG.TXT`` in whatever folder it runs in."""

from __future__ import annotations

import logging
import sys


def log_mujoco_warnings() -> None:
    """Have them logged from now on, by ``logging``, if MuJoCo has been imported; loading a model already warns.

    Of the process, so that it may be called again and again.
    """
    mujoco = sys.modules.get("mujoco")
    if mujoco is not None:
        mujoco.set_mju_user_warning(logging.getLogger("mujoco").warning)
