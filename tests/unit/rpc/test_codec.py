"""Messages of header and arrays: decoding returns the encoded arrays without a copy, and refuses other bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsrl.data.specs import ArraySpec
from rlsrl.rpc import codec
from rlsrl.rpc.codec import Malformed, MessageLayout, MessageTooLong, encode, split

DTYPES = ("bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64")

specs = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.builds(
        lambda shape, dtype: ArraySpec(shape=tuple(shape), dtype=dtype),
        st.lists(st.integers(0, 5), max_size=3),
        st.sampled_from(DTYPES),
    ),
    max_size=4,
)


def random_arrays(layout: MessageLayout, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.integers(0, 2, spec.shape)).astype(spec.dtype) for name, spec in layout.specs.items()}


@given(specs, st.binary(max_size=70))
def test_decoded_arrays_equal_the_encoded_ones_and_are_aligned(specs: dict[str, ArraySpec], header: bytes) -> None:
    layout = MessageLayout(specs)
    arrays = random_arrays(layout)
    message = layout.encode(header, arrays)
    decoded_header, decoded = layout.decode(message)
    assert decoded_header == header
    assert list(decoded) == list(specs)
    for name, array in arrays.items():
        assert decoded[name].dtype == array.dtype
        assert decoded[name].flags.aligned
        np.testing.assert_array_equal(decoded[name], array, strict=True)


def test_decoding_returns_read_only_views_without_a_copy() -> None:
    layout = MessageLayout({"frames": ArraySpec(shape=(3, 4), dtype="uint8")})
    message = layout.encode(b"", {"frames": np.arange(12, dtype=np.uint8).reshape(3, 4)})
    _, decoded = layout.decode(message)
    assert np.shares_memory(decoded["frames"], np.frombuffer(message, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        decoded["frames"][0, 0] = 1


def test_non_contiguous_arrays_keep_their_values() -> None:
    layout = MessageLayout({"transposed": ArraySpec(shape=(3, 2), dtype="float32")})
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    _, decoded = layout.decode(layout.encode(b"h", {"transposed": array}))
    np.testing.assert_array_equal(decoded["transposed"], array)


@given(st.data())
def test_other_lengths_are_refused(data: st.DataObject) -> None:
    layout = MessageLayout({"a": ArraySpec(shape=(5,), dtype="int32"), "b": ArraySpec(shape=(), dtype="bool")})
    message = layout.encode(b"header", random_arrays(layout))
    shorter = message[: data.draw(st.integers(0, len(message) - 1))]
    longer = message + data.draw(st.binary(min_size=1, max_size=32))
    for wrong in (shorter, longer):
        with pytest.raises(Malformed):
            layout.decode(wrong)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(noise: bytes) -> None:
    with pytest.raises(Malformed):
        split(noise)


@pytest.mark.parametrize(("header_length", "body_length"), [(2**32 - 1, 0), (0, 2**64 - 1), (16, 0), (0, 16)])
def test_false_lengths_are_refused(header_length: int, body_length: int) -> None:
    with pytest.raises(Malformed):
        split(struct.pack("<4sIQ", b"rls1", header_length, body_length))


def test_a_body_of_another_layout_is_refused_with_the_difference() -> None:
    ours = MessageLayout({"observation": ArraySpec(shape=(8, 4), dtype="float32")})
    theirs = MessageLayout({"observation": ArraySpec(shape=(8, 5), dtype="float32")})
    with pytest.raises(Malformed, match=r"body of 160 bytes .*observation float32\[8, 4\]"):
        ours.decode(theirs.encode(b"", random_arrays(theirs)))


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({}, "x is missing; there are no arrays"),
        ({"y": np.zeros(3, np.float32)}, "x is missing; there are y"),
        ({"x": np.zeros(3)}, r"x is float64\[3\], not float32\[3\]"),
        ({"x": np.zeros((1, 3), np.float32)}, r"x is float32\[1, 3\], not float32\[3\]"),
    ],
)
def test_arrays_of_another_layout_are_not_sent(arrays: dict[str, np.ndarray], complaint: str) -> None:
    layout = MessageLayout({"x": ArraySpec(shape=(3,), dtype="float32")})
    with pytest.raises(Malformed, match=complaint):
        layout.encode(b"", arrays)


def test_a_message_over_the_limit_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 1000)
    encode(b"", [np.zeros(1000 - 16 - 8, np.uint8)])
    with pytest.raises(MessageTooLong, match="limit of 1000"):
        encode(b"", [np.zeros(1000, np.uint8)])
    with pytest.raises(MessageTooLong, match="header"):
        encode(bytes(codec.MAX_HEADER_BYTES + 1))


def test_the_digest_depends_on_names_dtypes_shapes_and_order() -> None:
    a, b = ArraySpec(shape=(1,), dtype="float32"), ArraySpec(shape=(2,), dtype="float32")
    layouts = [{"a": a, "b": b}, {"b": b, "a": a}, {"a": b, "b": a}, {"a": a}, {"c": a, "b": b}]
    assert len({MessageLayout(layout).digest for layout in layouts}) == len(layouts)
    assert MessageLayout({"a": a}).digest == MessageLayout({"a": a}).digest
