"""A proxy in front of an environment server that loses and delays answers, and counts the steps that were answered.

``python -m rlsrl.testing.step_witness --upstream URL --port PORT --share S --file FILE`` runs one for pods.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from typing_extensions import override

from rlsrl.envs.http.protocol import SESSIONS
from rlsrl.runtime.durable import write_durably
from rlsrl.testing.closing import ClosedAtExit
from rlsrl.testing.http_proxy import FaultyProxy, Request

LATE_SECONDS = 10.0
"""How late a late answer is. Clients have given it up then: their ``timeoutSeconds`` are fewer."""
WRITE_SECONDS = 0.5
"""Seconds between two writes of the file of a witness in a pod."""


@dataclass
class SessionRecord:
    """The steps of one session, as the witness saw them."""

    purpose: str
    """``EnvironmentPlace.purpose`` of its environment."""
    rank: int
    asked: set[int] = field(default_factory=set)
    """Keys of steps that a client has sent."""
    answered: set[int] = field(default_factory=set)
    """Keys of steps whose answer a client has got."""


class StepWitness(ClosedAtExit):
    """Forwards requests. Of the steps, some are refused, and the answers to some come too late."""

    def __init__(self, upstream: str, address: tuple[str, int] = ("127.0.0.1", 0), *, share: float) -> None:
        """Stand in front of the server ``upstream``, a URL. ``share``: of the tries of steps that fail."""
        self._random = random.Random(0)
        self._share = share
        self._lock = threading.Lock()
        self._sessions: dict[str, SessionRecord] = {}
        self._late: set[int] = set()
        """Numbers of requests whose answer comes too late."""
        self.num_faults: Counter[str] = Counter()
        """Faults that were caused, by kind."""
        self._proxy = FaultyProxy(upstream, address)
        self._proxy.before, self._proxy.after = self._before, self._after

    @property
    def url(self) -> str:
        """Its URL on this machine."""
        return self._proxy.endpoint

    def answered(self, purpose: str) -> Counter[int]:
        """Return, by rank, the number of answered steps of environments with that purpose."""
        found: Counter[int] = Counter()
        for each in self._sessions_of(purpose):
            found[each.rank] += len(each.answered)
        return found

    def unanswered(self, purpose: str) -> Counter[int]:
        """Return, by rank, the number of steps that a client has asked for and got no answer to."""
        found: Counter[int] = Counter()
        for each in self._sessions_of(purpose):
            found[each.rank] += len(each.asked - each.answered)
        return found

    def most_unanswered(self, purpose: str) -> int:
        """Return the most steps of one session of environments with that purpose that a client got no answer to."""
        return max((len(each.asked - each.answered) for each in self._sessions_of(purpose)), default=0)

    def to_json(self) -> dict[str, Any]:
        """Return what the witness saw, by purpose, as a JSON value. Steps of all sessions are by rank."""
        with self._lock:
            purposes = sorted({each.purpose for each in self._sessions.values()})
        return {
            "faults": dict(self.num_faults),
            "answered": {purpose: dict(self.answered(purpose)) for purpose in purposes},
            "unanswered": {purpose: dict(self.unanswered(purpose)) for purpose in purposes},
            "most_unanswered": {purpose: self.most_unanswered(purpose) for purpose in purposes},
        }

    @override
    def close(self) -> None:
        self._proxy.close()

    def _sessions_of(self, purpose: str) -> list[SessionRecord]:
        with self._lock:
            return [each for each in self._sessions.values() if each.purpose == purpose]

    def _before(self, request: Request) -> bool:
        name, _, call = request.path.removeprefix(f"{SESSIONS}/").partition("/")
        if request.method == "PUT":
            place = json.loads(request.body)["place"] or {"purpose": "", "rank": 0}
            with self._lock:
                self._sessions.setdefault(name, SessionRecord(purpose=place["purpose"], rank=place["rank"]))
        if call != "step":
            return True
        with self._lock:
            self._sessions[name].asked.add(_key(request))
            if self._random.random() >= self._share:
                return True
            kind = self._random.choice(["late", "refused"])
            self.num_faults[kind] += 1
            if kind == "late":
                self._late.add(request.number)
            return kind == "late"

    def _after(self, request: Request) -> bool:
        name, _, call = request.path.removeprefix(f"{SESSIONS}/").partition("/")
        if request.number in self._late:
            time.sleep(LATE_SECONDS)
        elif call == "step" and request.status == HTTPStatus.OK:
            with self._lock:
                self._sessions[name].answered.add(_key(request))
        return True


def _key(request: Request) -> int:
    return int(json.loads(request.body)["key"])


def main() -> None:
    """Run a witness until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--share", type=float, required=True)
    parser.add_argument("--file", type=Path, required=True)
    arguments = parser.parse_args()
    with StepWitness(arguments.upstream, ("0.0.0.0", arguments.port), share=arguments.share) as witness:
        while True:
            write_durably(arguments.file, json.dumps(witness.to_json()).encode())
            time.sleep(WRITE_SECONDS)


if __name__ == "__main__":
    main()
