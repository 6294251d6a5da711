"""Evaluate a batch's rows once before its step: in parts where the rows are large, eager or compiled."""

from __future__ import annotations

import torch

from rlsrl.algorithms.base import Evaluate, Tensors
from rlsrl.algorithms.compiled import compiled, compiling, form

MAX_ELEMENTS = 1 << 22
"""Array elements of the rows in one part: 16 MiB as float32. Networks allocate several times as much for a part. glibc
maps an allocation of more than 32 MiB anew for each use, and each use faults its pages in (``PROCESS_ENVIRONMENT``)."""


def evaluated_in_parts(evaluate: Evaluate, *, max_elements: int = MAX_ELEMENTS) -> Evaluate:
    """Return ``evaluate`` for any number of rows, without gradients. All parts have one size, and so one form.

    A part has at most ``max_elements`` array elements, or one row.
    """

    def in_parts(params: Tensors, rows: Tensors) -> Tensors:
        count = len(next(iter(rows.values())))
        number = -(-count * sum(tensor[0].numel() for tensor in rows.values()) // max_elements)
        if number <= 1:
            with torch.no_grad():
                return evaluate(params, rows)
        size = -(-count // min(number, count))
        starts = [*range(0, count - size, size), count - size]
        with torch.no_grad():
            parts = [
                evaluate(params, {name: tensor[start : start + size] for name, tensor in rows.items()})
                for start in starts
            ]
        overlap = len(starts) * size - count
        parts[-1] = {name: tensor[overlap:] for name, tensor in parts[-1].items()}
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return in_parts


def compiled_evaluation(evaluate: Evaluate, device: torch.device) -> Evaluate:
    """Return ``evaluate`` compiled for rows of the first call's form; rows of another form are evaluated eagerly.

    The first call raises:
        Exception: torch's compiler or one of its helpers failed; their errors have no narrower base.
    """
    graph: Evaluate = compiled(evaluate, device)
    compiled_form: list[object] | None = None

    def evaluate_form(params: Tensors, rows: Tensors) -> Tensors:
        nonlocal compiled_form
        inputs_form = form([], [params, rows])
        if compiled_form is None:
            with compiling():
                outputs = graph(params, rows)
            compiled_form = inputs_form
            return outputs
        return (graph if inputs_form == compiled_form else evaluate)(params, rows)

    return evaluate_form
