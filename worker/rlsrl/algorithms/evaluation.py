"""What a batch is worth before its step: its rows evaluated once, in parts where they are large, eager or compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from rlsrl.algorithms.base import Evaluate, Tensors
from rlsrl.algorithms.compiled import compiled, compiling, form

PART = 1 << 22
"""Numbers of rows that are evaluated at a time, since networks make several times as much of them: 16 MiB as float32;
glibc maps what is larger than 32 anew for each use, and pages fault in (``PROCESS_ENVIRONMENT``)."""


def evaluated_in_parts(evaluate: Evaluate) -> Evaluate:
    """The same, of any number of rows, without gradients. All parts are of one size, so that they have one form."""

    def in_parts(params: Tensor, rows: Tensors) -> Tensors:
        count = len(next(iter(rows.values())))
        number = -(-count * sum(tensor[0].numel() for tensor in rows.values()) // PART)
        if number <= 1:
            with torch.no_grad():
                return evaluate(params, rows)
        size = -(-count // min(number, count))
        begins = [*range(0, count - size, size), count - size]
        with torch.no_grad():
            parts = [evaluate(params, {n: tensor[at : at + size] for n, tensor in rows.items()}) for at in begins]
        overlap = len(begins) * size - count
        parts[-1] = {name: tensor[overlap:] for name, tensor in parts[-1].items()}
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return in_parts


def compiled_evaluation(evaluate: Evaluate, device: torch.device) -> Evaluate:
    """The same, compiled for rows of the form of those that it is called with first; eager for others.

    Raises when it is called first:
        Exception: what torch's compiler and its helpers raise has no other root.
    """
    graph: Evaluate = compiled(evaluate, device)
    known: list[object] | None = None

    def evaluate_form(params: Tensor, rows: Tensors) -> Tensors:
        nonlocal known
        given = form([params], [rows])
        if known is None:
            with compiling():
                outputs = graph(params, rows)
            known = given
            return outputs
        return (graph if given == known else evaluate)(params, rows)

    return evaluate_form
