"""What a trainer that resumes continues from, and what is lost, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsrl.local.worker_report import mapping, number
from rlsrl.parameters.protocols import VersionInfo


def resumption_text(info: VersionInfo, status: Mapping[str, Any] | None) -> str:
    """Return the version from which training resumes, and the training steps after it that are known to be lost.

    Args:
        info: The version.
        status: The last status document of the trainer that ended; None: nothing is known of lost steps. Training may
            have gone on after it, so the loss is a lower bound.
    """
    env_steps = number(info.metadata, "env_steps")
    text = f"from version {info.version}" + _in_parentheses("", env_steps)
    totals = mapping(status, "totals")
    lost = (number(totals, "train_steps") or 0.0) - info.version.step
    if lost < 1:
        return text
    reached = _in_parentheses("to ", number(totals, "env_steps"))
    return f"{text}; training steps lost after it: at least {lost:,.0f}{reached}"


def _in_parentheses(preposition: str, env_steps: float | None) -> str:
    return "" if env_steps is None else f" ({preposition}{env_steps:,.0f} env steps)"
