"""The seconds of a core and the bytes that each act of an experiment takes: workload times costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlsrl.policies.products import MKL_OPERATIONS, Product
from rlsrl.sizing.costs import Costs
from rlsrl.sizing.workload import Workload

LEAST_ATTENTION = 0.01
"""Share of its time that a coordinator has for weights, however many heartbeats arrive."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The acts of one experiment, by the worker that performs them."""

    workload: Workload
    costs: Costs

    # Actors.

    def acting_step(self, lanes: float) -> float:
        """Return an actor's seconds for a step of ``lanes`` environments when it evaluates the network itself."""
        rows = lanes * self.workload.network.acting_macs * self.costs.acting_mac_seconds
        return self._environments(lanes) + self._call_seconds + rows

    def asking_step(self, lanes: float) -> float:
        """Return an actor's seconds to read an answer, step ``lanes`` environments and send the next request."""
        message = self.costs.ask_seconds + lanes * self._exchanged_bytes * self.costs.grpc_byte_seconds
        return self._environments(lanes) + self.costs.program_call_seconds + message

    def waiting_step(self, lanes: float) -> float:
        """Return how long ``lanes`` environments, one after the other, wait in a step without a processor."""
        wait_seconds = self.workload.environment.wait_seconds
        return lanes * (wait_seconds + self.costs.wake_seconds) if wait_seconds else 0.0

    def posting(self, lanes: float) -> float:
        """Return a producer's seconds to post a slot of ``lanes``, its acknowledgement and next credit included."""
        return self._slot_seconds + self._slot_transport(lanes)

    def loading(self) -> float:
        """Return the seconds to load new weights, from shared memory or from the coordinator."""
        if self.workload.shared_memory:
            return self.costs.load_seconds + self.workload.network.weight_bytes * self.costs.copied_byte_seconds
        return self.costs.load_seconds + self._transfer()

    # Policy workers.

    def evaluating(self, num_requests: float, lanes: float) -> float:
        """Return a policy worker's seconds for a batch of ``num_requests`` with ``lanes`` environments in all."""
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
        """Return a buffer worker's seconds to receive a slot from one of ``num_producers`` actors and to post it."""
        return self.receiving(lanes, num_producers) + self.posting(lanes)

    def receiving(self, lanes: float, num_producers: float) -> float:
        """Return a rank's seconds to receive a slot from one of ``num_producers``, copy it and grant the next."""
        copied = lanes * self.workload.lane_bytes * self.costs.copied_byte_seconds
        scanned = num_producers * self.costs.credit_scan_seconds
        return self._slot_seconds + self._slot_transport(lanes) + copied + scanned

    def training(self) -> float:
        """Return each rank's seconds to train on its part of a batch."""
        replays = self.workload.replay is not None
        step_seconds = self.costs.replay_step_seconds if replays else self.costs.step_seconds
        return self.workload.num_train_steps * step_seconds + self._assembling() + self.minibatches()

    def minibatches(self) -> float:
        """Return each rank's seconds for the minibatches of a batch.

        All its threads are busy meanwhile: they divide what grows with rows and weights, and the others spin while one
        calls torch.
        """
        workload, costs, work = self.workload, self.costs, self.workload.update_work
        if workload.compiled:
            minibatch_seconds, row_seconds = costs.compiled_minibatch_seconds, costs.compiled_row_seconds
        else:
            minibatch_seconds, row_seconds = costs.minibatch_seconds, costs.row_seconds
        network = workload.network
        row = work.network_passes * self._passing(network.products) + row_seconds
        row += work.critic_passes * self._passing(network.critic_products)
        weights = network.num_trained_weights * costs.trained_weight_seconds
        divided = (workload.num_minibatches * weights + workload.rank_rows * row) / workload.threads
        joining = costs.join_seconds if workload.threads > 1 else 0.0
        return divided + workload.num_minibatches * (work.losses * minibatch_seconds + joining)

    def _passing(self, products: Sequence[Product]) -> float:
        """Return the seconds in which a row of a minibatch passes through layers, and its gradient back."""
        return sum(product.macs * self._mac_seconds(product) for product in products)

    def _mac_seconds(self, product: Product) -> float:
        if product.bfloat16:
            return self.costs.bfloat16_mac_seconds
        operations = 2 * product.macs * self.workload.minibatch_size / self.workload.num_trainers
        by_mkl = product.dense and not (self.workload.compiled and operations > MKL_OPERATIONS)
        return self.costs.training_mac_seconds if by_mkl else self.costs.onednn_mac_seconds

    def _assembling(self) -> float:
        """Return each rank's seconds to copy the slots of a batch, or to draw the rows of its minibatches."""
        workload, costs = self.workload, self.costs
        if workload.replay is None:
            return workload.rank_lanes * workload.lane_bytes * costs.copied_byte_seconds
        row = costs.drawn_row_seconds + (costs.priority_row_seconds if workload.replay.by_priority else 0.0)
        step = row / workload.replay.steps_per_row + workload.replay.row_bytes * costs.copied_byte_seconds
        return workload.rank_rows * step

    def reducing(self) -> float:
        """Return each rank's seconds for the collective calls of one batch; 0 with one rank."""
        workload, costs = self.workload, self.costs
        if not workload.num_collective_calls:
            return 0.0
        calls = workload.num_collective_calls * costs.reduce_seconds
        return calls + workload.num_minibatches * workload.network.gradient_bytes * costs.reduced_byte_seconds

    def awaiting_ranks(self) -> float:
        """Return how long each rank waits for the others in the collective calls of one batch."""
        return self.workload.num_collective_calls * self.costs.reduce_wait_seconds

    def publishing(self) -> float:
        """Return the first rank's seconds to publish a batch's versions, to shared memory or to the coordinator."""
        copied = self.workload.network.weight_bytes * self.costs.copied_byte_seconds
        return self.workload.num_train_steps * (copied if self.workload.shared_memory else self._transfer())

    # The coordinator.

    def distributing(self, num_watchers: int) -> float:
        """Return the coordinator's seconds to receive a version and to send it to ``num_watchers``."""
        return 0.0 if self.workload.shared_memory else (1 + num_watchers) * self._transfer()

    def attention(self) -> float:
        """Return the share of the coordinator's time that heartbeats leave to weights."""
        return max(LEAST_ATTENTION, 1.0 - self.heartbeats())

    def heartbeats(self) -> float:
        """Return the share of the coordinator's time that all heartbeats take."""
        workload = self.workload
        one = self.costs.heartbeat_seconds + workload.num_workers / 2 * self.costs.lease_scan_seconds
        return workload.num_workers * workload.heartbeats_a_second * one

    @property
    def hop_seconds(self) -> float:
        """One-way time of a message between two idle processes."""
        return self.costs.hop_seconds + self.workload.hardware.hop_seconds

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
        if self.workload.shared_memory:
            return 0.0
        return lanes * self.workload.lane_bytes * self.costs.grpc_byte_seconds

    def _transfer(self) -> float:
        """Return the seconds that one version takes at one end of a gRPC stream."""
        messages = self.workload.transfer_messages * self.costs.transfer_seconds
        return messages + self.workload.network.weight_bytes * self.costs.grpc_byte_seconds
