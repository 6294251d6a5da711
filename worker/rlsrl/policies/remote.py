"""Acting by policy workers: requests go out, distributions come back. numpy only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from typing_extensions import override

from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.slots import Slot
from rlsrl.data.specs import ArraySpec, EnvSpec
from rlsrl.data.version import INITIAL, Version
from rlsrl.policies.acting import DistributionActor, RolloutActor
from rlsrl.policies.sampling import AS_DISTRIBUTED, Exploration
from rlsrl.streams.inference import Answer, InferenceClient, InferenceFailed

MAX_FAILURES = 3
"""How often one request may fail before the actor fails. A policy worker whose policy raised ends and is restarted: one
failure is its own. Only a request that fails again and again may be the actor's fault."""


class AnswerCheck:
    """Checks the answers to one requester, which has one request under way at a time."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log
        self._failures = 0
        """Failures of the present request in a row."""

    def checked(self, result: RolloutResult | InferenceFailed, min_version: Version) -> RolloutResult | None:
        """Return the result, or None if the request failed and is to be made again.

        Raises:
            InferenceFailed: the request failed too often.
            RuntimeError: the answer comes from older weights than ``min_version``.
        """
        if isinstance(result, InferenceFailed):
            self._failures += 1
            self._log.warning("inference_failed", failures=self._failures, error=str(result))
            if self._failures >= MAX_FAILURES:
                raise result
            return None
        self._failures = 0
        if result.version < min_version:
            raise RuntimeError(
                f"a policy worker answered with version {result.version}; the slot allows {min_version} or newer"
            )
        return result


class RemotePolicy:
    """The requests that one actor process has under way at policy workers. One thread uses it."""

    def __init__(
        self,
        client: InferenceClient,
        *,
        waiting: Callable[[str], AbstractContextManager[None]],
        report_version: Callable[[Version], None],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """Send requests by ``client``, and report each newer version that answers by ``report_version``.

        The time within ``waiting("inference")`` counts as waiting for policy workers.
        """
        self.log = log
        self._client = client
        self._waiting = waiting
        self._report_version = report_version
        self._actors: dict[int, RemoteActor] = {}
        """By the number of the request that each actor has under way."""
        self._answers: deque[Answer] = deque()
        """Answers that came together with one that was returned."""
        self._version = INITIAL

    def submit(self, actor: RemoteActor, request: RolloutRequest) -> None:
        """Request a distribution for that actor. ``next_answered`` sends the request."""
        self._actors[self._client.submit(request)] = actor

    def next_answered(self, timeout: float) -> int | None:
        """Give the first answer to its actor, and return the actor's group. None: no answer within ``timeout`` seconds.

        Raises:
            InferenceFailed: one request failed too often.
            RuntimeError: a policy worker answered with older weights than the slot allows.
        """
        if self._answers:
            # Send the requests made since. If they waited for the next step's, groups that were answered together
            # would always be answered together, and no group would step while another waits.
            self._answers.extend(self._client.wait(0.0))
        elif self._actors:
            with self._waiting("inference"):
                self._answers.extend(self._client.wait(timeout))
        if not self._answers:
            return None
        number, result = self._answers.popleft()
        actor = self._actors.pop(number)
        if isinstance(result, RolloutResult) and result.version > self._version:
            self._version = result.version
            self._report_version(result.version)
        actor.receive(result)
        return actor.group


class RemoteActor(DistributionActor, RolloutActor):
    """Acts by policy workers for one group of lanes: one request per step."""

    def __init__(
        self,
        policy: RemotePolicy,
        env_spec: EnvSpec,
        *,
        group: int,
        num_steps: int,
        num_lanes: int,
        rng: np.random.Generator,
        exploration: Exploration = AS_DISTRIBUTED,
        state: Mapping[str, ArraySpec] | None = None,
    ) -> None:
        """Act for the group of that number; the other arguments are those of ``DistributionActor``."""
        super().__init__(
            env_spec, num_steps=num_steps, num_lanes=num_lanes, rng=rng, exploration=exploration, state=state
        )
        self.group = group
        """The number of the group that goes on when the answer comes."""
        self._policy = policy
        self._result: RolloutResult | None = None
        self._check = AnswerCheck(policy.log)

    @override
    def begin(self, slot: Slot) -> None:
        """Start on a slot: draw noise for all its steps, and request the first distribution."""
        super().begin(slot)
        self._policy.submit(self, self._request(0))

    @override
    def act(self, step: int) -> NDArray[Any] | None:
        """Return the actions of that step by the answer. Without one, request it and return None."""
        result, self._result = self._result, None
        if result is None:
            self._policy.submit(self, self._request(step))
            return None
        return self._choose(step, result)

    def receive(self, result: RolloutResult | InferenceFailed) -> None:
        """Take the answer that the next ``act`` acts by. After a failure the next ``act`` requests it again.

        Raises:
            InferenceFailed: the request failed too often.
            RuntimeError: the answer comes from older weights than the slot allows.
        """
        self._result = self._check.checked(result, self._min_version)
