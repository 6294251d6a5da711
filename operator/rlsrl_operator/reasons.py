"""The operator's words: what conditions are called, and why they stand as they do. Events have the same reasons.

docs/kubernetes/operations.md says of each what it means and what to do about it; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NewType, get_args

Aspect = Literal["Accepted", "Ready", "GangComplete", "Finished"]
"""The types of conditions."""
ACCEPTED: Final = "Accepted"
READY: Final = "Ready"
GANG_COMPLETE: Final = "GangComplete"
FINISHED: Final = "Finished"

AcceptedReason = Literal["Accepted", "InvalidSpec", "NameConflict"]
EndReason = Literal["Succeeded", "ConfigurationError", "BudgetExhausted"]
GangReason = Literal["Starting", "Complete", "Restarting"]
ReadyReason = Literal["Ready", "Starting", "FailedCreate", "Waiting", "Unschedulable", "Finished"]
Reason = AcceptedReason | EndReason | GangReason | ReadyReason
"""What the operator says by itself."""
PodReason = NewType("PodReason", str)
"""What Kubernetes says of a pod, passed on under ``Ready``: ``ImagePullBackOff``, ``CrashLoopBackOff`` and others."""

REASONS: Mapping[Aspect, tuple[Reason, ...]] = {
    ACCEPTED: get_args(AcceptedReason),
    READY: get_args(ReadyReason),
    GANG_COMPLETE: get_args(GangReason),
    FINISHED: get_args(EndReason),
}
"""By condition."""
QUIET: frozenset[str] = frozenset({"Accepted", "Ready", "Starting", "Complete", "Finished", "Succeeded"})
"""The reasons that call for nobody."""
