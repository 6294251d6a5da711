"""The rule of sections that name one stored version."""

from __future__ import annotations

import re
from typing import Any

from rlsrl.api.rules import CrossFieldRule, Fault
from rlsrl.api.spec.scalars import LATEST, VERSION_LIKE


def tag_rule(newest: str) -> CrossFieldRule:
    """Return the rule of a model with the field ``tag``. ``newest`` says how to have the newest version instead."""

    def check(section: Any) -> Fault | None:
        if section.tag == LATEST:
            return Fault(
                f"{LATEST!r} is no tag: it means another version after each one that is stored",
                f"a tag, as `rlsrl params list` shows them; for {newest}",
            )
        if section.tag is not None and re.fullmatch(VERSION_LIKE, section.tag):
            return Fault(f"{section.tag!r} is a version, not a tag", f'version: "{section.tag}"')
        return None

    return CrossFieldRule(
        at="tag",
        check=check,
        cel=f"!has(self.tag) || (self.tag != '{LATEST}' && !self.tag.matches('^{VERSION_LIKE}$'))",
        message="latest and texts like 2.1500 already name versions: no tag has such a name",
    )
