"""The shared memory of a parameter broadcast: one writer, any number of readers, no torn reads.

The segment starts with a page of words, then the publisher's description (JSON). At the first publication the segment
grows, once, by the shape of the versions (JSON) and two buffers that are used in turn. A buffer is a line of control
words and a payload: sequence number, version, weight vector, statistics.

A reader copies a payload, and keeps the copy only if the buffer's sequence number did not change meanwhile and the
copy's checksum matches. So correctness does not depend on the order in which processors see each other's writes. The
writer sets ``latest`` last: if it is killed at any point, ``latest`` names a complete buffer.

The memory is unmapped when the last array over it is deleted. So no function here returns arrays over it.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlsrl.data.specs import ArraySpec
from rlsrl.data.version import Version
from rlsrl.parameters.protocols import Corrupt, Parameters
from rlsrl.rpc.local import create_memory

_MAGIC = 0x52_4C_42_43_41_53_54_31
"""The segment's first word: "RLBCAST1"."""
_PAGE = 4096
_LINE = 64
_WORDS_A_LINE = _LINE // 8
_MAX_READS = 100_000
"""Attempts of one read. An attempt fails only if two publications happen during one copy, so few are needed."""
_MISMATCHES = 16
"""Attempts whose checksum fails although no write happened, before the memory counts as corrupt."""

_MAGIC_AT, _DESCRIPTION_NBYTES, _SHAPE_NBYTES, _LATEST = range(4)  # words of the first page
_BEGUN, _ENDED, _CHECKSUM = range(3)  # words of a buffer's control line
_SEQUENCE, _ATTEMPT, _STEP = range(3)  # words of a payload's first line


