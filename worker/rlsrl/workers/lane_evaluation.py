"""Who answers the requests of lanes that act in threads: a policy in this process, or policy workers.

Both run in the actor's one main thread, while it waits for its environments. All lanes that wait at a moment are
answered together.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import structlog
from typing_extensions import override

from rlsrl.data.inference import RolloutRequest, RolloutResult, batch_observations, batch_states, split_results
from rlsrl.data.version import INITIAL, Version
from rlsrl.envs.threads import EnvironmentThreads
from rlsrl.policies.acting import Policy
from rlsrl.policies.lane_requests import LaneRequest, LaneRequests, by_slot
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
            for lanes in by_slot(self._requests.take()):
                results = self._policies[lanes[0].slot].predict([each.request for each in lanes])
                for each, result in zip(lanes, results, strict=True):
                    self._requests.answer(each.lane, result)
            if is_due() or left <= 0:
                return


class _UnderWay(NamedTuple):
    """A request that a policy worker has."""

    lanes: Sequence[LaneRequest]
    """Whose requests it joins, all for one slot."""
    check: AnswerCheck


class RemoteEvaluation(LaneEvaluation):
    """Answers through policy workers, by one request for all lanes of a slot that wait at that moment.

    The lanes of a request get the same version. The policy worker batches requests, of all actors.
    """

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
        self._log = log
        self._under_way: dict[int, _UnderWay] = {}
        """By the client's number."""
        self._num_waiting = 0
        """Lanes whose requests are under way."""
        self._version = INITIAL
        requests.on_request = client.wake
        environments.call_on_change(client.wake)

    @override
    def wait(self, is_due: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            self._environments.check()
            for lanes in by_slot(self._requests.take()):
                self._submit(_UnderWay(lanes, AnswerCheck(self._log)))
                self._num_waiting += len(lanes)
            left = deadline - time.monotonic()
            if is_due() or left <= 0:
                return
            all_wait = self._num_waiting == self._environments.num_envs
            with self._waiting("inference") if all_wait else nullcontext():
                answers = self._client.wait(left)
            for number, result in answers:
                self._pass_on(self._under_way.pop(number), result)

    def _submit(self, asked: _UnderWay) -> None:
        requests = [each.request for each in asked.lanes]
        joined = RolloutRequest(
            observation=batch_observations(requests),
            state=batch_states(requests),
            min_version=requests[0].min_version,
        )
        self._under_way[self._client.submit(joined)] = asked

    def _pass_on(self, asked: _UnderWay, result: RolloutResult | InferenceFailed) -> None:
        requests = [each.request for each in asked.lanes]
        checked = asked.check.checked(result, requests[0].min_version)
        if checked is None:
            self._submit(asked)
            return
        self._num_waiting -= len(asked.lanes)
        if checked.version > self._version:
            self._version = checked.version
            self._report_version(checked.version)
        parts = split_results(requests, checked.distribution, checked.version, checked.state)
        for each, part in zip(asked.lanes, parts, strict=True):
            self._requests.answer(each.lane, part)
