"""The names of the roles, as they stand in labels, addresses, file names, metrics and on the command line.

``rlsrl.api.roles`` says what each role is.
"""

from __future__ import annotations

COORDINATOR = "coordinator"
TRAINER = "trainer"
BUFFER = "buffer"
POLICY = "policy"
ACTOR = "actor"
EVALUATOR = "evaluator"
