"""Checks the environment of an actor's config: ``python -m rlsrl.workers.environment_check CONFIG REPORT``.

``rlsrl run`` starts it beside the workers (``rlsrl.local.environment_check``). It writes into the file REPORT:
problems, one a line, an empty line, then warnings. If the environment cannot be made or raises, there is no such file:
the actors report that.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

from rlsrl.api.resolved import ActorConfig
from rlsrl.envs.check import examine
from rlsrl.envs.factory import make_environment
from rlsrl.runtime.process import PARENT_VARIABLE, die_with_parent
from rlsrl.workers.build.common import environment_source

NUM_STEPS = 50
"""Steps of the check. A broken contract shows in the first few."""
NICENESS = 19
"""Niceness of the check: the workers that start meanwhile come first."""


def main() -> None:
    """Check, and write what was found."""
    config, report = map(Path, sys.argv[1:])
    os.nice(NICENESS)
    if (parent := os.environ.get(PARENT_VARIABLE)) is not None:
        die_with_parent(int(parent))
    source = environment_source(ActorConfig.from_json(config.read_bytes()).environment)
    with closing(make_environment(source)) as env:
        findings = examine(env, num_steps=NUM_STEPS)
        lines = [*findings.problems, "", *findings.warnings]
        report.write_text("".join(f"{' '.join(line.split())}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
