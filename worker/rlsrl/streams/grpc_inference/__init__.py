"""The inference stream between processes and machines, over bidirectional gRPC streams.

Each client has one stream, to one server at a time. Each request and each result is one message with all its lanes.
Both ends use grpc.aio. The server runs it on an event loop in its own thread, which serves many small streams. The
client runs its event loop in its owner's thread, while that thread waits.
"""
