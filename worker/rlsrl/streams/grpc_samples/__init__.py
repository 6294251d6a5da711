"""The sample stream between machines, over bidirectional gRPC streams. A post carries the slot's content.

A producer fills its own memory, and ``post`` copies it once into a message. The consumer reads the slot inside that
message. The promises are those of the shared-memory stream, with one difference: a slot that was posted right before
its producer was killed may not have left the producer. It then counts as lost with the producer.

Producer to consumer: HELLO, then POST, and ALIVE while the producer shows life. Consumer to producer: WELCOME or
REFUSED, then CREDIT and ACK. The token is in the call's metadata and is checked first.
"""
