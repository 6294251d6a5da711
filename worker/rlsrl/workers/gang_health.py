"""Whether one machine's part of a gang lives: what a kubelet asks of a pod whose processes are several.

A rank that is stopped answers nobody, and all the others wait for it in their next collective call, as alive as can be.
Each launcher answers for itself and its own ranks, so that it is the stopped one's pod which is found dead.
"""

from __future__ import annotations

import contextlib
from http.client import HTTPConnection, HTTPException

from prometheus_client import CollectorRegistry

from rlsrl.api.placement import HTTP_PORT
from rlsrl.runtime.addresses import own_address
from rlsrl.runtime.exposition import HEALTH_PAGE, MetricsServer, healthy

ANSWER_SECONDS = 1.5
"""How long a rank may take to answer; together with the first that does not, less than a kubelet waits."""


def serve_health(port: int, *, ranks: int) -> MetricsServer:
    """Answer ``/healthz`` at that port of this machine for so many ranks, which serve theirs from ``HTTP_PORT`` on.

    Raises:
        ConfigurationError: the environment does not tell the machine's address.
        OSError: the port is taken.
    """
    host, _, own_port = own_address(f":{port}").rpartition(":")

    def page() -> tuple[str, bytes]:
        for rank in range(ranks):
            if not _lives(host, HTTP_PORT + rank):
                raise TimeoutError(f"rank {rank} of this machine does not answer")
        return healthy()

    return MetricsServer(CollectorRegistry(), host=host, port=int(own_port), token="", pages={HEALTH_PAGE: page})


def _lives(host: str, port: int) -> bool:
    """False for a rank that takes connections and does not answer. Whether one should be there is torchrun's affair:
    ranks may wait for other machines before they begin, and end one after the other.
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
