"""Weights by name: files of rlsrl and of other programs, and how two networks differ."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load, save

from rlsrl.data.version import Version
from rlsrl.parameters.encoding import encode_parameters
from rlsrl.parameters.layout import difference, joined, layout_digest, shapes_in, split
from rlsrl.parameters.protocols import Corrupt, Parameters
from rlsrl.parameters.weights_file import decode_version, decode_weights, encode_weights

SHAPES = {"z.weight": (3, 2), "a.bias": (3,), "scale": ()}
VECTOR = np.arange(10, dtype=np.float32)
PARAMETERS = Parameters(
    version=Version(2, 30),
    vector=VECTOR,
    layout=layout_digest(SHAPES),
    statistics={"observation/mean": np.arange(2, dtype=np.float32), "acting/epsilon": np.float32(0.1).reshape(())},
)
METADATA = {"network": {name: list(shape) for name, shape in SHAPES.items()}, "env_steps": 7.0}


def encoded() -> bytes:
    return encode_weights(PARAMETERS, created_at=5.0, metadata=METADATA)


def test_a_file_has_each_parameter_by_its_name_and_is_read_back_as_the_version() -> None:
    tensors = load(encoded())
    assert tensors["z.weight"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert tensors["a.bias"].tolist() == [6, 7, 8]
    assert float(tensors["scale"]) == 9
    parameters, header = decode_version(encoded(), "file")
    assert (parameters.version, parameters.layout) == (PARAMETERS.version, PARAMETERS.layout)
    np.testing.assert_array_equal(parameters.vector, VECTOR)
    assert {name: array.tolist() for name, array in parameters.statistics.items()} == {
        name: array.tolist() for name, array in PARAMETERS.statistics.items()
    }
    assert (header.created_at, header.num_parameters, header.metadata) == (5.0, 10, METADATA)


def test_every_changed_byte_is_found() -> None:
    data = encoded()
    for place in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 4
        with pytest.raises(Corrupt, match=r"^file: "):
            decode_version(bytes(damaged), "file")


def test_a_file_of_another_program_has_weights_and_no_version() -> None:
    arrays = {"b": np.ones((2, 2), np.float16), "a": np.full(3, 0.5, np.float64)}
    for metadata in (None, {"format": "pt"}):
        found = decode_weights(save(arrays, metadata), "file")
        assert found.header is None
        assert {name: (array.dtype.name, array.tolist()) for name, array in found.tensors.items()} == {
            "b": ("float32", [[1, 1], [1, 1]]),
            "a": ("float32", [0.5, 0.5, 0.5]),
        }
        with pytest.raises(Corrupt, match="another program wrote it: it does not say of which version"):
            decode_version(save(arrays, metadata), "file")
    with pytest.raises(Corrupt, match="step is int64; weights are floating-point numbers"):
        decode_weights(save({"step": np.zeros(1, np.int64)}), "file")
    for value in (np.nan, 1e300):
        with pytest.raises(Corrupt, match="file: a holds NaN, infinity or what float32 cannot hold"):
            decode_weights(save({"a": np.array([0.0, value])}), "file")


def test_other_files_are_refused() -> None:
    stored = encode_parameters(PARAMETERS, created_at=0.0, metadata=METADATA)
    with pytest.raises(Corrupt, match=r"has the format rlsrl\.parameters\.1, of a parameter store"):
        decode_weights(stored, "file")
    for data in (b"", b"no weights", encoded()[:-1]):
        with pytest.raises(Corrupt, match=r"^file: "):
            decode_weights(data, "file")


def test_a_version_without_names_is_not_written() -> None:
    with pytest.raises(ValueError, match=r"version 2\.30 does not have the names of its weights"):
        encode_weights(PARAMETERS, created_at=0.0, metadata={})
    with pytest.raises(ValueError, match="10 weights are not the 3 of 1 named parameters"):
        encode_weights(PARAMETERS, created_at=0.0, metadata={"network": {"a": [3]}})
    for broken in ({"network": [1]}, {"network": {"a": 3}}):
        with pytest.raises(ValueError, match="not shapes by name"):
            shapes_in(broken)


def test_weights_are_put_in_the_order_of_another_network() -> None:
    other = {name: SHAPES[name] for name in ("scale", "a.bias", "z.weight")}
    tensors = split(VECTOR, SHAPES)
    assert joined(tensors, other).tolist() == [9, 6, 7, 8, 0, 1, 2, 3, 4, 5]
    assert difference(SHAPES, other) == ""
    assert layout_digest(SHAPES) != layout_digest(other)


def test_differences_name_the_parameters_and_both_shapes() -> None:
    wide = {**SHAPES, "z.weight": (4, 2)}
    assert difference(SHAPES, wide) == "z.weight is [3, 2] there and [4, 2] here"
    more = {**SHAPES, **{f"layer.{number}": (1,) for number in range(5)}}
    text = difference(SHAPES, more)
    assert text.startswith("layer.0 is missing there and [1] here; ")
    assert text.endswith("; 2 more parameters differ")
    assert difference(more, SHAPES).startswith("layer.0 is [1] there and missing here; ")
