"""What each act of an experiment takes of a processor and of a network: workload times costs, in one place.

Both the simulation and the ceilings are made of these, so that they cannot differ in what they count. Everything is in
seconds of one core, or bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlsrl.sizing.costs import Costs
from rlsrl.sizing.workload import Workload

AGREEMENTS = 4
"""Collective calls of a training step beside one a minibatch: two agreements, sums of statistics."""
LEAST_ATTENTION = 0.01
"""Share of its time that a coordinator has for weights, however many heartbeats come."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The acts of one experiment."""

    workload: Workload
    costs: Costs

    # Actors.

    def acting_step(self, lanes: float) -> float:
        """An actor that acts by itself: a step of so many environments."""
        rows = lanes * self.workload.network.acting_macs * self.costs.acting_mac_seconds
        return self._environments(lanes) + self._call_seconds + rows

    def asking_step(self, lanes: float) -> float:
        """An actor that asks: the answer read, a step of so many environments, the next question."""
        message = self.costs.ask_seconds + lanes * self._exchanged_bytes * self.costs.grpc_byte_seconds
        return self._environments(lanes) + self.costs.program_call_seconds + message

    def waiting_step(self, lanes: float) -> float:
        """How long a step of so many environments, one after the other, waits without a processor."""
        return lanes * self.workload.environment.wait_seconds

    def posting(self, lanes: float) -> float:
        """Whoever fills slots: one of so many lanes, posted, acknowledged and granted anew."""
        return self._slot_seconds + self._slot_transport(lanes)

    def loading(self) -> float:
        """Whoever acts: new weights, from shared memory or by way of the coordinator."""
        if self.workload.shared_memory:
            return self.costs.load_seconds + self.workload.network.weight_bytes * self.costs.copied_byte_seconds
        return self.costs.load_seconds + self._transfer()

    # Policy workers.

    def evaluating(self, num_requests: float, lanes: float) -> float:
        """A policy worker: a batch of so many requests for so many environments in all."""
        rows = lanes * self.workload.network.acting_macs * self.costs.acting_mac_seconds
        messages = num_requests * self.costs.answer_seconds
        return (
            self.costs.evaluation_seconds
            + self._call_seconds
            + rows
            + messages
            + lanes * self._exchanged_bytes * self.costs.grpc_byte_seconds
        )

    # Buffer workers and trainers.

    def relaying(self, lanes: float, num_producers: float) -> float:
        """A buffer worker: a slot taken from one of so many actors, copied and posted again."""
        return self.receiving(lanes, num_producers) + self.posting(lanes)

    def receiving(self, lanes: float, num_producers: float) -> float:
        """A trainer rank: a slot taken from one of so many producers, copied, released and granted anew."""
        copied = lanes * self.workload.lane_bytes * self.costs.copied_byte_seconds
        scanned = num_producers * self.costs.credit_scan_seconds
        return self._slot_seconds + self._slot_transport(lanes) + copied + scanned

    def training(self) -> float:
        """Each trainer rank: its part of a batch, made, gone through and accounted for."""
        workload, costs = self.workload, self.costs
        copied = workload.rank_lanes * workload.lane_bytes * costs.copied_byte_seconds
        rows = workload.epochs * workload.rank_transitions
        row = workload.network.forward_macs * costs.training_mac_seconds + costs.row_seconds
        return costs.step_seconds + copied + workload.num_minibatches * costs.minibatch_seconds + rows * row

    def reducing(self) -> float:
        """Each of several ranks: the collective calls of one training step."""
        workload, costs = self.workload, self.costs
        if workload.num_trainers == 1:
            return 0.0
        calls = (workload.num_minibatches + AGREEMENTS) * costs.reduce_seconds
        return calls + workload.num_minibatches * workload.network.weight_bytes * costs.reduced_byte_seconds

    def publishing(self) -> float:
        """The first rank: a version, written to shared memory or sent to the coordinator."""
        if self.workload.shared_memory:
            return self.workload.network.weight_bytes * self.costs.copied_byte_seconds
        return self._transfer()

    # The coordinator.

    def distributing(self, num_watchers: int) -> float:
        """The coordinator: a version taken, and handed to so many."""
        return 0.0 if self.workload.shared_memory else (1 + num_watchers) * self._transfer()

    def attention(self) -> float:
        """The coordinator: the share of its time that heartbeats leave to weights."""
        return max(LEAST_ATTENTION, 1.0 - self.heartbeats())

    def heartbeats(self) -> float:
        """The coordinator: all heartbeats of a second."""
        workload = self.workload
        each = self.costs.heartbeat_seconds + workload.num_workers / 2 * self.costs.lease_scan_seconds
        return workload.num_workers * workload.heartbeats_a_second * each

    # Bytes.

    def slot_bytes(self, lanes: float) -> float:
        """A slot of so many lanes on the network."""
        return lanes * self.workload.lane_bytes

    def request_bytes(self, lanes: float) -> float:
        """A request for so many environments."""
        return lanes * self.workload.request_bytes

    def answer_bytes(self, lanes: float) -> float:
        """An answer for so many."""
        return lanes * self.workload.answer_bytes

    @property
    def _exchanged_bytes(self) -> float:
        return self.workload.request_bytes + self.workload.answer_bytes

    @property
    def _call_seconds(self) -> float:
        exported = self.workload.network.exported
        return self.costs.program_call_seconds if exported else self.costs.torch_call_seconds

    @property
    def _slot_seconds(self) -> float:
        return self.costs.shared_slot_seconds if self.workload.shared_memory else self.costs.grpc_slot_seconds

    def _environments(self, lanes: float) -> float:
        return lanes * (self.workload.environment.step_seconds + self.costs.lane_seconds)

    def _slot_transport(self, lanes: float) -> float:
        return 0.0 if self.workload.shared_memory else self.slot_bytes(lanes) * self.costs.grpc_byte_seconds

    def _transfer(self) -> float:
        """One version at one end."""
        messages = self.workload.transfer_messages * self.costs.transfer_seconds
        return messages + self.workload.network.weight_bytes * self.costs.grpc_byte_seconds
