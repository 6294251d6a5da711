"""The health page of one machine's part of a gang: the kubelet's probe of a pod with several processes.

A rank that is stopped (SIGSTOP) answers no request. The other ranks wait for it in their next collective call and still
answer. Each launcher answers for itself and its own ranks, so that the probe fails only in the stopped rank's pod.
"""

from __future__ import annotations

import contextlib
from http.client import HTTPConnection, HTTPException

from prometheus_client import CollectorRegistry

from rlsrl.api.placement import HTTP_PORT
from rlsrl.runtime.addresses import own_address
from rlsrl.runtime.exposition import HEALTH_PAGE, MetricsServer, healthy

ANSWER_SECONDS = 1.5
"""How long a rank may take to answer. The page gives up at the first silent rank, before the kubelet's timeout."""


def serve_health(port: int, *, ranks: int) -> MetricsServer:
    """Serve ``/healthz`` on ``port`` for this machine's ranks, whose own pages start at ``HTTP_PORT``.

    Raises:
        ConfigurationError: the environment does not contain the machine's address.
        OSError: the port is taken.
    """
    host, _, own_port = own_address(f":{port}").rpartition(":")

    def page() -> tuple[str, bytes]:
        for rank in range(ranks):
            if not _is_alive(host, HTTP_PORT + rank):
                raise TimeoutError(f"rank {rank} of this machine does not answer")
        return healthy()

    return MetricsServer(CollectorRegistry(), host=host, port=int(own_port), token="", pages={HEALTH_PAGE: page})


def _is_alive(host: str, port: int) -> bool:
    """Return False for a rank that accepts a connection and does not answer.

    A rank that accepts none counts as alive: ranks start once all machines have met, and end one after the other. The
    launcher notices a rank that died.
    """
    with contextlib.closing(HTTPConnection(host.strip("[]"), port, timeout=ANSWER_SECONDS)) as connection:
        try:
            connection.request("GET", HEALTH_PAGE)
            connection.getresponse().read()
        except TimeoutError:
            return False
        except (OSError, HTTPException):
            return True
    return True
