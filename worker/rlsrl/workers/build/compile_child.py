"""The child process of ``compiling.StepCompiler``: compiles a trainer's step into the cache of compiled code.

Importing torch takes seconds. The child imports it after it has begun to watch the trainer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from rlsrl.runtime.process import leave

if TYPE_CHECKING:
    from rlsrl.api.resolved import TrainerConfig
    from rlsrl.data.specs import EnvSpec


def request_for(config: TrainerConfig, env_spec: EnvSpec) -> str:
    """Return the line that makes the child compile the step of a trainer with this config."""
    return json.dumps({"config": config.to_json(), "env_spec": env_spec.to_json()})


def main() -> int:
    """Run as the child; return the exit code."""
    request = json.loads(sys.stdin.buffer.readline())
    niceness = int(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_trainer, name="trainer", daemon=True).start()
    os.nice(niceness)
    return _compile(request)


def _compile(request: dict[str, Any]) -> int:
    from rlsrl.algorithms.base import one_rank
    from rlsrl.api.resolved import TrainerConfig
    from rlsrl.data.specs import EnvSpec
    from rlsrl.data.version import Version
    from rlsrl.workers.build.common import torch_policy
    from rlsrl.workers.build.learner import build_learner, example_batch, rank_device
    from rlsrl.workers.compiling import error_summary

    try:
        config = TrainerConfig.from_json(request["config"])
        env_spec = EnvSpec.from_json(request["env_spec"])
        policy = torch_policy(config.network, env_spec, outputs=config.algorithm.chosen.outputs, seed=config.seed)
        device = rank_device(config, policy)
        learner = build_learner(config, env_spec, policy, policy.parameters(Version(0, 0)), one_rank, device)
        learner.use_threads()
        learner.compile(example_batch(config, env_spec))
    except Exception as error:  # noqa: BLE001 - the trainer reads it, and goes on eagerly
        sys.stderr.write(f"{error_summary(error)}\n")
        return 1
    return 0


def _exit_with_trainer() -> None:
    """Kill this process and the processes that it started once the trainer dies or closes the input."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    leave(main())
