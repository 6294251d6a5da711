"""What every inference stream must do, as tests to inherit.

A test module subclasses ``InferenceStreamConformance`` and gives it a fixture ``transport``; for a transport between
processes ``InferenceStreamProcessConformance``, too, which plays ends in other processes and kills or stops them.
"""

# ruff: noqa: D102 - these are tests, named for what they say

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

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
from rlsrl.testing.process_driver import DrivenProcess

PATIENCE = 2.0
"""Seconds after which a silent server is given up where that is to happen."""
V1, V2 = Version(1, 1), Version(1, 2)


def ask(client: DrivenClient, *values: int, num_lanes: int = 2) -> list[Future[RolloutResult]]:
    """Ask for these values."""
    return client.submit_all([request(value, num_lanes=num_lanes) for value in values])


def take(server: ObservableServer, max_size: int = EVERYTHING) -> InferenceBatch:
    """The next batch."""
    batch = server.next_batch(max_size, DEADLINE)
    assert batch is not None
    return batch


def take_all(server: ObservableServer, count: int) -> list[InferenceBatch]:
    """Batches of that many requests together."""
    batches: list[InferenceBatch] = []
    while sum(len(batch.requests) for batch in batches) < count:
        batches.append(take(server))
    return batches


def values_of(batch: InferenceBatch) -> list[int]:
    """What was asked."""
    return [value_of(asked) for asked in batch.requests]


def wait_for(client: InferenceClient, count: int) -> list[Answer]:
    """So many answers, as its owner gets them."""
    answers: list[Answer] = []

    def has_all() -> bool:
        answers.extend(client.wait(TICK))
        return len(answers) >= count

    until(has_all)
    assert len(answers) == count
    return answers


def value_in(answered: Answer) -> int:
    """What was answered; fails if the policy did."""
    assert isinstance(answered.result, RolloutResult)
    return answer_of(answered.result)