@dataclass(frozen=True, kw_only=True)
class BroadcastShape:
    """Layout and array shapes, which are the same for all versions of one broadcast."""

    layout: str
    num_parameters: int
    statistics: Mapping[str, ArraySpec]

    @classmethod
    def of(cls, parameters: Parameters) -> Self:
        """Return the shape of these parameters."""
        specs = {
            name: ArraySpec(shape=array.shape, dtype=array.dtype.name) for name, array in parameters.statistics.items()
        }
        return cls(layout=parameters.layout, num_parameters=parameters.vector.size, statistics=specs)

    @property
    def _specs(self) -> dict[str, ArraySpec]:
        """The payload's arrays in memory order. The weight vector has the empty name."""
        return {"": ArraySpec(shape=(self.num_parameters,), dtype="float32"), **self.statistics}

    @property
    def payload_nbytes(self) -> int:
        """Size of one payload in bytes."""
        return _LINE + sum(_round_up(spec.nbytes, _LINE) for spec in self._specs.values())

    def views(self, payload: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Return the arrays of a payload, as views. The weight vector has the empty name."""
        views = {}
        offset = _LINE
        for name, spec in self._specs.items():
            views[name] = np.ndarray(spec.shape, dtype=spec.dtype, buffer=payload, offset=offset)
            offset += _round_up(spec.nbytes, _LINE)
        return views

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value for ``from_json``."""
        return {
            "layout": self.layout,
            "num_parameters": self.num_parameters,
            "statistics": {name: spec.to_json() for name, spec in self.statistics.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the shape that ``to_json`` wrote."""
        statistics = {str(name): ArraySpec.from_json(spec) for name, spec in value["statistics"].items()}
        return cls(layout=str(value["layout"]), num_parameters=int(value["num_parameters"]), statistics=statistics)


class _Buffer:
    """One of the two buffers, as arrays over the mapped memory."""

    def __init__(self, memory: mmap.mmap, offset: int, shape: BroadcastShape) -> None:
        self.control = np.frombuffer(memory, dtype=np.int64, count=_WORDS_A_LINE, offset=offset)
        self.payload = np.frombuffer(memory, dtype=np.uint8, count=shape.payload_nbytes, offset=offset + _LINE)
        self.words = self.payload[:_LINE].view(np.int64)

    def holds(self, sequence: int) -> bool:
        """Return whether the buffer holds this publication completely, and no newer write to it has begun."""
        return bool(self.control[_ENDED] == sequence and self.control[_BEGUN] == sequence)

    @property
    def version(self) -> Version:
        """The version in the buffer. The caller must verify it with ``holds``."""
        return _version(self.words)


class SegmentWriter:
    """The publisher's end. One thread uses it."""

    def __init__(self, name: str, description: Mapping[str, Any]) -> None:
        text = json.dumps(description, separators=(",", ":")).encode()
        self._shape_at = _PAGE + len(text)
        self._fd = create_memory(name, self._shape_at)
        self._memory = mmap.mmap(self._fd, self._shape_at)
        self._memory[_PAGE:] = text
        self._words = _words(self._memory)
        self._words[_DESCRIPTION_NBYTES] = len(text)
        self._words[_MAGIC_AT] = _MAGIC
        self._sequence = 0
        self._shape: BroadcastShape | None = None
        self._buffers: tuple[_Buffer, _Buffer] | None = None
        self._views: tuple[dict[str, NDArray[Any]], ...] = ()

    def open_read_only(self) -> int:
        """Return a read-only descriptor for a reader. The caller must close it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def write(self, parameters: Parameters) -> None:
        """Write a version into the older buffer, then make it the latest. Allocates only at the first publication.

        Raises:
            ValueError: layout, vector size or statistics differ from the first version's.
        """
        if self._buffers is None or self._shape is None:
            self._shape = BroadcastShape.of(parameters)
            self._buffers = self._grow(self._shape)
            self._views = tuple(self._shape.views(buffer.payload) for buffer in self._buffers)
        sequence = self._sequence + 1
        buffer, views = self._buffers[sequence & 1], self._views[sequence & 1]
        self._check_fits(parameters, self._shape, views)
        buffer.control[_BEGUN] = sequence
        buffer.words[_SEQUENCE] = sequence
        buffer.words[_ATTEMPT], buffer.words[_STEP] = parameters.version
        np.copyto(views[""], parameters.vector)
        for name, array in parameters.statistics.items():
            np.copyto(views[name], array)
        buffer.control[_CHECKSUM] = zlib.crc32(buffer.payload.data)
        buffer.control[_ENDED] = sequence
        self._words[_LATEST] = self._sequence = sequence

    def close(self) -> None:
        """Release the memory. Readers keep their mappings."""
        os.close(self._fd)
        self._buffers, self._views = None, ()
        del self._words, self._memory

    def _grow(self, shape: BroadcastShape) -> tuple[_Buffer, _Buffer]:
        """Add the shape and the two buffers. Readers look for them once ``latest`` is not 0."""
        text = json.dumps(shape.to_json(), separators=(",", ":")).encode()
        first, second, end = _buffers_at(self._shape_at + len(text), shape)
        os.ftruncate(self._fd, end)
        self._memory = mmap.mmap(self._fd, end)
        self._memory[self._shape_at : self._shape_at + len(text)] = text
        self._words = _words(self._memory)
        self._words[_SHAPE_NBYTES] = len(text)
        return _Buffer(self._memory, first, shape), _Buffer(self._memory, second, shape)

    @staticmethod
    def _check_fits(parameters: Parameters, shape: BroadcastShape, views: Mapping[str, NDArray[Any]]) -> None:
        statistics = parameters.statistics
        fits = (
            parameters.layout == shape.layout
            and parameters.vector.shape == views[""].shape
            and statistics.keys() == shape.statistics.keys()
            and all(
                array.shape == views[name].shape and array.dtype == views[name].dtype
                for name, array in statistics.items()
            )
        )
        if not fits:
            raise ValueError(
                f"version {parameters.version} has {BroadcastShape.of(parameters)}; all versions must have {shape}"
            )


class SegmentReader:
    """A reader's end. One thread uses it."""

    def __init__(self, fd: int) -> None:
        """Take ownership of the descriptor.

        Raises:
            Corrupt: the memory is not a parameter broadcast.
        """
        self._file = os.fdopen(fd, "rb", buffering=0)
        self._memory = self._map()
        self._words = _words(self._memory)
        if self._words[_MAGIC_AT] != _MAGIC:
            raise Corrupt("the memory that the publisher sent is not a parameter broadcast")
        self._shape_at = _PAGE + int(self._words[_DESCRIPTION_NBYTES])
        self.description: dict[str, Any] = json.loads(self._memory[_PAGE : self._shape_at])
        self._shape: BroadcastShape | None = None
        self._buffers: tuple[_Buffer, _Buffer] | None = None

    @property
    def version(self) -> Version | None:
        """The latest version, from a few words of memory; None before the first publication."""
        for _ in range(_MAX_READS):
            sequence = int(self._words[_LATEST])
            if sequence == 0:
                return None
            buffer = self._buffer(sequence)
            version = buffer.version
            if buffer.holds(sequence):
                return version
        raise Corrupt("the latest version of a parameter broadcast is never complete")

    def read(self) -> Parameters:
        """Return a copy of the latest version, complete and verified. Call it only if ``version`` is not None.

        Raises:
            Corrupt: the memory is not what was published.
        """
        mismatches = 0
        for _ in range(_MAX_READS):
            sequence = int(self._words[_LATEST])
            buffer = self._buffer(sequence)
            checksum = buffer.control[_CHECKSUM]
            payload = buffer.payload.copy()
            if not buffer.holds(sequence):
                continue
            if zlib.crc32(payload.data) == checksum:
                return self._parameters(payload)
            mismatches += 1
            if mismatches == _MISMATCHES:
                break
        raise Corrupt("the latest version of a parameter broadcast fails its checksum")

    def _parameters(self, payload: NDArray[np.uint8]) -> Parameters:
        assert self._shape is not None
        payload.flags.writeable = False
        arrays = self._shape.views(payload)
        vector = arrays.pop("")
        version = _version(payload[:_LINE].view(np.int64))
        return Parameters(version=version, vector=vector, layout=self._shape.layout, statistics=arrays)

    def _buffer(self, sequence: int) -> _Buffer:
        """Return the buffer of that publication. The first call maps the buffers."""
        if self._buffers is None:
            self._memory = self._map()
            self._words = _words(self._memory)
            shape_ends = self._shape_at + int(self._words[_SHAPE_NBYTES])
            self._shape = BroadcastShape.from_json(json.loads(self._memory[self._shape_at : shape_ends]))
            first, second, _ = _buffers_at(shape_ends, self._shape)
            self._buffers = (_Buffer(self._memory, first, self._shape), _Buffer(self._memory, second, self._shape))
            self._file.close()
        return self._buffers[sequence & 1]

    def _map(self) -> mmap.mmap:
        return mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ)


def _words(memory: mmap.mmap) -> NDArray[np.int64]:
    return np.frombuffer(memory, dtype=np.int64, count=_WORDS_A_LINE)


def _version(words: NDArray[np.int64]) -> Version:
    return Version(int(words[_ATTEMPT]), int(words[_STEP]))


def _buffers_at(offset: int, shape: BroadcastShape) -> tuple[int, int, int]:
    """Return the offsets of both buffers, the first at or after ``offset``, and of the segment's end."""
    first = _round_up(offset, _PAGE)
    second = first + _round_up(_LINE + shape.payload_nbytes, _PAGE)
    return first, second, second + _round_up(_LINE + shape.payload_nbytes, _PAGE)


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
