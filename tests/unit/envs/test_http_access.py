"""Pauses of a client whose environment server is away: they double up to a limit, and jitter shortens them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from rlsrl.envs.http.access import ServerAccess
from rlsrl.envs.http.options import HttpOptions
from rlsrl.envs.unreachable import EnvironmentUnreachable
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.http_proxy import FaultyProxy, ProxyAnswer
from rlsrl.testing.servers import free_address

WHOLE_PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0, 20.0)
"""In seconds, without jitter: ``backoffSeconds`` doubles up to ``maxBackoffSeconds``."""
TICK_SECONDS = 1 / 64
AWAY, BACK = ProxyAnswer(status=503), ProxyAnswer(status=200, body=b"{}")


@pytest.fixture
def gateway() -> Iterator[FaultyProxy]:
    """A gateway without a server behind it, which is away until the test says otherwise."""
    with FaultyProxy(f"http://{free_address()}") as gateway:
        gateway.before = lambda _: AWAY
        yield gateway


class Client:
    """The access to a gateway, with a clock that only these methods advance."""

    def __init__(self, gateway: FaultyProxy, *, retries: int, breaker_failures: int) -> None:
        self.pauses: list[float] = []
        """Seconds between the tries of requests."""
        self._gateway = gateway
        self._clock = ManualClock()
        self.access = ServerAccess(
            HttpOptions(
                url=gateway.endpoint,
                backoff_seconds=WHOLE_PAUSES[0],
                max_backoff_seconds=WHOLE_PAUSES[-1],
                retries=retries,
                breaker_failures=breaker_failures,
            ),
            now=self._clock.monotonic,
            sleep=self.pauses.append,
        )

    def fail(self) -> None:
        with pytest.raises(EnvironmentUnreachable, match="status 503"):
            self.access.call("GET", "/", {})

    def probe_intervals(self) -> list[float]:
        """Return the seconds before each probe, since the one before or the breaker's opening, rounded up to ticks."""
        probed_at = [self._clock.monotonic()]
        for _ in range(round(2 * sum(WHOLE_PAUSES) / TICK_SECONDS)):
            num_requests = len(self._gateway.requests)
            assert not self.access.wait(0.0)
            if len(self._gateway.requests) > num_requests:
                probed_at.append(self._clock.monotonic())
            if len(probed_at) > len(WHOLE_PAUSES):
                break
            self._clock.advance(TICK_SECONDS)
        return [after - before for before, after in pairwise(probed_at)]

    def come_back(self) -> None:
        """Let a probe and a request succeed."""
        self._gateway.before = lambda _: BACK
        self._clock.advance(WHOLE_PAUSES[-1])
        assert self.access.wait(0.0)
        self.access.call("GET", "/", {})
        self._gateway.before = lambda _: AWAY


def check_pauses(found: Sequence[float], *, tolerance: float = 0.0) -> None:
    """Check that each pause is between half and all of its length without jitter, and that the shares differ."""
    pairs = [*zip(found, WHOLE_PAUSES, strict=True)]
    assert all(whole / 2 <= pause <= whole + tolerance for pause, whole in pairs), found
    shares = [pause / whole for pause, whole in pairs]
    assert max(shares) - min(shares) > 0.01, "jitter keeps clients from coming all at once"


def test_the_pauses_between_the_tries_of_a_request_double_up_to_the_longest(gateway: FaultyProxy) -> None:
    client = Client(gateway, retries=len(WHOLE_PAUSES), breaker_failures=100)
    for _ in range(2):
        client.fail()
        check_pauses(client.pauses)
        client.pauses.clear()


def test_the_intervals_between_the_probes_of_an_outage_double_up_to_the_longest(gateway: FaultyProxy) -> None:
    client = Client(gateway, retries=9, breaker_failures=3)
    for _ in range(2):
        client.fail()
        assert client.access.is_open
        check_pauses(client.probe_intervals(), tolerance=TICK_SECONDS)
        client.come_back()
