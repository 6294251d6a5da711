"""The conformance suite of inference streams: tests that each transport inherits.

A test module subclasses ``InferenceStreamConformance`` and gives it a fixture ``transport``; for a transport between
processes also ``InferenceStreamProcessConformance``, which runs ends in other processes and kills or stops them.
"""

# ruff: noqa: D102 - these are tests, named for what they say

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from rlsrl.data.inference import RolloutRequest, RolloutResult
from rlsrl.data.version import Version
from rlsrl.streams.inference import Answer, InferenceBatch, InferenceClient, InferenceFailed
from rlsrl.streams.protocols import HandshakeRefused, StreamClosed
from rlsrl.testing.inference_bench import (
    DEADLINE,
    EVERYTHING,
    TICK,
    DrivenClient,
    InferenceBench,
    InferenceTransport,
    ObservableServer,
    answer,
    answer_of,
    request,
    result,
    serve,
    small_layout,
    until,
    value_of,
)
from rlsrl.testing.leaks import assert_leaks_nothing
from rlsrl.testing.process_driver import DrivenProcess, driven_processes

PATIENCE = 2.0
"""Peer time-out in seconds, for tests in which a client leaves a silent server."""
V1, V2 = Version(1, 1), Version(1, 2)
Start = Callable[[str, list[str]], DrivenProcess]


def ask(client: DrivenClient, *values: int, num_lanes: int = 2) -> list[Future[RolloutResult]]:
    """Send a request for each value; return the futures."""
    return client.submit_all([request(value, num_lanes=num_lanes) for value in values])


def take(server: ObservableServer, max_size: int = EVERYTHING) -> InferenceBatch:
    """Return the next batch."""
    batch = server.next_batch(max_size, DEADLINE)
    assert batch is not None
    return batch


def take_all(server: ObservableServer, count: int) -> list[InferenceBatch]:
    """Return batches with ``count`` requests in total."""
    batches: list[InferenceBatch] = []
    while sum(len(batch.requests) for batch in batches) < count:
        batches.append(take(server))
    return batches


def values_of(batch: InferenceBatch) -> list[int]:
    """Return the values of a batch's requests."""
    return [value_of(asked) for asked in batch.requests]


def wait_for(client: InferenceClient, count: int) -> list[Answer]:
    """Return ``count`` answers in the order in which ``wait`` returns them."""
    answers: list[Answer] = []

    def has_all() -> bool:
        answers.extend(client.wait(TICK))
        return len(answers) >= count

    until(has_all)
    assert len(answers) == count
    return answers


def value_in(answered: Answer) -> int:
    """Return the value of an answer; fail if it is an ``InferenceFailed``."""
    assert isinstance(answered.result, RolloutResult)
    return answer_of(answered.result)


def answer_waiting(server: ObservableServer) -> None:
    """Answer every request that waits."""
    while (batch := server.next_batch(EVERYTHING, timeout=0)) is not None:
        answer(batch)


class _WithBench:
    @pytest.fixture
    def bench(self, transport: InferenceTransport) -> Iterator[InferenceBench]:
        bench = InferenceBench(transport)
        yield bench
        bench.close()


