"""A program that adds a role of its own, the counter, to the table of roles. For ``test_toy_role``.

``toy_role.py manifests`` prints the manifests of an experiment. ``toy_role.py configs FOLDER`` writes the configs of
its roles. ``toy_role.py work ...`` is ``python -m rlsrl.workers ...``.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from rlsrl.api import roles
from rlsrl.api.resolved import RoleConfig
from rlsrl.api.role_configs import ResolutionContext
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.workers.context import WorkerContext


class CounterConfig(RoleConfig):
    """The config of the counter."""

    first: int
    """The number it starts from."""


def counter_config(context: ResolutionContext) -> CounterConfig:
    """Return the counters' config."""
    return CounterConfig(**context.common, first=context.spec.seed)


class CounterWorker(Worker[CounterConfig]):
    """Reports the number of its polls until the coordinator commands its exit."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(report=context.report_stats, log=context.log, clock=context.clock)
        self._context = context
        self._count = 0
        self._woken = threading.Event()

    @override
    def exit(self) -> None:
        super().exit()
        self._woken.set()

    def _configure(self, config: CounterConfig) -> None:
        self._count = config.first

    def _poll(self) -> PollResult:
        self._context.join_session.check()
        self._count += 1
        self._context.report_stats({"count": float(self._count)})
        self._woken.wait(0.1)
        return PollResult()

    def _shutdown(self) -> None:
        pass

    def _stats(self) -> Mapping[str, float]:
        return {"count": float(self._count)}


COUNTER = roles.Role(
    name="counter",
    count=lambda _: 2,
    config=CounterConfig,
    resolve=counter_config,
    worker="toy_role:CounterWorker",
)


def main(command: str, *arguments: str) -> int:
    """Run the command line's action; import modules that read the table only after the role is in it."""
    roles.ROLES = (*roles.ROLES, COUNTER)
    if command == "manifests":
        from rlsrl.testing.documents import minimal
        from rlsrl_operator.manifests import render
        from rlsrl_operator.testing import context_of

        sys.stdout.write(json.dumps(render(context_of(minimal()))))
    elif command == "configs":
        from rlsrl.api.load import load_text
        from rlsrl.api.placement import local_placement
        from rlsrl.api.resolve import resolve
        from rlsrl.testing.documents import minimal

        folder = Path(arguments[0])
        experiment = load_text(json.dumps(minimal()))
        placement = local_placement(run_uid=folder.name, run_folder=folder)
        for role, config in resolve(experiment, placement).configs.items():
            (folder / f"{role}.json").write_text(config.to_json())
    else:
        from rlsrl.workers.__main__ import main as work

        sys.argv = ["rlsrl.workers", *arguments]
        return work()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
