"""Evaluates the recurrent layer of an exported actor. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlsrl.policies.exported import Floats, RecurrentLayer

_SIGMOIDS_FIRST = {"gru": (0, 1, 2), "lstm": (0, 1, 3, 2)}
"""The gates in the order in which they are computed, by their place in torch's: those with a sigmoid come first."""


class RecurrentWeights:
    """The loaded weights of a recurrent layer, [gates, inputs and state], gates with a sigmoid first.

    As s(x) = (1 + tanh(x / 2)) / 2 for the logistic function s, these gates' weights are halved: so one tanh serves
    all gates.
    """

    def __init__(self, layer: RecurrentLayer) -> None:
        self.layer = layer
        size, gates = layer.size, layer.num_rows
        together = gates if layer.kind == "lstm" else 2 * size
        self.joint: Floats = np.zeros((together, size + layer.in_size + 1), np.float32)
        """For the state, the inputs and the ones below them: of all gates of an LSTM, of two gates of a GRU."""
        self.new_of_inputs: Floats = np.zeros((size, layer.in_size + 1), np.float32)
        """A GRU's third gate, for the inputs and the ones below them."""
        self.new_of_state: Floats = np.zeros((size, size), np.float32)
        """A GRU's third gate, for the state."""
        self.new_bias: Floats = np.zeros((size, 1), np.float32)
        """Is added to the product of ``new_of_state``."""

    def load(self, vector: NDArray[np.float32]) -> None:
        """Fill the arrays, in place, with the layer's parameters in the flat vector."""
        layer = self.layer
        size, rows = layer.size, layer.num_rows
        order = _SIGMOIDS_FIRST[layer.kind]

        def gates(begin: int, columns: int) -> list[Floats]:
            found = vector[begin : begin + rows * columns].reshape(-1, size, columns)
            return [found[gate] for gate in order]

        of_inputs, of_state = gates(layer.weight_ih, layer.in_size), gates(layer.weight_hh, size)
        bias_of_inputs, bias_of_state = gates(layer.bias_ih, 1), gates(layer.bias_hh, 1)
        for gate in range(len(self.joint) // size):
            block = self.joint[gate * size : (gate + 1) * size]
            block[:, :size], block[:, size:-1] = of_state[gate], of_inputs[gate]
            block[:, -1:] = bias_of_inputs[gate] + bias_of_state[gate]
            if gate < len(order) - 1:
                block *= 0.5
        if layer.kind == "gru":
            self.new_of_inputs[:, :-1], self.new_of_inputs[:, -1:] = of_inputs[-1], bias_of_inputs[-1]
            self.new_of_state[...], self.new_bias[...] = of_state[-1], bias_of_state[-1]


class RecurrentStep:
    """Computes the layer's next state for N lanes. All arrays are [features, N]. One thread uses it."""

    def __init__(self, weights: RecurrentWeights, num_lanes: int) -> None:
        layer = weights.layer
        self._weights = weights
        self._size = size = layer.size
        self.joint: Floats = np.ones((size + layer.in_size + 1, num_lanes), np.float32)
        """The state, the inputs, which the caller writes, and ones."""
        self._hidden = self.joint[:size]
        self._hidden[...] = 0.0
        self._cell: Floats = np.zeros((size, num_lanes), np.float32)
        self.state: Mapping[str, Floats] = {"hidden": self._hidden}
        """By name, [size, N]: that before the next ``forward``. Callers write it in place."""
        self._next = self._gru
        if layer.kind == "lstm":
            self.state = {"hidden": self._hidden, "cell": self._cell}
            self._next = self._lstm
        self._gates: Floats = np.empty((layer.num_rows, num_lanes), np.float32)
        self._of_state: Floats = np.empty((size, num_lanes), np.float32)

    def forward(self, *, out: Floats, product: Callable[..., Any]) -> None:
        """Compute the next state by the inputs, and write its ``hidden`` to ``out``, [size, N], too."""
        self._next(product)
        out[...] = self._hidden

    def _gru(self, product: Callable[..., Any]) -> None:
        weights, size, hidden = self._weights, self._size, self._hidden
        sigmoids, new, of_state = self._gates[: 2 * size], self._gates[2 * size :], self._of_state
        product(weights.joint, self.joint, out=sigmoids)
        _sigmoid(sigmoids)
        reset, update = sigmoids[:size], sigmoids[size:]
        product(weights.new_of_inputs, self.joint[size:], out=new)
        product(weights.new_of_state, hidden, out=of_state)
        of_state += weights.new_bias
        of_state *= reset
        new += of_state
        np.tanh(new, out=new)
        hidden -= new
        hidden *= update
        hidden += new

    def _lstm(self, product: Callable[..., Any]) -> None:
        size, gates, cell, hidden = self._size, self._gates, self._cell, self._hidden
        product(self._weights.joint, self.joint, out=gates)
        np.tanh(gates, out=gates)
        sigmoids = gates[: 3 * size]
        sigmoids += 1.0
        sigmoids *= 0.5
        into, keep, out, new = gates[:size], gates[size : 2 * size], gates[2 * size : 3 * size], gates[3 * size :]
        cell *= keep
        new *= into
        cell += new
        np.tanh(cell, out=hidden)
        hidden *= out


def _sigmoid(halves: Floats) -> None:
    """Replace x / 2 by the logistic function of x, in place."""
    np.tanh(halves, out=halves)
    halves += 1.0
    halves *= 0.5
