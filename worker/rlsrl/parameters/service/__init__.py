"""Weights over gRPC, for processes that do not reach the store: the stored versions, and the newest one live.

``ParameterService`` runs in the coordinator, which alone mounts the volume. ``ServiceParameterDB`` is the database of
every other process. A trainer's ``LivePublisher`` sends each version into the coordinator's memory, from where a
``LiveReader`` receives it: they replace shared memory between pods. Stored and live weights use the same transfer
protocol (``transfers``).
"""

from rlsrl.parameters.service.client import ServiceParameterDB
from rlsrl.parameters.service.failures import ServiceRefused, ServiceUnavailable, TransferRefused
from rlsrl.parameters.service.live_publisher import LivePublisher
from rlsrl.parameters.service.live_reader import LiveReader
from rlsrl.parameters.service.server import ParameterService
from rlsrl.parameters.service.transfers import READS

__all__ = [
    "READS",
    "LivePublisher",
    "LiveReader",
    "ParameterService",
    "ServiceParameterDB",
    "ServiceRefused",
    "ServiceUnavailable",
    "TransferRefused",
]
