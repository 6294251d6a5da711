"""Calls of kubectl, which knows the cluster and the user. A failure becomes one line with its cure."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsrl.api.crd import PLURAL
from rlsrl.api.pods import UID_LABEL
from rlsrl.api.spec import API_VERSION
from rlsrl.cli.errors import UserError
from rlsrl.runtime.errors import did_you_mean

Object = Mapping[str, Any]
"""A Kubernetes object as JSON."""
EXPERIMENTS = f"{PLURAL}.{API_VERSION.partition('/')[0]}"
ANSWER_SECONDS = 30.0
_LOG_LINE = re.compile(r"[EWI]\d{4} ")
"""The beginning of kubectl's log lines, which precede its error message."""
_CURES = {
    f'have a resource type "{PLURAL}"': "rlsrl is not installed on this cluster: run `helm install rlsrl charts/`",
    "was refused": "the cluster does not answer: `kubectl config get-contexts` lists your contexts",
    "no such host": "the cluster does not answer: `kubectl config get-contexts` lists your contexts",
    "Unauthorized": "the cluster rejects your credentials: log in again, or choose another context",
    "is forbidden": "ask the administrator of the namespace for permission",
}
"""The cure of an error of kubectl's, by a part of its message."""


class NotPermitted(UserError):
    """The user has no permission for the call."""


class ChangedMeanwhile(UserError):
    """Another client changed the object after the version that the call names."""


_KINDS: Mapping[str, type[UserError]] = {
    "is forbidden": NotPermitted,
    "the object has been modified": ChangedMeanwhile,
}
"""Errors that callers tell apart, by a part of kubectl's message."""


class Kubectl:
    """Calls kubectl for one namespace; None: the namespace of the current context."""

    def __init__(self, namespace: str | None) -> None:
        self._namespace = namespace

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of a call."""
        return ["kubectl", *(["--namespace", self._namespace] if self._namespace else []), *arguments]

    def ask(self, *arguments: str) -> str:
        """Return the output of a call.

        Raises:
            NotPermitted: the user has no permission for the call.
            ChangedMeanwhile: the call names an older version of the object.
            UserError: kubectl is missing, failed or timed out; with its message and the cure.
        """
        called = f"kubectl {' '.join(arguments[:2])}"
        try:
            done = subprocess.run(
                self.command(*arguments), capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True
            )
        except FileNotFoundError as error:
            raise UserError("kubectl is not on the PATH: install kubectl to reach experiments on a cluster") from error
        except subprocess.CalledProcessError as error:
            raise failed_call(called, error.stderr) from error
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{called}: no answer within {ANSWER_SECONDS:.0f} seconds") from error
        return done.stdout

    def experiment(self, name: str) -> Object:
        """Return an experiment.

        Raises:
            UserError: the experiment does not exist, or see ``ask``; with a hint if a run on this machine has the name.
        """
        if "/" in name:
            raise UserError(f"{name} is not the name of an experiment on the cluster{_local_run(name)}")
        try:
            return self._experiment(name)
        except UserError as error:
            raise UserError(f"{error.message}{_local_run(name)}") from error

    def _experiment(self, name: str) -> Object:
        found = self.ask("get", EXPERIMENTS, name, "--ignore-not-found", "--output", "json")
        if found.strip():
            experiment: Object = json.loads(found)
            return experiment
        there = [line.rpartition("/")[2] for line in self.ask("get", EXPERIMENTS, "--output", "name").split()]
        hint = did_you_mean(name, there) or f"; experiments here: {', '.join(there[:5]) or 'none'}"
        raise UserError(f"experiment {name} does not exist in this namespace{hint}")

    def objects(self, kinds: str, selector: Mapping[str, str]) -> list[Object]:
        """Return the objects of those kinds with those labels.

        Raises:
            UserError: see ``ask``.
        """
        return self.items(kinds, "--selector", ",".join(f"{name}={value}" for name, value in selector.items()))

    def items(self, kinds: str, *options: str) -> list[Object]:
        """Return the objects of those kinds that the options of `kubectl get` select.

        Raises:
            UserError: see ``ask``.
        """
        items: list[Object] = json.loads(self.ask("get", kinds, *options, "--output", "json"))["items"]
        return items

    def warnings(self) -> list[Object]:
        """Return the namespace's warning events, oldest first.

        Raises:
            UserError: see ``ask``.
        """
        return sorted(self.items("events", "--field-selector", "type=Warning"), key=last_seen)


def _local_run(name: str) -> str:
    """Return a hint if a run of that name is on this machine."""
    from rlsrl.local.run_names import RECORD, RUNS

    for folder in (Path(name), RUNS / name):
        if (folder / RECORD).is_file():
            return f"\n{name} is a run on this machine: `rlsrl top {name}` shows it, its logs are in {folder / 'logs'}"
    return ""


def own_labels(experiment: Object) -> dict[str, str]:
    """Return the labels of the experiment's objects; an earlier experiment of the same name had others."""
    return {UID_LABEL: experiment["metadata"]["uid"]}


def last_seen(event: Object) -> str:
    """Return the time of an event's last occurrence, as Kubernetes writes it."""
    series: Object = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(time) for time in times if time), str(event["metadata"].get("creationTimestamp", "")))


def failed_call(what: str, said: str, *, hint: str = "") -> UserError:
    """Return the error of a call that failed with this output. ``hint`` ends its message."""
    kind = next((kind for sign, kind in _KINDS.items() if sign in said), UserError)
    return kind(f"{what}: {complaint(said)}{hint}")


def complaint(said: str) -> str:
    """Return kubectl's error message in one line, with its cure if known."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not _LOG_LINE.match(line)]
    last = lines[-1] if lines else "it failed without a message"
    cure = next((cure for sign, cure in _CURES.items() if sign in last), None)
    return last if cure is None else f"{last} ({cure})"
