"""The environment variables that worker processes need."""

from __future__ import annotations

from collections.abc import Mapping

from rlsrl.api.roles import role_named

PROCESS_ENVIRONMENT: Mapping[str, str] = {
    # One intra-op thread a process: two become very slow beside another busy process, and workers are processes. A
    # trainer with trainers.threads sets its own number.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    # Higher thresholds, because arrays that are mapped and returned for each use fault their pages in each time.
    # 32 MiB is the most that glibc accepts; above it the setting is ignored. Other C libraries ignore both.
    "MALLOC_MMAP_THRESHOLD_": str(32 * 1024**2),
    "MALLOC_TRIM_THRESHOLD_": str(512 * 1024**2),
    # gRPC without its event engine, which wakes three more threads for each message (0032).
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    "PYTHONUNBUFFERED": "1",
}
"""Environment variables that every worker process needs before it imports numpy or uses grpc."""


def process_environment(role: str | None = None) -> Mapping[str, str]:
    """Return the environment variables that a process of the role needs; None: those that every worker needs."""
    return PROCESS_ENVIRONMENT if role is None else {**PROCESS_ENVIRONMENT, **role_named(role).environment}
