"""Run the operator: ``python -m rlsrl_operator --settings FILE``."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from pathlib import Path

import kopf
import structlog

from rlsrl_operator.handlers import registry
from rlsrl_operator.metrics import PORT
from rlsrl_operator.settings import SettingsError, read_settings

CONFIGURATION_ERROR = 2
GARBAGE_THRESHOLD = 50_000
"""Allocations between two runs of the garbage collector."""


def main() -> int:
    """Run until SIGTERM; return the exit code."""
    parser = argparse.ArgumentParser(prog="rlsrl_operator", description="Run RLExperiments on a Kubernetes cluster.")
    parser.add_argument("--settings", type=Path, required=True, help="the administrator's settings, YAML")
    parser.add_argument(
        "--health", default="http://0.0.0.0:8081/healthz", help="URL of the liveness probe (default: %(default)s)"
    )
    parser.add_argument("--metrics-port", type=int, default=PORT, help="port of the metrics (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        settings = read_settings(arguments.settings)
    except SettingsError as error:
        sys.stderr.write(f"rlsrl_operator: {error}\n")
        return CONFIGURATION_ERROR
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.JSONRenderer(),
        ]
    )
    # Answers and watch events are many and have no cycles. By default the collector takes a quarter of the CPU time.
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
    kopf.run(
        registry=registry(settings, metrics_port=arguments.metrics_port),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        liveness_endpoint=arguments.health,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
