"""What the user got wrong, as opposed to what went wrong: a worker that meets it exits with code 2 and stays down."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

CONFIGURATION_ERROR = 2
"""Exit code of a worker whose configuration cannot work: starting it again would end the same way."""


class ConfigurationError(ValueError):
    """The experiment cannot run as written, however often it is tried. The text says where, what and the cure."""


def did_you_mean(value: str, candidates: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` with the nearest candidate, or ``""`` when none is near."""
    nearest = get_close_matches(value, list(candidates), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""
