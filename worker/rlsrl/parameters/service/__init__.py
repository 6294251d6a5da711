"""Weights over gRPC: the stored versions of whoever reaches the store, and the newest one live.

``ParameterService`` runs in the coordinator, which alone mounts the volume. ``ServiceParameterDB`` is the database of
everybody else. A trainer's ``LivePublisher`` sends each version into the coordinator's memory, from where a
``LiveReader`` gets it: what shared memory does on one machine. Large things travel as transfers, see ``transfers``.
"""

from rlsrl.parameters.service.client import ServiceParameterDB
from rlsrl.parameters.service.failures import ServiceRefused, ServiceUnavailable, TransferRefused
from rlsrl.parameters.service.live_publisher import LivePublisher
from rlsrl.parameters.service.live_reader import LiveReader
from rlsrl.parameters.service.server import ParameterService

__all__ = [
    "LivePublisher",
    "LiveReader",
    "ParameterService",
    "ServiceParameterDB",
    "ServiceRefused",
    "ServiceUnavailable",
    "TransferRefused",
]
