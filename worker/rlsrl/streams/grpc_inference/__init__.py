"""Inference streams between processes and machines, over bidirectional gRPC streams.

One stream a client, to one server at a time; one message a request or result, with all its lanes. Both ends run on
grpc.aio: the server on an event loop in a thread of its own, which carries many small streams; the client on one that
turns in its owner's thread while that waits.
"""

from rlsrl.streams.grpc_inference.client import GrpcInferenceClient
from rlsrl.streams.grpc_inference.server import GrpcInferenceServer

__all__ = ["GrpcInferenceClient", "GrpcInferenceServer"]
