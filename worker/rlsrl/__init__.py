"""Distributed reinforcement learning on one machine or a Kubernetes cluster, from one YAML.

Folders are layers, from the bottom: ``api`` (the spec), ``data`` (arrays), ``rpc`` (the wire), ``runtime`` (what every
process needs), then ``streams``, ``parameters``, ``buffers`` and ``envs`` side by side, ``policies``, ``algorithms``,
``workers`` (the roles), ``local`` (the controller behind ``rlsrl run``), ``runs`` (for Python programs) and ``cli``.

For programs: ``rlsrl.train(experiment)`` trains, ``rlsrl.load(run)`` returns a trained policy, ``rlsrl.Run(run)`` the
figures of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsrl.runs import Run, RunFailed, TrainedPolicy, TrainingProgress, load, train

__all__ = ["Run", "RunFailed", "TrainedPolicy", "TrainingProgress", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import what programs use when they use it: workers and commands import only what they need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlsrl import runs

    return getattr(runs, name)
