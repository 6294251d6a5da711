"""The policy worker: evaluates the policy for many actors at a time. It keeps nothing between two requests.

The main thread, here, gets weights: at a configured frequency, and at once when a request asks for newer ones than
there are. Others (``rlsrl.workers.inference``) evaluate and send: two, or the one in which the server receives.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rlsrl.api.resolved import PolicyWorkerConfig
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters, SourceTimeout
from rlsrl.runtime.frequency import FrequencyControl
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.workers.build.policy import PolicyParts, build_policy_worker
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.inference import InferenceTally

WAKE_SECONDS = 0.2
"""How long the main thread waits before it looks around."""
EVALUATION_DEADLINE_SECONDS = 60.0
"""How long the evaluation at hand may take when the worker is asked to exit."""
SWITCH_SECONDS = 0.0005
"""A thread that is ready gets the interpreter within that time: three of them share it, with gRPC's own."""


class PolicyWorker(Worker[PolicyWorkerConfig]):
    """Answers actors until it is told to exit. One poll is one look for newer weights."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(report=context.report_stats, log=context.log, clock=context.clock)
        self._context = context
        self._parts: PolicyParts | None = None
        self._pull = FrequencyControl()
        self._version: Version | None = None
        """The newest weights that were got."""
        self._since = InferenceTally()
        """What was done since the last statistics."""

    def _configure(self, config: PolicyWorkerConfig) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        self._pull = FrequencyControl(seconds=config.parameter_pull_seconds, clock=self._clock)
        self._patience = min(WAKE_SECONDS, config.parameter_pull_seconds)
        self._parts = build_policy_worker(config, self._context, still_wanted=lambda: not self.exiting)
        if self._parts is not None:
            self._parts.inference.start()

    def _poll(self) -> PollResult:
        parts = self._parts
        assert parts is not None, "without parts it is exiting"
        self._context.join_session.check()
        parts.inference.check()
        newer = self._newer(parts)
        if newer is not None:
            self._version = newer.version
            parts.inference.put(newer)
            self._context.report_version(newer.version)
        done = parts.predictor.take_tally()
        self._since.add(done)
        return PollResult(num_samples=done.requests, num_batches=done.batches)

    def _newer(self, parts: PolicyParts) -> Parameters | None:
        """Newer weights: those that a request waits for, or any at all when it is time to look."""
        wanted = parts.fresh.wanted(self._patience)
        if wanted is None:
            return parts.parameters.get(newer_than=self._version) if self._pull.check() else None
        # It is who evaluates that waits: it counts as this worker's own meanwhile.
        with self._context.waiting("parameters"):
            try:
                return parts.parameters.wait(wanted, timeout=WAKE_SECONDS)
            except SourceTimeout:
                return None

    def _shutdown(self) -> None:
        if self._parts is not None:
            with self._parts.resources:
                self._parts.inference.close(EVALUATION_DEADLINE_SECONDS)

    def _stats(self) -> Mapping[str, float]:
        tally, self._since = self._since, InferenceTally()
        return tally.statistics()
