"""Every role is scaled up and down during training: other pods stay, and no transition is lost."""

from __future__ import annotations

import json
import time

import pytest

from rlsrl.api.pods import is_ready
from rlsrl.testing.faults import NAME, begin, goes_on, lives, reach_the_goal
from rlsrl.testing.kubectl import Namespace
from rlsrl.testing.recovery import Recovered
from rlsrl.testing.scaling import SCALES
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]

EVERYBODY = frozenset({"actor", "policy", "buffer", "trainer", "evaluator"})


def test_every_role_is_scaled(where: Namespace, recovered: Recovered) -> None:
    experiment = begin(where)
    (coordinator,) = lives(experiment, without=[*EVERYBODY]).items()
    books: list[str] = []
    for field, role, replicas in SCALES:
        began = time.monotonic()
        patch = json.dumps({"spec": {field: {"replicas": replicas}}})
        where.kubectl("patch", "rlexperiment", NAME, "--type=merge", "-p", patch)

        def is_so(role: str = role, replicas: int = replicas) -> bool:
            settled = experiment.object["metadata"]["generation"] == experiment.status["observedGeneration"]
            there = experiment.pods()
            return settled and all(map(is_ready, there)) and len(experiment.pods(role)) == replicas

        try:
            until(is_so, f"{replicas} of {field}")
            goes_on(experiment)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{experiment.status_text()}") from None
        recovered(f"{field} scaled to {replicas}", time.monotonic() - began)
        books.append(f"{field} scaled to {replicas}: {experiment.ledger()}")
    assert lives(experiment, without=[*EVERYBODY]) == dict([coordinator])
    assert experiment.status["restarts"] == 0
    reach_the_goal(experiment)
    ledger = experiment.ledger()
    assert not any(ledger["lost"].values()), "\n".join([*books, f"at the end: {ledger}"])
