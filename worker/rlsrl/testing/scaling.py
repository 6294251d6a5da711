"""How tests scale each role of an experiment, on one machine and on a cluster."""

from __future__ import annotations

SCALES = (
    ("policyWorkers", "policy", 2),
    ("policyWorkers", "policy", 1),
    ("evaluators", "evaluator", 2),
    ("evaluators", "evaluator", 1),
    ("bufferWorkers", "buffer", 2),
    ("bufferWorkers", "buffer", 1),
    ("trainers", "trainer", 1),
    ("trainers", "trainer", 2),
    ("actors", "actor", 4),
    ("actors", "actor", 1),
)
"""Field of the spec, role, replicas; in this order."""
