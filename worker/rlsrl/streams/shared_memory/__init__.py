"""The sample stream between processes of one machine: slots in shared memory, words about them over a socket.

A slot's arrays never move: the producer fills them in the memory that the consumer reads. What is said about a slot
(credit, sequence, number of transitions) travels in one socket message of fixed size, so it arrives whole or not at
all, in order, also from a producer that was killed right after sending it; and it is private to the consumer once
received, so a producer cannot change it after it was checked. Only the word of progress is in shared memory: it is
written once a step and says nothing but "alive". A dead peer is the end of the socket.

Producer to consumer: hello, then POST. Consumer to producer: welcome (with the memory's descriptor) or a refusal, then
CREDIT and ACK. See ``handshake`` for the first three.
"""

from rlsrl.streams.shared_memory.consumer import SharedMemoryConsumer
from rlsrl.streams.shared_memory.producer import SharedMemoryProducer

__all__ = ["SharedMemoryConsumer", "SharedMemoryProducer"]
