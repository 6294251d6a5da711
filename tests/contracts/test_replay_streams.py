"""A rank and its shards over real sockets: who may speak, what arrives, and what an end looks like to the other end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlsrl.data.specs import ArraySpec
from rlsrl.rpc.codec import Malformed
from rlsrl.rpc.tls import Tls, tls_from_environment
from rlsrl.streams.grpc_replay.messages import (
    FROM_RANK,
    FROM_SHARD,
    Alive,
    DrawRequest,
    RankWelcome,
    ReplayCodec,
    ReplayMessage,
    Rows,
    Settle,
    ShardHello,
)
from rlsrl.streams.grpc_replay.rank_end import ShardServer
from rlsrl.streams.grpc_replay.shard_end import ShardConnection
from rlsrl.streams.protocols import HandshakeRefused
from rlsrl.testing.contexts import TOKEN
from rlsrl.testing.waiting import until

ROW = {"observation": ArraySpec(shape=(3,), dtype="float32"), "key": ArraySpec(shape=(), dtype="uint8")}
CODEC = ReplayCodec(ROW, {"n_step": 1})


def rows_of(number: int) -> Rows:
    arrays = CODEC.rows(
        {"observation": np.arange(3.0 * number, dtype=np.float32).reshape(number, 3), "key": np.ones(number, np.uint8)},
        key=np.arange(number),
        share=np.full(number, 0.5),
    )
    return Rows(step=3, trial=0, mean_age=1.5, num_rows=number, arrays=arrays, mass=1 << 80, num_transitions=4)


class Bench:
    """A rank's end, and shards' ends that answer draws with rows. The test drives both."""

    def __init__(
        self,
        resources: ExitStack,
        address: str,
        tls: Tls | None,
        shards: Iterable[int] = (),
        peer_timeout: float = 60.0,
        lives: Mapping[int, int] | None = None,
    ) -> None:
        self._resources = resources
        settings = {"token": TOKEN, "tls": tls, "peer_timeout": peer_timeout}
        self.server = ShardServer(address, CODEC, shards=shards, lives=lives, **settings)
        resources.enter_context(closing(self.server))
        self.tls = tls
        self.heard: list[ReplayMessage] = []
        self.taken: list[tuple[int, ReplayMessage | None]] = []

    def shard(
        self, index: int = 0, *, token: str = TOKEN, codec: ReplayCodec = CODEC, life: int = 1
    ) -> ShardConnection:
        def answers(message: ReplayMessage) -> Iterable[ReplayMessage]:
            self.heard.append(message)
            return [rows_of(message.num_rows)] if isinstance(message, DrawRequest) else []

        hello = ShardHello(index=index, digest=codec.digest, life=life, env_steps=7, lanes=2, mass=5, num_transitions=4)
        connection = ShardConnection(
            self.server.address, codec, token=token, tls=self.tls, hello=lambda: hello, answers=answers
        )
        return self._resources.enter_context(closing(connection))

    def until_taken(self, count: int, *shards: ShardConnection) -> None:
        def has_taken() -> bool:
            for shard in shards:
                shard.attend()
            self.server.wait(0.05)
            self.taken += self.server.take()
            return len(self.taken) >= count

        until(has_taken, f"{count} messages")

    def welcome(self, index: int = 0) -> None:
        self.server.send(index, RankWelcome(step=3, show_life_seconds=self.server.show_life_seconds))


def is_connected(shard: ShardConnection) -> bool:
    shard.attend()
    return shard.is_connected


@pytest.fixture(params=["unix", "tcp", "tls"])
def make_bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    tls = None
    if request.param == "tls":
        request.getfixturevalue("certificates")
        tls = tls_from_environment()
    address = f"unix-abstract:replay-{tmp_path.name}" if request.param == "unix" else "127.0.0.1:0"
    with ExitStack() as resources:
        yield lambda **settings: Bench(resources, address, tls, **settings)


def test_rows_and_counts_arrive_as_they_were_sent(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    shard = bench.shard(index=4)
    bench.until_taken(1, shard)
    bench.welcome(4)
    bench.server.send(4, DrawRequest(step=3, trial=0, num_rows=5, seed=1 << 70))
    bench.until_taken(2, shard)
    (first, hello), (second, rows) = bench.taken
    assert (first, second) == (4, 4)
    assert isinstance(hello, ShardHello)
    assert hello.env_steps == 7
    assert isinstance(rows, Rows)
    assert rows.mass == 1 << 80
    expected = rows_of(5)
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(rows.arrays[name], array)
    assert [*CODEC.fields_of(rows.arrays)] == [*ROW]
    assert [type(message) for message in bench.heard] == [RankWelcome, DrawRequest]
    assert shard.is_connected


def test_messages_to_a_shard_that_is_gone_go_nowhere(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    bench.welcome(0)
    shard = bench.shard()
    bench.until_taken(1, shard)
    shard.close()
    bench.until_taken(2)
    assert bench.taken[1] == (0, None)
    bench.welcome(0)
    assert not any(isinstance(message, RankWelcome) for message in bench.heard)


def test_a_shard_that_connects_again_takes_the_place_of_its_former_connection(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    former, newer = bench.shard(), bench.shard()
    bench.until_taken(1, former)
    bench.until_taken(3, newer)
    assert [type(message) for _, message in bench.taken] == [ShardHello, type(None), ShardHello]
    bench.welcome()
    until(lambda: is_connected(newer), "the newer one hears the rank")


def test_a_shard_whose_successor_was_heard_is_refused(make_bench: Callable[..., Bench]) -> None:
    """It lives on where its node was cut off, and later all that it has stored would count once more."""
    bench = make_bench(lives={1: 3})
    successors = [bench.shard(index=0, life=2), bench.shard(index=1, life=3)]
    bench.until_taken(2, *successors)
    for stale in (bench.shard(index=0, life=1), bench.shard(index=1, life=2)):
        stale.attend()
        until(lambda stale=stale: stale._has_ended, "the refusal")
    bench.until_taken(3, *successors, bench.shard(index=2))
    assert [(index, type(message)) for index, message in bench.taken[2:]] == [(2, ShardHello)]


def test_a_shard_finds_the_next_life_of_its_rank(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    shard = bench.shard()
    bench.until_taken(1, shard)
    bench.welcome()
    until(lambda: is_connected(shard), "the rank has answered")
    address = bench.server.address
    bench.server.close()
    until(lambda: not is_connected(shard), "the shard sees the end")
    bench.server = ShardServer(address, CODEC, shards=(), token=TOKEN, tls=bench.tls, peer_timeout=60.0)
    with closing(bench.server):
        bench.taken.clear()
        bench.until_taken(1, shard)
        assert isinstance(bench.taken[0][1], ShardHello)


def test_a_silent_shard_counts_as_dead(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(peer_timeout=1.5)
    shard = bench.shard()
    bench.until_taken(1, shard)
    bench.welcome()
    until(lambda: is_connected(shard), "the rank has answered")
    bench.until_taken(2)  # without a call of attend
    assert bench.taken[1] == (0, None)


def test_a_shard_that_never_connects_counts_as_dead_once_and_is_admitted_later(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(shards=range(2), peer_timeout=1.5)
    present, late = bench.shard(index=0), bench.shard(index=1)
    bench.until_taken(1, present)
    bench.welcome(0)
    bench.until_taken(2, present)
    assert [(index, type(message)) for index, message in bench.taken] == [(0, ShardHello), (1, type(None))]
    bench.until_taken(3, present, late)
    assert [(index, type(message)) for index, message in bench.taken[2:]] == [(1, ShardHello)]


def test_a_wrong_token_is_refused_for_good(make_bench: Callable[..., Bench]) -> None:
    shard = make_bench().shard(token="another")
    with pytest.raises(HandshakeRefused, match="refused"):
        until(lambda: is_connected(shard), "the refusal")


def test_a_shard_with_other_rows_or_settings_is_not_admitted(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    other, right = bench.shard(index=1, codec=ReplayCodec(ROW, {"n_step": 2})), bench.shard(index=2)
    bench.until_taken(1, other, right)
    assert [index for index, _ in bench.taken] == [2]
    assert not other.is_connected


BAD: tuple[tuple[str, Any], ...] = (
    ("another kind", Alive()),
    ("a negative number of rows", DrawRequest(step=0, trial=0, num_rows=-1, seed=0)),
    ("a text for a number", DrawRequest(step=0, trial="0", num_rows=1, seed=0)),  # type: ignore[arg-type]
    ("a truth for a number", DrawRequest(step=True, trial=0, num_rows=1, seed=0)),
)


@pytest.mark.parametrize("message", [message for _, message in BAD], ids=[name for name, _ in BAD])
def test_invalid_messages_are_refused(message: ReplayMessage) -> None:
    with pytest.raises(Malformed):
        CODEC.decode(CODEC.encode(message), FROM_RANK)


def test_a_body_that_does_not_fit_its_header_is_refused() -> None:
    arrays = {"key": np.zeros(3, np.int64), "is_trained": np.ones(3, bool), "error": np.zeros(3, np.float32)}
    raw = CODEC.encode(Settle(step=1, num_rows=3, arrays=arrays))
    assert isinstance(CODEC.decode(raw, FROM_RANK), Settle)
    for changed in (raw.replace(b'"num_rows":3', b'"num_rows":9'), raw[:-16], b"rls1" + raw[4:40], b""):
        with pytest.raises(Malformed):
            CODEC.decode(changed, FROM_RANK)
    with pytest.raises(Malformed, match="has no known kind"):
        CODEC.decode(raw, FROM_SHARD)


def test_large_rows_come_in_several_messages() -> None:
    codec = ReplayCodec({"image": ArraySpec(shape=(84, 84, 4), dtype="uint8")}, None)
    assert 100 < codec.rows_per_message < 400
    assert ReplayCodec({"image": ArraySpec(shape=(4000, 4000), dtype="uint8")}, None).rows_per_message == 1
