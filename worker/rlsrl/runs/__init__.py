"""Runs and their policies for Python programs: what ``import rlsrl`` offers. The command line uses the same code."""

from __future__ import annotations

from rlsrl.runs.policy import TrainedPolicy, load
from rlsrl.runs.progress import TrainingProgress
from rlsrl.runs.run import Run
from rlsrl.runs.training import RunFailed, train

__all__ = ["Run", "RunFailed", "TrainedPolicy", "TrainingProgress", "load", "train"]
