"""Checks before a run with ``evaluators.video`` that its videos can be made: otherwise none would ever come.

The environment is made in a process of its own: a crash or hang of it costs nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlsrl.api.resolved import EvaluatorConfig, RoleConfig
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.process import worker_environment

CHECK_COMMAND = (sys.executable, "-m", "rlsrl.workers.rendering_check")
CHECK_SECONDS = 20.0
"""Time after which the check is ended without a result: some environments take minutes to be made."""


def require_ffmpeg(evaluators: RoleConfig | None) -> None:
    """Check that the package for videos is installed, if evaluators record some.

    Raises:
        ConfigurationError: it is not; the text names the extra that installs it.
    """
    if not _records(evaluators):
        return
    from rlsrl.envs.ffmpeg import ffmpeg_path
    from rlsrl.envs.rendering import NoVideo

    try:
        ffmpeg_path()
    except NoVideo as error:
        raise ConfigurationError(f"evaluators.video: {error}, or remove the field") from error


def require_pictures(
    evaluators: RoleConfig | None,
    config: Path,
    report: Path,
    *,
    environment: Mapping[str, str],
    command: Sequence[str] = CHECK_COMMAND,
    seconds: float = CHECK_SECONDS,
) -> None:
    """Check that the environment renders, if evaluators record videos. Waits up to ``seconds``.

    Args:
        evaluators: The evaluators' config; None without evaluators.
        config: The file with that config.
        report: A file that the process may write.
        environment: The environment variables of every worker.
        command: Starts the check, with both paths as its arguments.
        seconds: Time after which the check is ended without a result.

    Raises:
        ConfigurationError: the environment does not render; the text says why.
        OSError: the process cannot be started.
    """
    if not _records(evaluators):
        return
    report.unlink(missing_ok=True)
    try:
        subprocess.run(
            [*command, str(config), str(report)],
            env=worker_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
        problem = report.read_text(encoding="utf-8")
    except (subprocess.TimeoutExpired, FileNotFoundError):
        return  # Without a result. The evaluators count and log what fails.
    if problem:
        raise ConfigurationError(
            f"evaluators.video: the environment cannot be recorded: {problem}; or remove the field"
        )


def _records(evaluators: RoleConfig | None) -> bool:
    return isinstance(evaluators, EvaluatorConfig) and evaluators.video is not None