class InferenceStreamConformance:
    """Both ends in this process."""

    @pytest.fixture
    def bench(self, transport: InferenceTransport) -> Iterator[InferenceBench]:
        bench = InferenceBench(transport)
        yield bench
        bench.close()

    @pytest.fixture
    def pool(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(max_workers=4) as pool:
            yield pool

    # Content and order.

    def test_each_lane_is_answered_with_its_own(self, bench: InferenceBench, pool: ThreadPoolExecutor) -> None:
        server, clients = bench.server(), [bench.client(home=home) for home in range(3)]
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

    def test_one_clients_requests_are_served_in_their_order(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.client()
        for first in range(0, 50, 10):
            ask(client, *range(first, first + 10))
        assert [value for batch in take_all(server, 50) for value in values_of(batch)] == list(range(50))

    def test_versions_travel_both_ways(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.client()
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

    # Answered where they are received.

    def test_whoever_is_called_on_arrival_answers_all_that_has_come(self, bench: InferenceBench) -> None:
        server, clients = bench.server(), [bench.client(home=home) for home in range(3)]
        at_once, most = 0, 0

        def answer_all() -> None:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            while (batch := server.next_batch(EVERYTHING, timeout=0)) is not None:
                answer(batch)
            at_once -= 1

        server.call_on_arrival(answer_all)
        for first in range(0, 60, 3):
            futures = [future for client in clients for future in ask(client, first, first + 1, first + 2)]
            assert [answer_of(future.result(DEADLINE)) for future in futures] == [first, first + 1, first + 2] * 3
        assert most == 1, "never twice at a time"

    def test_what_may_wait_is_called_after_each_call_and_never_beside_one(self, bench: InferenceBench) -> None:
        server, clients = bench.server(), [bench.client(home=home) for home in range(3)]
        calls: list[str] = []

        def answer_all() -> None:
            calls.append("takes")
            time.sleep(0.001)  # room for another call to come between
            while (batch := server.next_batch(EVERYTHING, timeout=0)) is not None:
                answer(batch)
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

    def test_whoever_puts_an_end_to_the_calls_has_the_rest_done_once_more(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.client()
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
        assert not rested.acquire(blocking=False), "nothing is called any more"

    def test_whoever_was_answered_may_ask_again_at_once(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.own_client()

        def answer_all() -> None:
            while (batch := server.next_batch(EVERYTHING, timeout=0)) is not None:
                answer(batch)

        server.call_on_arrival(answer_all)
        for value in range(500):
            number = client.submit(request(value))
            (answered,) = wait_for(client, 1)
            assert (answered.number, value_in(answered)) == (number, value)

    def test_a_prod_is_a_call_though_nothing_came_and_what_waits_is_left_to_it(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.client()
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
        (later,) = ask(client, 2)
        assert answer(take(server)) == [2]
        assert answer_of(later.result(DEADLINE)) == 2

    # Batches.

    def test_a_batch_is_formed_from_all_that_waits_when_it_is_taken(self, bench: InferenceBench) -> None:
        server, clients = bench.server(), [bench.client(home=home) for home in range(3)]
        ask(clients[0], 0)
        first = take(server)
        for home, client in enumerate(clients):
            ask(client, 10 + home, 20 + home)
        until(lambda: server.num_waiting == 6)
        second = take(server)
        assert values_of(first) == [0]
        assert sorted(values_of(second)) == [10, 11, 12, 20, 21, 22]
        assert second.num_lanes == 12

    def test_a_batch_takes_whole_requests_up_to_the_maximum_oldest_first(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.client()
        for value, num_lanes in enumerate([3, 3, 3, 9, 1, 1]):
            ask(client, value, num_lanes=num_lanes)
        until(lambda: server.num_waiting == 6)
        assert [values_of(take(server, 8)) for _ in range(4)] == [[0, 1], [2], [3], [4, 5]]

    def test_nothing_is_asked_before_the_owner_waits(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.own_client()
        client.submit(request(1))
        assert server.next_batch(EVERYTHING, timeout=0.05) is None
        until(lambda: not client.wait(0.0) and server.num_waiting == 1)
        client.submit(request(2))
        assert server.num_waiting == 1
        until(lambda: not client.wait(0.0) and server.num_waiting == 2)

    def test_a_wait_of_no_time_asks(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.own_client()
        client.submit(request(1))
        until(lambda: not client.wait(0.0) and server.num_waiting == 1)
        answer(take(server))
        wait_for(client, 1)
        client.submit(request(2))
        assert client.wait(0.0) == []
        until(lambda: server.num_waiting == 1)

    def test_waiting_for_a_batch_ends_with_the_time_a_request_or_close(
        self, bench: InferenceBench, pool: ThreadPoolExecutor
    ) -> None:
        server, client = bench.server(), bench.client()
        assert server.next_batch(EVERYTHING, timeout=0.0) is None
        waiting = pool.submit(server.next_batch, EVERYTHING, DEADLINE)
        (future,) = ask(client, 3)
        batch = waiting.result(DEADLINE)
        assert batch is not None
        answer(batch)
        assert answer_of(future.result(DEADLINE)) == 3
        waiting = pool.submit(server.next_batch, EVERYTHING, DEADLINE)
        server.close()
        assert waiting.result(DEADLINE) is None

    def test_a_batch_is_answered_once_and_in_full(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.client()
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

    def test_batches_may_be_answered_in_another_order(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.client()
        (first,) = ask(client, 1)
        batches = [take(server)]
        (second,) = ask(client, 2)
        batches.append(take(server))
        answer(batches[1])
        assert answer_of(second.result(DEADLINE)) == 2
        assert not first.done()
        answer(batches[0])
        assert answer_of(first.result(DEADLINE)) == 1

    def test_clients_see_why_a_batch_failed_and_go_on(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.client()
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

    def test_its_owner_gets_every_answer_once_however_late_it_looks(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.own_client()
        assert client.wait(0.0) == []
        numbers = [client.submit(request(value)) for value in (5, 6, 7)]
        until(lambda: not client.wait(0.0) and server.num_waiting == 3)
        taken = [take(server, max_size=2) for _ in numbers]
        answer(taken[1])
        (second,) = wait_for(client, 1)
        assert (second.number, value_in(second)) == (numbers[1], 6)
        answer(taken[2])
        taken[0].fail(ArithmeticError("no"))
        rest = wait_for(client, 2)
        assert {each.number for each in rest} == {numbers[0], numbers[2]}
        (failed,) = [each.result for each in rest if each.number == numbers[0]]
        assert isinstance(failed, InferenceFailed)
        assert client.wait(0.0) == []

    # Ends.

    def test_a_closed_client_says_so(self, bench: InferenceBench) -> None:
        server, client = bench.server(), bench.own_client()
        client.submit(request(1))
        until(lambda: not client.wait(0.0) and server.num_waiting == 1)
        batch = take(server)
        client.submit(request(2))
        client.close()
        for call in (lambda: client.submit(request(3)), lambda: client.wait(DEADLINE)):
            with pytest.raises(StreamClosed):
                call()
        client.close()
        answer(batch)  # goes nowhere

    def test_what_a_closed_client_asked_is_not_worth_evaluating(self, bench: InferenceBench) -> None:
        server, leaver, stayer = bench.server(), bench.client(home=0), bench.client(home=1)
        ask(leaver, 1, 2)
        ask(stayer, 3)
        until(lambda: server.num_waiting == 3)
        leaver.close()
        until(lambda: server.num_waiting == 1)
        assert answer(take(server)) == [3]

    def test_the_next_server_is_asked_what_the_last_left_unanswered(self, bench: InferenceBench) -> None:
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
        answer(taken)  # goes nowhere
        held = client.submit(request(3))
        server = bench.server()
        batches = take_all(server, 3)
        assert [value for batch in batches for value in values_of(batch)] == [1, 2, 3]
        for batch in batches:
            answer(batch)
        assert [answer_of(future.result(DEADLINE)) for future in (*futures, held)] == [0, 1, 2, 3]
        assert server.next_batch(EVERYTHING, timeout=0.0) is None

    def test_another_layout_is_named_on_both_sides(self, bench: InferenceBench) -> None:
        server = bench.server(layout=small_layout(features=5))
        client = bench.client()
        # By the call itself, if the refusal was faster.
        with pytest.raises(HandshakeRefused, match=r"float32\[5\].* at the server.*float32\[3\].* at the client"):
            ask(client, 1)[0].result(DEADLINE)
        with pytest.raises(HandshakeRefused):
            ask(client, 2)
        assert bench.refused == {"layout": 1}
        assert server.num_waiting == 0

    # Leaks.

    def test_clients_that_come_and_go_leak_nothing(self, bench: InferenceBench) -> None:
        server = bench.server()

        def come_and_go() -> None:
            client = DrivenClient(lambda: bench.transport.client([bench.address], layout=small_layout()))
            (answered,) = ask(client, 1)
            answer(take(server))
            assert answer_of(answered.result(DEADLINE)) == 1
            ask(client, 2)
            until(lambda: server.num_waiting == 1)
            client.close()  # without the answer
            until(lambda: server.num_waiting == 0)

        assert_leaks_nothing(come_and_go, times=200)


class InferenceStreamProcessConformance:
    """Each server in a process of its own, and clients too where they are to be killed or stopped."""

    @pytest.fixture
    def bench(self, transport: InferenceTransport) -> Iterator[InferenceBench]:
        bench = InferenceBench(transport)
        yield bench
        bench.close()

    @pytest.fixture
    def processes(self) -> Iterator[list[DrivenProcess]]:
        processes: list[DrivenProcess] = []
        yield processes
        for process in processes:
            process.close()

    def start(
        self, processes: list[DrivenProcess], transport: InferenceTransport, role: str, *addresses: str
    ) -> DrivenProcess:
        reference = f"{type(transport).__module__}:{type(transport).__qualname__}"
        process = DrivenProcess(
            "rlsrl.testing.inference_puppet", role=role, transport=reference, addresses=list(addresses)
        )
        processes.append(process)
        return process

    def test_a_killed_servers_requests_are_asked_again(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        client = bench.client()
        server = self.start(processes, transport, "server", bench.address)
        futures = ask(client, 0, 1, 2)
        server.call("wait_for", num_waiting=3)
        assert server.call("take", max_size=2) == [0]
        server.call("answer")
        assert answer_of(futures[0].result(DEADLINE)) == 0
        assert server.call("take", max_size=2) == [1]  # taken; 2 waits
        server.kill()
        futures += ask(client, 3)
        server = self.start(processes, transport, "server", bench.address)
        server.call("serve")
        assert [answer_of(future.result(DEADLINE)) for future in futures] == [0, 1, 2, 3]
        assert server.call("served") == [1, 2, 3]

    def test_clients_spread_over_servers_and_find_refuge(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        addresses = [bench.address, transport.new_address()]
        servers = [self.start(processes, transport, "server", address) for address in addresses]
        clients = [bench.client(*addresses, home=home, return_seconds=0.1) for home in range(4)]
        for server in servers:
            server.call("serve")
        assert self.asked_of(clients, servers) == [[0, 2], [1, 3]]
        servers[0].kill()
        assert self.asked_of(clients, servers[1:]) == [[0, 1, 2, 3]]
        servers[0] = self.start(processes, transport, "server", addresses[0])
        servers[0].call("serve")
        until(lambda: self.asked_of(clients, servers) == [[0, 2], [1, 3]])

    def asked_of(self, clients: list[DrivenClient], servers: list[DrivenProcess]) -> list[list[int]]:
        """Let each client ask its number; returns what each server was asked since the last call."""
        for future in [ask(client, number)[0] for number, client in enumerate(clients)]:
            answer_of(future.result(DEADLINE))
        return [sorted(server.call("served")) for server in servers]

    def test_a_frozen_server_is_given_up_for_another(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        addresses = [bench.address, transport.new_address()]
        first, second = [self.start(processes, transport, "server", address) for address in addresses]
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
        until(lambda: self.asked_of([client], [first]) == [[0]])

    def test_a_server_is_not_silent_while_its_client_does_not_listen(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        server = self.start(processes, transport, "server", bench.address)
        client = bench.own_client(peer_timeout=PATIENCE)
        client.submit(request(1))
        assert client.wait(TICK) == []
        until(lambda: client.wait(TICK) == [] and server.call("num_waiting") == 1)
        server.call("take", max_size=EVERYTHING)
        time.sleep(1.5 * PATIENCE)
        assert client.wait(TICK) == []
        server.call("answer")
        assert [value_in(each) for each in wait_for(client, 1)] == [1]
        assert server.call("num_waiting") == 0, "nothing was asked again"

    def have_taken(self, client: InferenceClient, server: DrivenProcess, values: list[int]) -> None:
        """Ask for these, and have the server take them."""
        for value in values:
            client.submit(request(value))
        until(lambda: client.wait(TICK) == [] and server.call("num_waiting") == len(values))
        assert server.call("take", max_size=EVERYTHING) == values

    def test_a_server_that_goes_while_its_client_does_not_listen_is_heard_to_its_end(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        client, values = bench.own_client(), [*range(20)]
        server = self.start(processes, transport, "server", bench.address)
        self.have_taken(client, server, values)
        server.call("answer")
        server.call("close")
        assert [value_in(each) for each in wait_for(client, len(values))] == values

    def test_all_is_answered_once_and_nothing_left_though_a_request_meets_a_server_that_has_gone(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        client, values = bench.own_client(), [*range(20)]
        server = self.start(processes, transport, "server", bench.address)

        def come_and_go() -> None:
            self.have_taken(client, server, values)
            server.call("answer")
            server.call("close")
            client.submit(request(99))  # is on its way to a server that has gone
            server.call("serve_anew")
            answers: list[Answer] = []

            def is_asked_anew() -> bool:
                # gRPC drops answers that were not read yet where a write meets a connection that has been closed.
                answers.extend(client.wait(TICK))
                return int(server.call("num_waiting")) == len(values) + 1 - len(answers)

            until(is_asked_anew)
            missing = [*values[len(answers) :], 99]
            assert [value_in(each) for each in answers] == values[: len(answers)]
            assert server.call("take", max_size=EVERYTHING) == missing
            server.call("answer")
            assert [value_in(each) for each in wait_for(client, len(missing))] == missing

        assert_leaks_nothing(come_and_go, times=60)

    def test_a_killed_clients_requests_are_dropped(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        server, client = bench.server(), bench.client(home=1)
        other = self.start(processes, transport, "client", bench.address)
        other.call("ask", values=[1, 2, 3])
        until(lambda: server.num_waiting == 3)
        taken = take(server, max_size=2)
        other.kill()
        until(lambda: server.num_waiting == 0)
        answer(taken)  # goes nowhere
        (future,) = ask(client, 4)
        assert answer(take(server)) == [4]
        assert answer_of(future.result(DEADLINE)) == 4

    def test_a_frozen_client_holds_up_nobody_and_goes_on(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        server, client = bench.server(), bench.client(home=1)
        other = self.start(processes, transport, "client", bench.address)
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
    def test_a_client_frozen_for_good_is_given_up(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        server = bench.server()
        other = self.start(processes, transport, "client", bench.address)
        other.call("ask", values=[1])
        until(lambda: server.num_waiting == 1)
        other.stop()
        until(lambda: server.num_waiting == 0)

    def test_closing_a_server_sends_its_clients_to_the_next(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        addresses = [bench.address, transport.new_address()]
        first, second = [self.start(processes, transport, "server", address) for address in addresses]
        client = bench.client(*addresses)
        futures = ask(client, 1)
        first.call("wait_for", num_waiting=1)
        first.call("close")
        second.call("serve")
        assert answer_of(futures[0].result(DEADLINE)) == 1

    def test_servers_that_come_and_go_leak_nothing(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        client = self.start(processes, transport, "client", bench.address)

        def come_and_go() -> None:
            server = bench.transport.server(bench.address, layout=small_layout(), on_refused=print)
            client.call("ask", values=[1])
            answer(take(server))
            assert client.call("answers") == [1]
            server.close()

        assert_leaks_nothing(come_and_go, times=20)

    def test_a_client_keeps_nothing_of_servers_that_are_gone(
        self, bench: InferenceBench, processes: list[DrivenProcess], transport: InferenceTransport
    ) -> None:
        client = bench.client()
        server = self.start(processes, transport, "server", bench.address)

        def come_and_go() -> None:
            (answered,) = ask(client, 1)
            assert server.call("take", max_size=1) == [1]
            server.call("answer")
            assert answer_of(answered.result(DEADLINE)) == 1
            server.call("close")
            server.call("serve_anew")

        assert_leaks_nothing(come_and_go, times=100)
