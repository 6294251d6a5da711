"""The sample stream between processes of one machine: slots in shared memory, messages about them over a socket.

The producer fills a slot in the memory that the consumer reads, so arrays are never copied. Each message is one socket
message of fixed size: it arrives whole or not at all, in order, even if the producer is killed right after sending it.
A received message is private to the consumer, so a producer cannot change it after the check. Only the progress
counter is in shared memory: the producer writes it once a step, and it means only "alive". A closed socket means that
the peer is dead.

Producer to consumer: hello, then POST. Consumer to producer: welcome (with the memory's descriptor) or refusal, then
CREDIT and ACK. ``handshake`` describes hello, welcome and refusal.
"""
