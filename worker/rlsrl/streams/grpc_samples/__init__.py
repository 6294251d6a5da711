"""The sample stream between machines, over bidirectional gRPC streams: what is said and what was filled in one message.

A slot is memory of its producer's own, copied once into the message that carries it; the consumer reads it where it
arrived. Everything that the shared-memory stream promises holds here, with one difference: a slot that was posted right
before its producer was killed may never have left it. It is then counted as lost with the producer.

Producer to consumer: hello, then POST, and ALIVE while it shows life. Consumer to producer: WELCOME or REFUSED, then
CREDIT and ACK. The token is in the call's metadata and is checked before anything else.
"""

from rlsrl.streams.grpc_samples.consumer import GrpcSampleConsumer
from rlsrl.streams.grpc_samples.producer import GrpcSampleProducer

__all__ = ["GrpcSampleConsumer", "GrpcSampleProducer"]
