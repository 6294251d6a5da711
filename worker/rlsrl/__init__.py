"""Distributed reinforcement learning on one machine or a Kubernetes cluster, from one YAML.

Folders are layers, from the bottom: ``api`` (the spec), ``data`` (arrays), ``rpc`` (the wire), ``runtime`` (what every
process needs), then ``streams``, ``parameters``, ``buffers`` and ``envs`` side by side, ``policies``, ``algorithms``,
``workers`` (the roles), ``local`` (the controller behind ``rlsrl run``), ``runs`` (for Python programs) and ``cli``.

For programs: ``rlsrl.train(experiment)`` trains, ``rlsrl.load(run)`` returns a trained policy, ``rlsrl.Run(run)`` the
figures of a run. ``rlsrl.compare(*runs)`` and ``rlsrl.plot(*runs, path=file)`` put several side by side. Their errors
are here, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsrl.api.document import SpecError
    from rlsrl.envs.codec import CodecError
    from rlsrl.envs.rendering import NoVideo, RecordedEpisode
    from rlsrl.local.controller import RecordsLost
    from rlsrl.local.curves import Band, Curve, Series
    from rlsrl.local.folder_check import NothingToResume
    from rlsrl.local.run_folder import RunFolderError
    from rlsrl.parameters.protocols import ParameterError
    from rlsrl.policies.exported import LayoutMismatch
    from rlsrl.runs.comparison import ComparedGroup, Comparison, RunResult, SeedEstimate, compare, plot
    from rlsrl.runs.export import ExportRefused
    from rlsrl.runs.policy import TrainedPolicy, load
    from rlsrl.runs.progress import TrainingProgress
    from rlsrl.runs.run import Run
    from rlsrl.runs.training import RunFailed, train
    from rlsrl.runs.versions import VersionRow
    from rlsrl.runtime.errors import ConfigurationError, EnvironmentFailed
    from rlsrl.runtime.extras import NotInstalled
    from rlsrl.runtime.ledger import LedgerError

__all__ = [
    "Band",
    "CodecError",
    "ComparedGroup",
    "Comparison",
    "ConfigurationError",
    "Curve",
    "EnvironmentFailed",
    "ExportRefused",
    "LayoutMismatch",
    "LedgerError",
    "NoVideo",
    "NotInstalled",
    "NothingToResume",
    "ParameterError",
    "RecordedEpisode",
    "RecordsLost",
    "Run",
    "RunFailed",
    "RunFolderError",
    "RunResult",
    "SeedEstimate",
    "Series",
    "SpecError",
    "TrainedPolicy",
    "TrainingProgress",
    "VersionRow",
    "compare",
    "load",
    "plot",
    "train",
]

_MODULES = {
    "Band": "rlsrl.local.curves",
    "CodecError": "rlsrl.envs.codec",
    "ComparedGroup": "rlsrl.runs.comparison",
    "Comparison": "rlsrl.runs.comparison",
    "ConfigurationError": "rlsrl.runtime.errors",
    "Curve": "rlsrl.local.curves",
    "EnvironmentFailed": "rlsrl.runtime.errors",
    "ExportRefused": "rlsrl.runs.export",
    "LayoutMismatch": "rlsrl.policies.exported",
    "LedgerError": "rlsrl.runtime.ledger",
    "NoVideo": "rlsrl.envs.rendering",
    "NotInstalled": "rlsrl.runtime.extras",
    "NothingToResume": "rlsrl.local.folder_check",
    "ParameterError": "rlsrl.parameters.protocols",
    "RecordedEpisode": "rlsrl.envs.rendering",
    "RecordsLost": "rlsrl.local.controller",
    "Run": "rlsrl.runs.run",
    "RunFailed": "rlsrl.runs.training",
    "RunFolderError": "rlsrl.local.run_folder",
    "RunResult": "rlsrl.runs.comparison",
    "SeedEstimate": "rlsrl.runs.comparison",
    "Series": "rlsrl.local.curves",
    "SpecError": "rlsrl.api.document",
    "TrainedPolicy": "rlsrl.runs.policy",
    "TrainingProgress": "rlsrl.runs.progress",
    "VersionRow": "rlsrl.runs.versions",
    "compare": "rlsrl.runs.comparison",
    "load": "rlsrl.runs.policy",
    "plot": "rlsrl.runs.comparison",
    "train": "rlsrl.runs.training",
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    """Import what programs use when they use it: workers and commands import only what they need."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlsrl.runtime.extras import extras_named

    with extras_named():
        return getattr(importlib.import_module(_MODULES[name]), name)
