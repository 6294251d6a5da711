"""The policy worker: evaluates the policy for many actors. It keeps no state between requests.

The main thread gets weights: at a configured frequency, and at once when a request asks for newer weights. Other
threads (``rlsrl.workers.inference``) evaluate the policy and send results.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from typing_extensions import override

from rlsrl.api.resolved import PolicyWorkerConfig
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Parameters, SourceTimeout
from rlsrl.runtime.frequency import FrequencyControl
from rlsrl.runtime.worker import PollResult, Worker
from rlsrl.workers.build.policy import PolicyParts, build_policy_worker
from rlsrl.workers.context import WorkerContext
from rlsrl.workers.inference import InferenceTally

WAKE_SECONDS = 0.2
"""How long the main thread waits at most between two checks of its threads and for exit."""
RESUME = "resume"
"""The reason to wait of a paused policy worker while requests wait for weights."""
EVALUATION_DEADLINE_SECONDS = 60.0
"""How long the present evaluation may still take when the worker exits."""
SWITCH_SECONDS = 0.0005
"""Python's switch interval: three threads and those of gRPC share the interpreter, and none should wait longer."""


class PolicyWorker(Worker[PolicyWorkerConfig]):
    """Answers actors until it exits. One poll checks once for newer weights."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(report=context.report_stats, log=context.log, clock=context.clock)
        self._context = context
        self._parts: PolicyParts | None = None
        self._pull = FrequencyControl()
        self._version: Version | None = None
        """The version of the newest weights."""
        self._inference_tally = InferenceTally()
        """Counts since the last statistics."""

    @override
    def _configure(self, config: PolicyWorkerConfig) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        self._pull = FrequencyControl(seconds=config.parameter_pull_seconds, clock=self._clock)
        self._wait_seconds = min(WAKE_SECONDS, config.parameter_pull_seconds)
        self._parts = build_policy_worker(config, self._context, still_wanted=lambda: not self.exiting)
        if self._parts is not None:
            self._parts.inference.start()

    @override
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
        self._inference_tally.add(done)
        return PollResult(num_samples=done.requests, num_batches=done.batches)

    def _newer(self, parts: PolicyParts) -> Parameters | None:
        """Return the weights that a request waits for, or, at the configured frequency, any newer weights."""
        wanted = parts.latest.wanted(self._wait_seconds)
        if wanted is None:
            return parts.parameters.get(newer_than=self._version) if self._pull.check() else None
        # The evaluating thread waits, too: the whole worker counts as waiting.
        with self._context.waiting("parameters"):
            try:
                return parts.parameters.wait(wanted, timeout=WAKE_SECONDS)
            except SourceTimeout:
                return None

    @override
    def _rest(self) -> bool:
        """Look for no newer weights. Requests that the present ones satisfy are answered; others wait."""
        parts = self._parts
        assert parts is not None, "without parts it is exiting"
        self._context.join_session.check()
        parts.inference.check()
        self._inference_tally.add(parts.predictor.take_tally())
        if parts.latest.wanted(0) is None:
            return super()._rest()
        with self._context.waiting(RESUME):
            return super()._rest()

    @override
    def _shutdown(self) -> None:
        if self._parts is not None:
            with self._parts.resources:
                self._parts.inference.close(EVALUATION_DEADLINE_SECONDS)

    @override
    def _stats(self) -> Mapping[str, float]:
        tally, self._inference_tally = self._inference_tally, InferenceTally()
        return tally.statistics()
