"""Compare the weights after 20 steps of PPO with those of an older commit: ``python benchmarks/digests.py BASE``.

Both commits run the same experiments by ``rlsrl run``, one step after the other (``pacing.maxPolicyLag`` 0, eager),
with one rank and with two: a dense network, a convolutional one, an action mask, and continuous actions. Prints the
SHA-256 of the last weights of each. The exit status is 1 if one differs, 2 if a run fails. Each commit is checked out
into ``.paired``; both use this Python environment.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkouts import CheckoutFailed, check_out, commit_of, import_path
from machine import REPOSITORY
from results import log
from safetensors.numpy import load_file

STEPS = 20
RUN_SECONDS = 300.0
PROGRAM = Path(sys.executable).with_name("rlsrl")
ENVIRONMENTS: Mapping[str, Mapping[str, Any]] = {
    "dense": {"environment": {"id": "CartPole-v1"}},
    "Gaussian": {"environment": {"id": "Pendulum-v1"}, "policy": {"normalizeObservations": True}},
    "masks": {"environment": {"factory": "rlsrl.testing.environments:MaskedEnv", "actionMask": "action_mask"}},
    "convolutional": {
        "environment": {
            "id": "ALE/Pong-v5",
            "kwargs": {"frameskip": 1, "repeat_action_probability": 0.0, "obs_type": "grayscale"},
            "atari": {},
            "frameStack": 4,
        },
        "policy": {"network": {"cnn": {}}},
    },
}


class RunFailed(Exception):
    """A run ended otherwise; the text has its output."""


def experiment(settings: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return an experiment of ``STEPS`` steps that repeats bit for bit."""
    return {
        "apiVersion": "rlsrl.dev/v1alpha1",
        "kind": "RLExperiment",
        "metadata": {"name": "digest"},
        "spec": {
            "seed": 1,
            **settings,
            "algorithm": {"ppo": {"epochs": 2, "minibatchSize": 128}},
            "actors": {"replicas": 1, "environments": 8, "rolloutLength": 32},
            # Each rank trains one rollout of the actor in each step.
            "trainers": {"replicas": ranks, "batchEnvironments": 8 * ranks, "compile": "off"},
            "pacing": {"maxPolicyLag": 0},
            "stop": {"trainSteps": STEPS},
        },
    }


def digest(sources: Path, settings: Mapping[str, Any], ranks: int) -> str:
    """Return the SHA-256 of the weights after a run of this checkout.

    Raises:
        RunFailed: the run, or the export of its weights, failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "experiment.json").write_text(json.dumps(experiment(settings, ranks)))
        for words in (
            ("run", "experiment.json"),
            ("params", "export", "digest", "latest", "--output", "weights.safetensors"),
        ):
            done = subprocess.run(
                (PROGRAM, *words),
                cwd=folder,
                env={**os.environ, **import_path(sources)},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=RUN_SECONDS,
            )
            if done.returncode:
                raise RunFailed(f"rlsrl {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        found = hashlib.sha256()
        for path, array in sorted(load_file(folder / "weights.safetensors").items()):
            found.update(f"{path} {array.dtype} {array.shape}".encode() + array.tobytes())
        return found.hexdigest()


def main() -> int:
    """Compare the present commit with ``BASE``; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit")
    try:
        commits = [commit_of(revision) for revision in (parser.parse_args().base, "HEAD")]
        checkouts = [check_out(commit, REPOSITORY / ".paired") for commit in commits]
        num_different = 0
        for name, settings in ENVIRONMENTS.items():
            for ranks in (1, 2):
                base, head = (digest(sources, settings, ranks) for sources in checkouts)
                num_different += base != head
                verdict = "equal" if base == head else "DIFFERENT"
                log(f"{name}, {ranks} ranks: {commits[0]} {base[:16]}, {commits[1]} {head[:16]}: {verdict}")
    except (CheckoutFailed, RunFailed, subprocess.TimeoutExpired) as error:
        log(str(error))
        return 2
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