class InferenceStreamConformance(_WithBench):
    """One stream with both ends in this process."""

    @pytest.fixture
    def server(self, bench: InferenceBench) -> ObservableServer:
        return bench.server()

    @pytest.fixture
    def client(self, bench: InferenceBench) -> DrivenClient:
        return bench.client()

    @pytest.fixture
    def clients(self, bench: InferenceBench) -> list[DrivenClient]:
        return [bench.client(home=home) for home in range(3)]

    @pytest.fixture
    def own_client(self, bench: InferenceBench) -> InferenceClient:
        return bench.own_client()

    @pytest.fixture
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(max_workers=4) as pool:
            yield pool

    # Content and order.

    def test_each_lane_gets_its_own_answer(
        self, server: ObservableServer, clients: list[DrivenClient], pool: ThreadPoolExecutor
    ) -> None:
        stop = threading.Event()
        serving = pool.submit(serve, server, stop)
        asked = [
            (value, client.submit(request(value, num_lanes=1 + value % 5)))
            for value, client in enumerate(client for _ in range(20) for client in clients)
        ]
        for value, future in asked:
            answered = future.result(DEADLINE)
            assert answer_of(answered) == value
            assert len(answered.distribution) == 1 + value % 5
        stop.set()
        serving.result(DEADLINE)

    def test_one_clients_requests_are_served_in_their_order(
        self, server: ObservableServer, client: DrivenClient
    ) -> None:
        for first in range(0, 50, 10):
            ask(client, *range(first, first + 10))
        assert [value for batch in take_all(server, 50) for value in values_of(batch)] == list(range(50))

    def test_versions_travel_both_ways(self, server: ObservableServer, client: DrivenClient) -> None:
        futures = [client.submit(request(n, min_version=version)) for n, version in enumerate([V1, V2, V1])]
        until(lambda: server.num_waiting == 3)
        batch = take(server)
        assert [asked.min_version for asked in batch.requests] == [V1, V2, V1]
        assert batch.min_version == V2
        batch.respond([result(n, version=Version(7, n)) for n in range(3)])
        assert [future.result(DEADLINE).version for future in futures] == [(7, 0), (7, 1), (7, 2)]

    def test_recurrent_state_travels_both_ways(self, bench: InferenceBench) -> None:
        layout = small_layout(state=4)
        server, client = bench.server(layout=layout), bench.client(layout=layout)
        memory = np.arange(8, dtype=np.float32).reshape(2, 4)
        plain = request(1)
        future = client.submit(RolloutRequest(observation=plain.observation, state={"memory": memory}))
        batch = take(server)
        assert np.array_equal(batch.requests[0].state["memory"], memory)
        batch.respond([RolloutResult(distribution=result(1).distribution, state={"memory": memory + 1}, version=V1)])
        assert np.array_equal(future.result(DEADLINE).state["memory"], memory + 1)

    # Requests answered in the thread that receives them.

    def test_the_callback_answers_every_request_that_has_arrived(
        self, server: ObservableServer, clients: list[DrivenClient]
    ) -> None:
        at_once, most = 0, 0

        def answer_all() -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            answer_waiting(server)
            at_once -= 1

        server.call_on_arrival(answer_all)
        for first in range(0, 60, 3):
            futures = [future for client in clients for future in ask(client, first, first + 1, first + 2)]
            assert [answer_of(future.result(DEADLINE)) for future in futures] == [first, first + 1, first + 2] * 3
        assert most == 1, "two calls ran at the same time"

    def test_afterwards_runs_after_each_take_and_never_at_the_same_time(
        self, server: ObservableServer, clients: list[DrivenClient]
    ) -> None:
        calls: list[str] = []

        def answer_all() -> None:
            calls.append("takes")
            time.sleep(0.001)  # gives another call time to begin
            answer_waiting(server)
            calls.append("took")

        def rest() -> None:
            calls.append("rests")
            time.sleep(0.001)
            calls.append("rested")

        server.call_on_arrival(answer_all, rest)
        for value in range(20):
            for future in [future for client in clients for future in ask(client, value)]:
                assert answer_of(future.result(DEADLINE)) == value
        until(lambda: calls[-1] == "rested")
        turn = ["takes", "took", "rests", "rested"]
        assert calls == turn * (len(calls) // len(turn))

    def test_a_pending_afterwards_runs_after_unregistering(
        self, server: ObservableServer, client: DrivenClient
    ) -> None:
        rested = threading.Semaphore(0)

        def answer_and_end() -> None:
            if (batch := server.next_batch(EVERYTHING, timeout=0)) is not None:
                answer(batch)
                server.call_on_arrival(None)

        server.call_on_arrival(answer_and_end, rested.release)
        (future,) = ask(client, 1)
        assert answer_of(future.result(DEADLINE)) == 1
        assert rested.acquire(timeout=DEADLINE)
        ask(client, 2)
        assert answer(take(server)) == [2]
        assert not rested.acquire(blocking=False), "a callback ran after unregistering"

    def test_a_client_may_send_a_request_right_after_an_answer(
        self, server: ObservableServer, own_client: InferenceClient
    ) -> None:

        server.call_on_arrival(partial(answer_waiting, server))
        for value in range(500):
            number = own_client.submit(request(value))
            (answered,) = wait_for(own_client, 1)
            assert (answered.number, value_in(answered)) == (number, value)

    def test_wake_calls_take_without_a_new_request(self, server: ObservableServer, client: DrivenClient) -> None:
        may_answer, called = threading.Event(), threading.Semaphore(0)

        def answer_if_allowed() -> None:
            if may_answer.is_set() and (batch := server.next_batch(EVERYTHING, timeout=0)) is not None:
                answer(batch)
            called.release()

        server.call_on_arrival(answer_if_allowed)
        (future,) = ask(client, 1)
        assert called.acquire(timeout=DEADLINE)
        assert not future.done()
        may_answer.set()
        server.wake()
        assert answer_of(future.result(DEADLINE)) == 1
        server.call_on_arrival(None)
        server.wake()
        assert server.next_batch(EVERYTHING, DEADLINE) is None, "the wake ends this wait"
        (later,) = ask(client, 2)
        assert answer(take(server)) == [2]
        assert answer_of(later.result(DEADLINE)) == 2

    # Batches.

    def test_a_batch_has_all_requests_that_wait_when_it_is_taken(
        self, server: ObservableServer, clients: list[DrivenClient]
    ) -> None:
        ask(clients[0], 0)
        first = take(server)
        for home, client in enumerate(clients):
            ask(client, 10 + home, 20 + home)
        until(lambda: server.num_waiting == 6)
        second = take(server)
        assert values_of(first) == [0]
        assert sorted(values_of(second)) == [10, 11, 12, 20, 21, 22]
        assert second.num_lanes == 12

    def test_a_batch_takes_whole_requests_up_to_the_maximum_oldest_first(
        self, server: ObservableServer, client: DrivenClient
    ) -> None:
        for value, num_lanes in enumerate([3, 3, 3, 9, 1, 1]):
            ask(client, value, num_lanes=num_lanes)
        until(lambda: server.num_waiting == 6)
        assert [values_of(take(server, 8)) for _ in range(4)] == [[0, 1], [2], [3], [4, 5]]

    def test_requests_are_sent_by_wait_also_with_timeout_zero(
        self, server: ObservableServer, own_client: InferenceClient
    ) -> None:
        own_client.submit(request(1))
        assert server.next_batch(EVERYTHING, timeout=0.05) is None
        until(lambda: not own_client.wait(0.0) and server.num_waiting == 1)
        own_client.submit(request(2))
        assert server.num_waiting == 1
        assert own_client.wait(0.0) == []
        until(lambda: server.num_waiting == 2)

    def test_waiting_for_a_batch_ends_with_the_time_a_request_a_wake_or_close(
        self, server: ObservableServer, client: DrivenClient, pool: ThreadPoolExecutor
    ) -> None:
        assert server.next_batch(EVERYTHING, timeout=0.0) is None
        waiting = pool.submit(server.next_batch, EVERYTHING, DEADLINE)
        (future,) = ask(client, 3)
        batch = waiting.result(DEADLINE)
        assert batch is not None
        answer(batch)
        assert answer_of(future.result(DEADLINE)) == 3
        for end_wait in (server.wake, server.close):
            waiting = pool.submit(server.next_batch, EVERYTHING, DEADLINE)
            end_wait()
            assert waiting.result(DEADLINE / 2) is None

    def test_a_batch_is_answered_once_and_in_full(self, server: ObservableServer, client: DrivenClient) -> None:
        futures = ask(client, 1, 2)
        until(lambda: server.num_waiting == 2)
        batch = take(server)
        for wrong in ([result(1)], [result(1), result(2, num_lanes=3)], [result(1), result(2), result(3)]):
            with pytest.raises(ValueError, match="do not answer"):
                batch.respond(wrong)
        answer(batch)
        with pytest.raises(RuntimeError, match="answered once"):
            answer(batch)
        with pytest.raises(RuntimeError, match="answered once"):
            batch.fail(ValueError("too late"))
        assert [answer_of(future.result(DEADLINE)) for future in futures] == [1, 2]

    def test_batches_may_be_answered_in_another_order(self, server: ObservableServer, client: DrivenClient) -> None:
        (first,) = ask(client, 1)
        batches = [take(server)]
        (second,) = ask(client, 2)
        batches.append(take(server))
        answer(batches[1])
        assert answer_of(second.result(DEADLINE)) == 2
        assert not first.done()
        answer(batches[0])
        assert answer_of(first.result(DEADLINE)) == 1

    def test_clients_see_why_a_batch_failed_and_go_on(self, server: ObservableServer, client: DrivenClient) -> None:
        futures = ask(client, 1, 2)
        until(lambda: server.num_waiting == 2)
        take(server).fail(ArithmeticError("the weights are gone"))
        for future in futures:
            with pytest.raises(InferenceFailed, match="ArithmeticError: the weights are gone"):
                future.result(DEADLINE)
        (future,) = ask(client, 3)
        answer(take(server))
        assert answer_of(future.result(DEADLINE)) == 3

    # The owner's thread.

    def test_the_owner_gets_each_answer_once_however_late_it_calls_wait(
        self, server: ObservableServer, own_client: InferenceClient
    ) -> None:
        assert own_client.wait(0.0) == []
        numbers = [own_client.submit(request(value)) for value in (5, 6, 7)]
        until(lambda: not own_client.wait(0.0) and server.num_waiting == 3)
        taken = [take(server, max_size=2) for _ in numbers]
        answer(taken[1])
        (second,) = wait_for(own_client, 1)
        assert (second.number, value_in(second)) == (numbers[1], 6)
        answer(taken[2])
        taken[0].fail(ArithmeticError("no"))
        rest = wait_for(own_client, 2)
        assert {each.number for each in rest} == {numbers[0], numbers[2]}
        (failed,) = [each.result for each in rest if each.number == numbers[0]]
        assert isinstance(failed, InferenceFailed)
        assert own_client.wait(0.0) == []

    def test_another_thread_ends_the_wait_and_no_answer_is_lost(
        self, server: ObservableServer, own_client: InferenceClient
    ) -> None:
        own_client.submit(request(5))
        until(lambda: not own_client.wait(0.0) and server.num_waiting == 1)
        for _ in range(3):  # it may come before the wait or during the wait
            waking = threading.Thread(target=own_client.wake)
            waking.start()
            assert own_client.wait(100 * DEADLINE) == []
            waking.join()
        answer(take(server))
        (answered,) = wait_for(own_client, 1)
        assert value_in(answered) == 5

    # Ends.

    def test_a_closed_client_raises_stream_closed(self, server: ObservableServer, own_client: InferenceClient) -> None:
        own_client.submit(request(1))
        until(lambda: not own_client.wait(0.0) and server.num_waiting == 1)
        batch = take(server)
        own_client.submit(request(2))
        own_client.close()
        for call in (lambda: own_client.submit(request(3)), lambda: own_client.wait(DEADLINE)):
            with pytest.raises(StreamClosed):
                call()
        own_client.close()
        answer(batch)  # is dropped

    def test_requests_of_a_closed_client_are_dropped(self, bench: InferenceBench) -> None:
        server, leaver, stayer = bench.server(), bench.client(home=0), bench.client(home=1)
        ask(leaver, 1, 2)
        ask(stayer, 3)
        until(lambda: server.num_waiting == 3)
        leaver.close()
        until(lambda: server.num_waiting == 1)
        assert answer(take(server)) == [3]

    def test_unanswered_requests_go_to_the_next_server(self, bench: InferenceBench) -> None:
        client = bench.client()
        futures = ask(client, 0, 1)  # before there is any server
        server = bench.server()
        until(lambda: server.num_waiting == 2)
        answer(take(server, max_size=2))
        assert answer_of(futures[0].result(DEADLINE)) == 0
        taken = take(server)
        futures += ask(client, 2)
        until(lambda: server.num_waiting == 1)
        server.close()
        answer(taken)  # is dropped
        held = client.submit(request(3))
        server = bench.server()
        batches = take_all(server, 3)
        assert [value for batch in batches for value in values_of(batch)] == [1, 2, 3]
        for batch in batches:
            answer(batch)
        assert [answer_of(future.result(DEADLINE)) for future in (*futures, held)] == [0, 1, 2, 3]
        assert server.next_batch(EVERYTHING, timeout=0.0) is None

    def test_a_refusal_has_the_layouts_of_both_ends(self, bench: InferenceBench) -> None:
        server = bench.server(layout=small_layout(features=5))
        client = bench.client()
        # If the refusal was faster, the call itself raises.
        with pytest.raises(HandshakeRefused, match=r"float32\[5\].* at the server.*float32\[3\].* at the client"):
            ask(client, 1)[0].result(DEADLINE)
        with pytest.raises(HandshakeRefused):
            ask(client, 2)
        assert bench.refused == {"layout": 1}
        assert server.num_waiting == 0

    # Leaks.

    def test_clients_that_connect_and_close_leak_nothing(self, bench: InferenceBench) -> None:
        server = bench.server()

        def connect_and_close() -> None:
            client = DrivenClient(lambda: bench.transport.client([bench.address], layout=small_layout()))
            (answered,) = ask(client, 1)
            answer(take(server))
            assert answer_of(answered.result(DEADLINE)) == 1
            ask(client, 2)
            until(lambda: server.num_waiting == 1)
            client.close()  # without the answer
            until(lambda: server.num_waiting == 0)

        assert_leaks_nothing(connect_and_close, times=200)


class InferenceStreamProcessConformance(_WithBench):
    """Each server in its own process. Clients that are killed or stopped are in processes, too."""

    @pytest.fixture
    def start(self, transport: InferenceTransport) -> Iterator[Start]:
        """Return a function that starts one end, ``server`` or ``client``, of the addresses in its own process."""
        reference = f"{type(transport).__module__}:{type(transport).__qualname__}"
        with driven_processes("rlsrl.testing.inference_stream_end", transport=reference) as driven:
            yield lambda role, addresses: driven(role=role, addresses=addresses)

    def test_requests_of_a_killed_server_are_sent_again(self, bench: InferenceBench, start: Start) -> None:
        client = bench.client()
        server = start("server", [bench.address])
        futures = ask(client, 0, 1, 2)
        server.call("wait_for", num_waiting=3)
        assert server.call("take", max_size=2) == [0]
        server.call("answer")
        assert answer_of(futures[0].result(DEADLINE)) == 0
        assert server.call("take", max_size=2) == [1]  # taken; 2 waits
        server.kill()
        futures += ask(client, 3)
        server = start("server", [bench.address])
        server.call("serve")
        assert [answer_of(future.result(DEADLINE)) for future in futures] == [0, 1, 2, 3]
        assert server.call("served") == [1, 2, 3]

    def test_clients_spread_over_servers_and_move_when_one_dies(self, bench: InferenceBench, start: Start) -> None:
        addresses = [bench.address, bench.transport.new_address()]
        servers = [start("server", [address]) for address in addresses]
        clients = [bench.client(*addresses, home=home, return_seconds=0.1) for home in range(4)]
        for server in servers:
            server.call("serve")
        assert self.answered_by(clients, servers) == [[0, 2], [1, 3]]
        servers[0].kill()
        assert self.answered_by(clients, servers[1:]) == [[0, 1, 2, 3]]
        servers[0] = start("server", [addresses[0]])
        servers[0].call("serve")
        until(lambda: self.answered_by(clients, servers) == [[0, 2], [1, 3]])

    def answered_by(self, clients: list[DrivenClient], servers: list[DrivenProcess]) -> list[list[int]]:
        """Send each client's number as a request; return what each server has answered since the last call."""
        for future in [ask(client, number)[0] for number, client in enumerate(clients)]:
            answer_of(future.result(DEADLINE))
        return [sorted(server.call("served")) for server in servers]

    def test_a_client_leaves_a_frozen_server(self, bench: InferenceBench, start: Start) -> None:
        addresses = [bench.address, bench.transport.new_address()]
        first, second = [start("server", [address]) for address in addresses]
        client = bench.client(*addresses, peer_timeout=PATIENCE, return_seconds=0.1)
        second.call("serve")
        futures = ask(client, 0)
        first.call("wait_for", num_waiting=1)
        first.stop()
        futures += ask(client, 1)
        assert [answer_of(future.result(DEADLINE)) for future in futures] == [0, 1]
        assert second.call("served") == [0, 1]
        first.resume()
        first.call("serve")
        until(lambda: self.answered_by([client], [first]) == [[0]])

    def test_time_outside_wait_does_not_count_as_silence(self, bench: InferenceBench, start: Start) -> None:
        server = start("server", [bench.address])
        client = bench.own_client(peer_timeout=PATIENCE)
        client.submit(request(1))
        assert client.wait(TICK) == []
        until(lambda: client.wait(TICK) == [] and server.call("num_waiting") == 1)
        server.call("take", max_size=EVERYTHING)
        time.sleep(1.5 * PATIENCE)
        assert client.wait(TICK) == []
        server.call("answer")
        assert [value_in(each) for each in wait_for(client, 1)] == [1]
        assert server.call("num_waiting") == 0, "the request was sent again"

    def have_taken(self, client: InferenceClient, server: DrivenProcess, values: list[int]) -> None:
        """Send a request for each value, and take them at the server."""
        for value in values:
            client.submit(request(value))
        until(lambda: client.wait(TICK) == [] and server.call("num_waiting") == len(values))
        assert server.call("take", max_size=EVERYTHING) == values

    def test_answers_sent_before_a_server_closed_arrive_later(self, bench: InferenceBench, start: Start) -> None:
        client, values = bench.own_client(), [*range(20)]
        server = start("server", [bench.address])
        self.have_taken(client, server, values)
        server.call("answer")
        server.call("close")
        assert [value_in(each) for each in wait_for(client, len(values))] == values

    def test_each_request_is_answered_once_though_one_is_sent_to_a_closed_server(
        self, bench: InferenceBench, start: Start
    ) -> None:
        client, values = bench.own_client(), [*range(20)]
        server = start("server", [bench.address])

        def connect_and_close() -> None:
            self.have_taken(client, server, values)
            server.call("answer")
            server.call("close")
            client.submit(request(99))  # goes to a server that has closed
            server.call("restart")
            answers: list[Answer] = []

            def is_sent_again() -> bool:
                # gRPC drops unread answers if a write finds the connection closed.
                answers.extend(client.wait(TICK))
                return int(server.call("num_waiting")) == len(values) + 1 - len(answers)

            until(is_sent_again)
            missing = [*values[len(answers) :], 99]
            assert [value_in(each) for each in answers] == values[: len(answers)]
            assert server.call("take", max_size=EVERYTHING) == missing
            server.call("answer")
            assert [value_in(each) for each in wait_for(client, len(missing))] == missing

        assert_leaks_nothing(connect_and_close, times=60)

    def test_a_killed_clients_requests_are_dropped(self, bench: InferenceBench, start: Start) -> None:
        server, client = bench.server(), bench.client(home=1)
        other = start("client", [bench.address])
        other.call("ask", values=[1, 2, 3])
        until(lambda: server.num_waiting == 3)
        taken = take(server, max_size=2)
        other.kill()
        until(lambda: server.num_waiting == 0)
        answer(taken)  # is dropped
        (future,) = ask(client, 4)
        assert answer(take(server)) == [4]
        assert answer_of(future.result(DEADLINE)) == 4

    def test_a_frozen_client_delays_no_other_and_continues(self, bench: InferenceBench, start: Start) -> None:
        server, client = bench.server(), bench.client(home=1)
        other = start("client", [bench.address])
        other.call("ask", values=[1])
        until(lambda: server.num_waiting == 1)
        other.stop()
        (future,) = ask(client, 2)
        until(lambda: server.num_waiting == 2)
        assert answer(take(server)) == [1, 2]
        assert answer_of(future.result(DEADLINE)) == 2
        other.resume()
        assert other.call("answers") == [1]

    @pytest.mark.slow
    def test_a_client_that_stays_frozen_is_disconnected(self, bench: InferenceBench, start: Start) -> None:
        server = bench.server()
        other = start("client", [bench.address])
        other.call("ask", values=[1])
        until(lambda: server.num_waiting == 1)
        other.stop()
        until(lambda: server.num_waiting == 0)

    def test_clients_of_a_closed_server_move_to_the_next(self, bench: InferenceBench, start: Start) -> None:
        addresses = [bench.address, bench.transport.new_address()]
        first, second = [start("server", [address]) for address in addresses]
        client = bench.client(*addresses)
        futures = ask(client, 1)
        first.call("wait_for", num_waiting=1)
        first.call("close")
        second.call("serve")
        assert answer_of(futures[0].result(DEADLINE)) == 1

    def test_servers_that_start_and_close_leak_nothing(self, bench: InferenceBench, start: Start) -> None:
        client = start("client", [bench.address])

        def connect_and_close() -> None:
            server = bench.transport.server(bench.address, layout=small_layout(), on_refused=print)
            client.call("ask", values=[1])
            answer(take(server))
            assert client.call("answers") == [1]
            server.close()

        assert_leaks_nothing(connect_and_close, times=20)

    def test_a_client_keeps_no_memory_of_closed_servers(self, bench: InferenceBench, start: Start) -> None:
        client = bench.client()
        server = start("server", [bench.address])

        def connect_and_close() -> None:
            (answered,) = ask(client, 1)
            assert server.call("take", max_size=1) == [1]
            server.call("answer")
            assert answer_of(answered.result(DEADLINE)) == 1
            server.call("close")
            server.call("restart")

        assert_leaks_nothing(connect_and_close, times=100)
