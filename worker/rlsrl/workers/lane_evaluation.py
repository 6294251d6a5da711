"""Who answers the requests of lanes that act in threads: a policy in this process, or policy workers.

Both run in the actor's one main thread, while it waits for its environments. All lanes that wait at a moment are
answered together.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import structlog
from typing_extensions import override

from rlsrl.data.inference import RolloutResult
from rlsrl.data.version import INITIAL, Version
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.policies.acting import Policy
from rlsrl.policies.lane_requests import LaneRequest, LaneRequests
from rlsrl.policies.remote import AnswerCheck
from rlsrl.streams.inference import InferenceClient, InferenceFailed


class LaneEvaluation(ABC):
    """Waits for the environments' threads, and answers the requests that they make meanwhile."""

    def __init__(self, environments: EnvironmentThreads, requests: LaneRequests) -> None:
        self._environments = environments
        self._requests = requests

    def close(self) -> None:
        """Answer no more requests: lanes that wait end. Idempotent."""
        self._requests.close()

    @abstractmethod
    def wait(self, is_due: Callable[[], bool], timeout: float) -> None:
        """Answer requests until ``is_due`` is true, at most for ``timeout`` seconds.

        Raises:
            Whatever ``EnvironmentThreads.wait`` and the evaluation raise.
        """


class LocalEvaluation(LaneEvaluation):
    """Answers by policies in this process: one evaluation for all lanes of a slot that wait at that moment."""

    def __init__(self, environments: EnvironmentThreads, requests: LaneRequests, policies: Sequence[Policy]) -> None:
        """Answer by the policy at ``LaneRequest.slot``: while one slot is being filled, the next has newer weights."""
        super().__init__(environments, requests)
        self._policies = policies
        requests.on_request = environments.wake

    @override
    def wait(self, is_due: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            self._environments.wait(lambda: is_due() or bool(self._requests), max(left, 0.0))
            taken = self._requests.take()
            for slot, policy in enumerate(self._policies):
                if asked := [each for each in taken if each.slot == slot]:
                    results = policy.predict([each.request for each in asked])
                    for each, result in zip(asked, results, strict=True):
                        self._requests.answer(each.lane, result)
            if is_due() or left <= 0:
                return


class RemoteEvaluation(LaneEvaluation):
    """Answers through policy workers. Each lane's request goes out at once; the policy worker batches them."""

    def __init__(
        self,
        environments: EnvironmentThreads,
        requests: LaneRequests,
        client: InferenceClient,
        *,
        waiting: Callable[[str], AbstractContextManager[None]],
        report_version: Callable[[Version], None],
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """Send requests by ``client``, and report each newer version that answers by ``report_version``.

        The time within ``waiting("inference")`` counts as waiting for policy workers: while every lane waits.
        """
        super().__init__(environments, requests)
        self._client = client
        self._waiting = waiting
        self._report_version = report_version
        self._under_way: dict[int, LaneRequest] = {}
        """By the client's number."""
        self._checks = [AnswerCheck(log) for _ in range(environments.num_envs)]
        """By lane."""
        self._version = INITIAL
        requests.on_request = client.wake
        environments.call_on_change(client.wake)

    @override
    def wait(self, is_due: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            self._environments.check()
            for asked in self._requests.take():
                self._submit(asked)
            left = deadline - time.monotonic()
            if is_due() or left <= 0:
                return
            all_wait = len(self._under_way) == self._environments.num_envs
            with self._waiting("inference") if all_wait else nullcontext():
                answers = self._client.wait(left)
            for number, result in answers:
                self._pass_on(self._under_way.pop(number), result)

    def _submit(self, asked: LaneRequest) -> None:
        self._under_way[self._client.submit(asked.request)] = asked

    def _pass_on(self, asked: LaneRequest, result: RolloutResult | InferenceFailed) -> None:
        checked = self._checks[asked.lane].checked(result, asked.request.min_version)
        if checked is None:
            self._submit(asked)
            return
        if checked.version > self._version:
            self._version = checked.version
            self._report_version(checked.version)
        self._requests.answer(asked.lane, checked)
