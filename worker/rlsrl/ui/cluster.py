"""The experiments of a cluster: their objects from the API server, and what their coordinators show.

A run's name is its experiment's, after the namespace and a colon. The page reads with rights of its own, which are the
same for all who look.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

import aiohttp
import yaml
from typing_extensions import override

from rlsrl.api.load import SpecError, load_text
from rlsrl.api.reasons import FINISHED, UNSEEN, explain, is_trouble
from rlsrl.api.spec import API_VERSION, KIND, RLExperiment
from rlsrl.local.worker_report import mapping, number, objects, troubles
from rlsrl.ui.api_server import ExperimentSource, connect
from rlsrl.ui.coordinators import CoordinatorAway, Coordinators, mapping_in
from rlsrl.ui.runs import NotThere, Row, Runs
from rlsrl.ui.status_document import goals_of, ledger_of, roles_of, shown_lines, totals_of

_NAME = re.compile(r"([a-z0-9][-a-z0-9]*):([a-z0-9][-.a-z0-9]*)")
_LIVE = frozenset({"starting", "running"})
_SERVED = frozenset({*_LIVE, "succeeded", "failed"})
"""States in which an experiment has a coordinator. After its end the coordinator serves on."""


class ClusterRuns(Runs):
    """The experiments of a cluster."""

    def __init__(self, experiments: ExperimentSource, coordinators: Coordinators) -> None:
        self._experiments = experiments
        self._coordinators = coordinators

    @override
    async def rows(self) -> list[Row]:
        rows = [_row(each) for each in await self._experiments.all()]
        return sorted(rows, key=lambda row: (-row["changedAt"], row["name"]))

    @override
    async def page(self, name: str) -> Row:
        experiment = await self._find(name)
        row, spec = _row(experiment), _spec(experiment)
        is_live = row["state"] in _LIVE
        (document, away), logs = await asyncio.gather(self._status(experiment), self._logs(experiment))
        return {
            **row,
            "problems": [*_failure(experiment), *([away] if away else []), *(troubles(document) if is_live else [])],
            "conditions": _conditions(experiment),
            "goals": goals_of(spec.spec.stop, document) if is_live and spec is not None else [],
            "goalReturn": None if spec is None else spec.spec.stop.return_mean,
            "totals": totals_of(document),
            "statusAge": None if away else 0.0,
            "roles": roles_of(document, is_live=is_live),
            "ledger": ledger_of(mapping(document, "ledger")),
            "logs": logs,
            "experiment": _text(experiment),
        }

    @override
    async def versions(self, name: str) -> Row:
        experiment = await self._find(name)
        if not _is_served(experiment):
            return {"versions": [], "problem": None}
        try:
            found = await self._coordinators.ask(experiment, "/versions")
        except (CoordinatorAway, NotThere) as error:
            return {"versions": [], "problem": str(error)}
        return {"versions": objects({"found": found}, "found"), "problem": None}

    @override
    async def curve(self, name: str, after: int, file_id: str) -> Row:
        experiment = await self._find(name)
        if _is_served(experiment):
            try:
                query = {"after": str(after), "file": file_id}
                return dict(mapping_in(await self._coordinators.ask(experiment, "/curve", **query)))
            except (CoordinatorAway, NotThere):
                pass  # The page of the run says so.
        return {"next": after, "file": file_id, "anew": False, "more": False, "rows": []}

    @override
    async def log(self, name: str, log: str) -> list[str]:
        return shown_lines(str(await self._coordinators.ask(await self._find(name), "/log", name=log)))

    async def _find(self, name: str) -> Row:
        found = _NAME.fullmatch(name)
        experiment = None if found is None else await self._experiments.one(found[1], found[2])
        if experiment is None:
            raise NotThere(f"there is no experiment {name!r}")
        return experiment

    async def _status(self, experiment: Row) -> tuple[Mapping[str, Any], str]:
        """Return the status document, and why there is none."""
        if not _is_served(experiment):
            return {}, ""
        try:
            return mapping_in(await self._coordinators.ask(experiment, "/status")), ""
        except (CoordinatorAway, NotThere) as error:
            return {}, str(error)

    async def _logs(self, experiment: Row) -> list[str]:
        if not _is_served(experiment):
            return []
        try:
            found = await self._coordinators.ask(experiment, "/logs")
        except (CoordinatorAway, NotThere):
            return []
        return [str(each) for each in found] if isinstance(found, list) else []


@asynccontextmanager
async def cluster_runs(viewing_key: str, namespaces: Sequence[str]) -> AsyncIterator[Runs]:
    """Connect to the cluster; yield its runs. Without namespaces: those of all."""
    async with connect(namespaces) as experiments, aiohttp.ClientSession() as session:
        yield ClusterRuns(experiments, Coordinators(session, viewing_key=viewing_key))


def _row(experiment: Row) -> Row:
    metadata, status = experiment["metadata"], mapping(experiment, "status")
    training = mapping(status, "training")
    times = [
        metadata.get("creationTimestamp"),
        training.get("updatedAt"),
        *(each.get("lastTransitionTime") for each in objects(status, "conditions")),
    ]
    return {
        "name": f"{metadata['namespace']}:{metadata['name']}",
        "state": str(status.get("phase") or "not seen").lower(),
        "returnMean": _float(training.get("returnMean")),
        "envSteps": number(training, "envSteps"),
        "trainSteps": number(training, "trainSteps"),
        "stepsPerSecond": number(training, "envStepsPerSecond"),
        "changedAt": max(_seconds(each) for each in times),
    }


def _is_served(experiment: Row) -> bool:
    return _row(experiment)["state"] in _SERVED


def _failure(experiment: Row) -> list[str]:
    status = mapping(experiment, "status")
    if not status:
        return [f"{UNSEEN.meaning} {UNSEEN.cure}"]
    if status.get("phase") != "Failed":
        return []
    ends = [each for each in objects(status, "conditions") if each.get("type") == FINISHED]
    return [f"FAILED: {each.get('message')}" for each in ends]


def _conditions(experiment: Row) -> list[Row]:
    name = experiment["metadata"]["name"]
    return [_condition(each, name) for each in objects(mapping(experiment, "status"), "conditions")]


def _condition(found: Mapping[str, Any], name: str) -> Row:
    """Return a condition; ``name`` is the experiment's, for the commands of its cure."""
    kind, reason, message = (str(found.get(each) or "") for each in ("type", "reason", "message"))
    is_bad = is_trouble(reason)
    return {
        "type": kind,
        "status": str(found.get("status") or ""),
        "reason": reason,
        "message": message,
        "since": _seconds(found.get("lastTransitionTime")),
        "isTrouble": is_bad,
        "cure": explain(kind, reason, message).cure.replace("NAME", name) if is_bad else "",
    }


def _spec(experiment: Row) -> RLExperiment | None:
    return _spec_of(json.dumps({"metadata": {"name": experiment["metadata"]["name"]}, "spec": experiment.get("spec")}))


@lru_cache(maxsize=64)
def _spec_of(text: str) -> RLExperiment | None:
    """Return the experiment, or None if it is none of this version. The page asks each second; reading takes long."""
    try:
        return load_text(json.dumps({"apiVersion": API_VERSION, "kind": KIND, **json.loads(text)}))
    except SpecError:
        return None


def _text(experiment: Row) -> str:
    metadata = {name: experiment["metadata"][name] for name in ("name", "namespace")}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": experiment.get("spec")}
    return yaml.safe_dump(document, sort_keys=False)


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _seconds(value: Any) -> float:
    """Return a time of Kubernetes' in Unix seconds; 0 if it is none."""
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        return 0.0
