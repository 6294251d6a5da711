"""Values and spaces survive the way through JSON, those that are not finite included; nothing else is decoded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlsrl.envs.codec import CodecError, decode, decode_element, decode_number, decode_space, encode, encode_space

SPACES = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Box(np.array([-np.inf, 0]), np.array([np.inf, 7]), dtype=np.float64),
    spaces.Box(0, 255, (2, 3, 1), np.uint8),
    spaces.Box(-np.inf, np.inf, (), np.float32),
    spaces.Discrete(4),
    spaces.Discrete(4, start=-2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], dtype=np.int32),
    spaces.MultiDiscrete([2, 3], start=[1, 5]),
    spaces.MultiBinary(3),
    spaces.MultiBinary([2, 2]),
    spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1, (1,), np.float32)]),
    spaces.Dict({"z": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.MultiBinary(2)})}),
]


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple):
        return isinstance(right, tuple) and all(map(same, left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    return bool(left == right)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_and_their_elements_come_back_equal(space: spaces.Space[Any]) -> None:
    back = decode_space(through_json(encode_space(space)))
    assert back == space
    assert back.dtype == space.dtype
    for _ in range(5):
        element = space.sample()
        decoded = decode_element(space, through_json(encode(element)))
        assert same(element, decoded)
        assert space.contains(decoded)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.5])
def test_numbers_survive_to_the_bit(value: float) -> None:
    for dtype in (np.float32, np.float64):
        array = np.array([value, 0.0], dtype)
        assert decode(through_json(encode(array))).tobytes() == array.tobytes()
    number = decode_number(through_json(encode(value)))
    assert np.float64(number).tobytes() == np.float64(value).tobytes()


def test_info_keeps_what_json_can_say() -> None:
    info = {"word": "a", "list": (1, 2.5, None), "nested": {"array": np.arange(2)}, 7: np.float32(0.5), "odd": object()}
    decoded = decode(through_json(encode(info)))
    assert decoded.pop("nested")["array"].tolist() == [0, 1]
    assert decoded == {"word": "a", "list": [1, 2.5, None], "7": 0.5}


def test_lists_are_accepted_where_the_space_is_known() -> None:
    box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    decoded = decode_element(box, [1, {"$float": "NaN"}])
    assert decoded.dtype == np.float32
    assert decoded[0] == 1
    assert np.isnan(decoded[1])
    assert decode_element(spaces.Tuple([spaces.Discrete(2), box]), [1, [0, 2]])[1].tolist() == [0, 2]


def test_decoded_arrays_can_be_written() -> None:
    decode(through_json(encode(np.zeros(2))))[0] = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"$array": "AAAA", "dtype": "O", "shape": [1]}, "holds no numbers"),
        ({"$array": "AAAA", "dtype": "<f4", "shape": [1]}, "an array is malformed"),
        ({"$array": "?", "dtype": "<f4", "shape": [1]}, "an array is malformed"),
        ({"$array": "AAAA"}, "an array is malformed"),
        ({"$array": "AAAA", "dtype": "what", "shape": [1]}, "'what' is unknown"),
        ({"$float": "nan"}, "allowed: NaN, Infinity, -Infinity"),
    ],
)
def test_malformed_values_are_refused(value: Any, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        decode(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "is not a space"),
        ({"type": "Text"}, "space type 'Text'; allowed: Box, Discrete"),
        ({"type": "Box", "low": 0, "high": 1, "shape": [2], "dtype": "O"}, "holds no numbers"),
        ({"type": "Discrete"}, "is not a space"),
        ({"type": "Discrete", "n": 0}, "is not a space"),
    ],
)
def test_malformed_spaces_are_refused(value: Any, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        decode_space(value)


def test_a_space_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(CodecError, match=r"Text.* cannot be sent; allowed: Box"):
        encode_space(spaces.Text(3))
