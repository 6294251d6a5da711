"""kubectl as commands use it: it knows the cluster and who the user is. What it cannot do is told in one line."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from rlsrl.api.crd import PLURAL
from rlsrl.api.pods import UID_LABEL
from rlsrl.api.spec import API_VERSION
from rlsrl.cli.errors import UserError
from rlsrl.runtime.errors import did_you_mean

Object = Mapping[str, Any]
"""A Kubernetes object, as JSON has it."""
EXPERIMENTS = f"{PLURAL}.{API_VERSION.partition('/')[0]}"
ANSWER_SECONDS = 30.0
_LOG_LINE = re.compile(r"[EWI]\d{4} ")
"""With what lines of kubectl's own log begin; what it has to say follows them."""
_CURES = {
    f'have a resource type "{PLURAL}"': "rlsrl is not on this cluster: `helm install rlsrl charts/` puts it there",
    "was refused": "no cluster answers: `kubectl config get-contexts` lists the ones you have",
    "no such host": "no cluster answers: `kubectl config get-contexts` lists the ones you have",
    "Unauthorized": "the cluster does not know you: log in again, or choose another context",
    "is forbidden": "whoever administers the namespace can allow it",
}
"""What to do about some of the things that kubectl says."""


class Kubectl:
    """Asks about one namespace; None is the one of kubectl's current context."""

    def __init__(self, namespace: str | None) -> None:
        self._namespace = namespace

    def command(self, *arguments: str) -> list[str]:
        """The words of a call."""
        return ["kubectl", *(["--namespace", self._namespace] if self._namespace else []), *arguments]

    def ask(self, *arguments: str) -> str:
        """What a call prints.

        Raises:
            UserError: there is no kubectl, it failed, or it took too long; with what it said and the cure.
        """
        called = f"kubectl {' '.join(arguments[:2])}"
        try:
            done = subprocess.run(
                self.command(*arguments), capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True
            )
        except FileNotFoundError as error:
            raise UserError("no kubectl on the PATH: experiments on a cluster are reached by it") from error
        except subprocess.CalledProcessError as error:
            raise UserError(f"{called}: {complaint(error.stderr)}") from error
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{called}: no answer within {ANSWER_SECONDS:.0f} seconds") from error
        return done.stdout

    def experiment(self, name: str) -> Object:
        """An experiment.

        Raises:
            UserError: there is none of that name, or see ``ask``.
        """
        found = self.ask("get", EXPERIMENTS, name, "--ignore-not-found", "--output", "json")
        if found.strip():
            experiment: Object = json.loads(found)
            return experiment
        there = [line.rpartition("/")[2] for line in self.ask("get", EXPERIMENTS, "--output", "name").split()]
        hint = did_you_mean(name, there) or (f": there are {', '.join(there[:5])}" if there else ": there is none")
        raise UserError(f"there is no experiment {name} in this namespace{hint}")

    def objects(self, kinds: str, selector: Mapping[str, str]) -> list[Object]:
        """The objects of those kinds that have the labels.

        Raises:
            UserError: see ``ask``.
        """
        labels = ",".join(f"{name}={value}" for name, value in selector.items())
        answer = self.ask("get", kinds, "--selector", labels, "--output", "json")
        items: list[Object] = json.loads(answer)["items"]
        return items

    def warnings(self) -> list[Object]:
        """The namespace's events that somebody should look at, oldest first.

        Raises:
            UserError: see ``ask``.
        """
        answer = self.ask("get", "events", "--field-selector", "type=Warning", "--output", "json")
        events: list[Object] = json.loads(answer)["items"]
        return sorted(events, key=last_seen)


def own_labels(experiment: Object) -> dict[str, str]:
    """The labels of all that was made for it, and for none of the same name before it."""
    return {UID_LABEL: experiment["metadata"]["uid"]}


def last_seen(event: Object) -> str:
    """When an event happened last, as Kubernetes writes it."""
    series: Object = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(time) for time in times if time), str(event["metadata"].get("creationTimestamp", "")))


def complaint(said: str) -> str:
    """What kubectl said, in one line, with what to do about it where that is known."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not _LOG_LINE.match(line)]
    last = lines[-1] if lines else "it failed without a word"
    cure = next((cure for sign, cure in _CURES.items() if sign in last), None)
    return last if cure is None else f"{last} ({cure})"
