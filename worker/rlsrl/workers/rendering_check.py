"""Checks that an evaluator's environment renders: ``python -m rlsrl.workers.rendering_check CONFIG REPORT``.

``rlsrl run`` starts it before the workers of a run with ``evaluators.video`` (``rlsrl.local.rendering_check``). It
writes why there is no picture into the file REPORT. If the environment cannot be made or reset at all, the file is
empty: the actors report that. During the call of ``render()`` the file has ``IN_RENDER``: it may end the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import override

from rlsrl.api.resolved import EvaluatorConfig
from rlsrl.envs.factory import make_environment
from rlsrl.envs.rendering import ActingPolicy, NoVideo, episode_frames, rendering_environment
from rlsrl.runtime.call_board import CallName
from rlsrl.runtime.errors import USERS_ERRORS, ConfigurationError, EnvironmentFailed
from rlsrl.runtime.process import PARENT_VARIABLE, die_with_parent
from rlsrl.workers.build.evaluator import evaluator_plan, source_of
from rlsrl.workers.evaluation import evaluation_seeds

IN_RENDER = "its render() ends the process"
"""The report during the call."""

_Result = TypeVar("_Result")


class _NoPolicy(ActingPolicy):
    """Chooses nothing: the first frame comes before the first action."""

    @override
    def act(self, observation: Any, *, deterministic: bool = True) -> Any:
        raise AssertionError("one frame is enough")

    @override
    def restart(self) -> None:
        """Do nothing: there is no state."""


class _Reporter:
    """Makes the calls, and notes that of ``render``. An ``EnvironmentCaller``."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self.renders = False

    def __call__(self, name: CallName, call: Callable[..., _Result], /, *arguments: Any, **options: Any) -> _Result:
        if name == "render":
            self.renders = True
            self._report.write_text(IN_RENDER, encoding="utf-8")
        return call(*arguments, **options)


def main() -> None:
    """Check, and write why there is no picture."""
    path, report = map(Path, sys.argv[1:])
    if (parent := os.environ.get(PARENT_VARIABLE)) is not None:
        die_with_parent(int(parent))
    config = EvaluatorConfig.from_json(path.read_bytes())
    plan, caller, problem = evaluator_plan(config, 0), _Reporter(report), ""
    seeds = evaluation_seeds(plan.seed, plan.num_environments)
    source = source_of(plan, 0, seeds)
    try:
        env = rendering_environment(source, caller=caller)
        next(episode_frames(_NoPolicy(), env, seeds[:1], max_steps=1, deterministic=True, played=[], caller=caller))
    except NoVideo as error:
        problem = str(error)
    except ConfigurationError as error:
        with contextlib.suppress(*USERS_ERRORS):
            make_environment(source)
            problem = str(error)  # Only with a render_mode.
    except EnvironmentFailed as error:
        problem = str(error) if caller.renders else ""
    report.write_text(problem, encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # Without what the environment does at the end of its process.


if __name__ == "__main__":
    main()
