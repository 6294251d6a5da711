"""The delay between attempts, and the thread that keeps one streaming call open."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import grpc
import pytest

from rlsrl.rpc import reconnect
from rlsrl.rpc.back_off import BackOff
from rlsrl.rpc.reconnect import ReconnectingCall

ADDRESS = "unix-abstract:rlsrl-test-reconnect"
SECONDS = 20.0


class Call:
    """A call without a server: it yields nothing and ends when cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.is_drained = False

    def cancel(self) -> None:
        self.cancelled.set()

    def __iter__(self) -> Iterator[bytes]:
        self.cancelled.wait(SECONDS)
        self.is_drained = True
        return iter(())


class Client:
    """An owner whose calls last until they are cancelled, or end at once."""

    def __init__(self, *, lasting: bool, answered: bool = False, error: Exception | None = None) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.calls: list[Call] = []
        self._lasting = lasting
        self._answered = answered
        self._error = error
        self.stream = ReconnectingCall(ADDRESS, tls=None, name="test", changed=self.changed, converse=self._converse)

    def _converse(self, _: grpc.Channel) -> bool:
        call = Call()
        with self.stream.reading(call):  # type: ignore[arg-type]  # all that is used of a call
            with self.changed:
                self.calls.append(call)
                self.changed.notify_all()
            if self._error is not None:
                raise self._error
            if self._lasting:
                assert not list(call)
        return self._answered

    def wait_for_calls(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.calls) >= number, SECONDS)


@pytest.fixture(autouse=True)
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the requested delays without waiting."""
    asked: list[float] = []

    class Immediate(BackOff):
        def next_delay(self) -> float:
            asked.append(super().next_delay())
            return 0.0

    monkeypatch.setattr(reconnect, "BackOff", Immediate)
    return asked


def test_delays_double_up_to_the_limit_and_start_again_after_a_success() -> None:
    back_off = BackOff(first_seconds=0.1, max_seconds=0.5)
    assert [back_off.next_delay() for _ in range(4)] == [0.1, 0.2, 0.4, 0.5]
    back_off.reset()
    assert back_off.next_delay() == 0.1


def test_a_call_that_ends_is_followed_by_another(delays: list[float]) -> None:
    client = Client(lasting=False)
    client.stream.start()
    client.wait_for_calls(4)
    client.stream.close()
    assert delays[:3] == [0.1, 0.2, 0.4], "a server that does not answer is called less and less often"


def test_after_an_answer_the_first_delay_comes_again(delays: list[float]) -> None:
    client = Client(lasting=False, answered=True)
    client.stream.start()
    client.wait_for_calls(4)
    client.stream.close()
    assert set(delays) == {0.1}


def test_reconnecting_ends_one_call_and_closing_the_last() -> None:
    client = Client(lasting=True)
    client.stream.start()
    client.wait_for_calls(1)
    client.stream.reconnect()
    client.wait_for_calls(2)
    client.stream.close()
    assert all(call.cancelled.is_set() and call.is_drained for call in client.calls)
    assert len(client.calls) == 2
    client.stream.close()


def test_a_finished_thread_lets_its_call_end_by_itself() -> None:
    client = Client(lasting=True)
    client.stream.start()
    client.wait_for_calls(1)
    client.stream.finish()
    assert not client.calls[0].cancelled.is_set()
    client.calls[0].cancel()
    assert client.stream.close(grace=SECONDS)
    assert len(client.calls) == 1


def test_a_closing_thread_continues_within_its_grace() -> None:
    client = Client(lasting=True)
    client.stream.start()
    client.wait_for_calls(1)
    closing = threading.Thread(target=client.stream.close, kwargs={"grace": SECONDS})
    closing.start()
    client.stream.reconnect()
    client.wait_for_calls(2)
    client.stream.finish()
    client.calls[1].cancel()
    closing.join(SECONDS / 2)
    assert not closing.is_alive()
    assert len(client.calls) == 2


def test_an_exception_is_final_and_notified() -> None:
    error = RuntimeError("refused")
    client = Client(lasting=False, error=error)
    client.stream.start()
    with client.changed:
        assert client.changed.wait_for(lambda: client.stream.failure is not None, SECONDS)
    assert client.stream.failure is error
    assert client.stream.close(grace=SECONDS)
    assert len(client.calls) == 1
    assert client.calls[0].is_drained, "a call that is not read to its end leaks"


def test_a_call_begun_while_closing_is_cancelled() -> None:
    client = Client(lasting=True)
    client.stream.finish()
    call = Call()
    with client.stream.reading(call):  # type: ignore[arg-type]  # all that is used of a call
        assert call.cancelled.is_set()


def test_closing_before_starting_returns_at_once() -> None:
    Client(lasting=True).stream.close()


@pytest.mark.parametrize("address", ["nowhere", "unix:/tmp/socket", "host:port"])
def test_an_address_of_neither_form_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="neither unix-abstract:NAME nor HOST:PORT"):
        ReconnectingCall(address, tls=None, name="test", changed=threading.Condition(), converse=lambda _: True)


def test_delays_are_the_documented_ones() -> None:
    back_off = BackOff()
    delays = list(itertools.islice(iter(back_off.next_delay, None), 6))
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
