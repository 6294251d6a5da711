"""The handshake of sample streams: each field of hello and welcome is checked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlsrl.data.slots import ProducerId
from rlsrl.runtime.ledger import ProducerProgress
from rlsrl.streams.handshake import MAX_LANES, PROTOCOL, Hello, PeerRefused, Welcome, refusal_to_json
from rlsrl.streams.protocols import HandshakeRefused, StreamError
from rlsrl.testing.stream_bench import TOKEN, small_layout

LAYOUT = small_layout()
HELLO = Hello(
    producer=ProducerId(3, 2),
    layout=LAYOUT,
    unacknowledged=((4, 6), (7, 5)),
    num_in_hand=1,
    progress=ProducerProgress(
        inherited=20, sequence=3, acknowledged=44, left=((0, 1, 6, False), (1, 0, 3, True)), restored=True
    ),
)


def read(message: dict[str, Any]) -> Hello:
    return Hello.from_json(message, token=TOKEN, layout_digest=LAYOUT.step_digest)


def test_a_hello_is_encoded_and_decoded() -> None:
    assert read(json.loads(json.dumps(HELLO.to_json(TOKEN)))) == HELLO


def test_a_welcome_is_encoded_and_decoded() -> None:
    welcome = Welcome(mark=-1, num_slots=2, claims=(4, 5))
    assert Welcome.from_json(json.loads(json.dumps(welcome.to_json())), stream="s") == welcome


@pytest.mark.parametrize(
    ("change", "kind", "texts"),
    [
        ({"protocol": 99}, "protocol", [f"protocol {PROTOCOL} at the consumer", "99 at the producer"]),
        ({"protocol": "x" * 10_000}, "protocol", [f"protocol {PROTOCOL} at the consumer"]),
        ({"token": "wrong"}, "token", ["token"]),
        ({"token": None}, "token", ["token"]),
        ({"token": "ü" * 10}, "token", ["token"]),
        ({"index": -1}, "malformed", ["-1"]),
        ({"index": True}, "malformed", ["True"]),
        ({"index": "0"}, "malformed", ["'0'"]),
        ({"incarnation": 1 << 63}, "malformed", ["2**62"]),
        ({"num_in_hand": 65}, "malformed", ["slots held"]),
        ({"num_in_hand": 1e300}, "malformed", ["integer"]),
        ({"unacknowledged": [[1, 1], [1, 1]]}, "malformed", ["ascending"]),
        ({"unacknowledged": [[1]]}, "malformed", []),
        ({"unacknowledged": 7}, "malformed", []),
        ({"unacknowledged": {}}, None, []),
        ({"left": [[2, 0, 1, False]]}, "malformed", ["not below 2"]),
        ({"left": [[1, 0, 1, True], [0, 5, 1, True]]}, "malformed", ["not ascending"]),
        ({"left": [[1, 0, 1, 1]]}, "malformed", ["true or false"]),
        ({"left": None}, "malformed", []),
        ({"account": [20, 3]}, "malformed", []),
        ({"account": [20, -2, 44]}, "malformed", ["from -1"]),
        ({"account": [20, 4, 44]}, "malformed", ["both acknowledged and unacknowledged"]),
        ({"account": [20, 3, 19]}, "malformed", ["from 20 to 19"]),
        ({"restored": 1}, "malformed", ["true or false"]),
        ({"layout": None}, "malformed", []),
        ({"layout": {"num_steps": 0, "num_lanes": 1, "fields": {}}}, "malformed", ["at least 1"]),
        ({"layout": small_layout(observation=9).to_json()}, "layout", [LAYOUT.step_digest, "at the producer"]),
        ({"layout": LAYOUT.with_lanes(MAX_LANES + 1).to_json()}, "layout", [str(MAX_LANES), str(MAX_LANES + 1)]),
    ],
)
def test_each_field_of_a_hello_is_checked(change: dict[str, Any], kind: str | None, texts: list[str]) -> None:
    message = HELLO.to_json(TOKEN) | change
    if kind is None:
        read(message)
        return
    with pytest.raises(PeerRefused) as refusal:
        read(message)
    assert refusal.value.kind == kind
    assert len(str(refusal.value)) < 1000
    for text in texts:
        assert text in str(refusal.value)


@pytest.mark.parametrize("field", [field for field in HELLO.to_json(TOKEN) if field not in ("protocol", "token")])
def test_a_missing_field_is_named(field: str) -> None:
    message = HELLO.to_json(TOKEN)
    del message[field]
    with pytest.raises(PeerRefused, match=field) as refusal:
        read(message)
    assert refusal.value.kind == "malformed"


def test_the_token_is_checked_first() -> None:
    with pytest.raises(PeerRefused) as refusal:
        read({"protocol": PROTOCOL, "token": "wrong", "layout": "nonsense"})
    assert refusal.value.kind == "token"


def test_no_message_contains_the_expected_token() -> None:
    with pytest.raises(PeerRefused) as refusal:
        read(HELLO.to_json("wrong"))
    assert TOKEN not in json.dumps(refusal_to_json(refusal.value))
    assert TOKEN not in repr(HELLO)


def test_a_refusal_reaches_the_producer_with_its_text() -> None:
    message = refusal_to_json(PeerRefused("layout", "slot layout aaa at the consumer, bbb at the producer"))
    with pytest.raises(HandshakeRefused, match=r"samples-0.*aaa at the consumer, bbb at the producer"):
        Welcome.from_json(message, stream="samples-0")


def test_an_answer_of_another_protocol_is_refused_with_both_versions() -> None:
    with pytest.raises(HandshakeRefused, match=f"protocol {PROTOCOL} at the producer, 7 at the consumer"):
        Welcome.from_json({"protocol": 7, "mark": 0, "num_slots": 2, "claims": []}, stream="s")


@pytest.mark.parametrize("change", [{"mark": None}, {"num_slots": -1}, {"claims": ["x"]}, {"claims": None}])
def test_an_invalid_answer_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(StreamError, match="is invalid"):
        Welcome.from_json(Welcome(mark=0, num_slots=2, claims=()).to_json() | change, stream="s")
