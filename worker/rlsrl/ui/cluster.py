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

import yaml
from typing_extensions import override

from rlsrl.api.load import SpecError, load_text
from rlsrl.api.placement import CURVE_PAGE, LOG_PAGE, LOGS_PAGE, STATUS_PAGE, VERSIONS_PAGE
from rlsrl.api.reasons import FINISHED, UNSEEN, explain, is_trouble
from rlsrl.api.spec import API_VERSION, KIND, RLExperiment
from rlsrl.local.worker_report import mapping, number, objects, troubles
from rlsrl.ui.api_server import ExperimentSource, connect
from rlsrl.ui.coordinators import MAX_STATUS_BYTES, CoordinatorAway, Coordinators, open_session
from rlsrl.ui.runs import NotThere, Row, Runs
from rlsrl.ui.status_document import goals_of, ledger_of, roles_of, shown_lines, totals_of

_NAME = re.compile(r"([a-z0-9][-a-z0-9]*):([a-z0-9][-.a-z0-9]*)")
_LIVE = frozenset({"starting", "running"})
_SERVED = frozenset({*_LIVE, "succeeded", "failed"})
"""States in which an experiment has a coordinator. After its end the coordinator serves on."""


class ClusterRuns(Runs):
    """The experiments of a cluster. Only for the event loop's thread; other threads make the answers."""

    def __init__(self, experiments: ExperimentSource, coordinators: Coordinators) -> None:
        self._experiments = experiments
        self._coordinators = coordinators

    @override
    async def rows(self) -> list[Row]:
        found = await self._experiments.all()
        return await asyncio.to_thread(
            lambda: sorted(map(_row, found), key=lambda row: (-row["changedAt"], row["name"]))
        )

    @override
    async def page(self, name: str) -> Row:
        experiment = await self._find(name)
        (document, away), (logs, _) = await asyncio.gather(
            self._asked(experiment, STATUS_PAGE, max_bytes=MAX_STATUS_BYTES), self._asked(experiment, LOGS_PAGE)
        )
        return await asyncio.to_thread(_page, experiment, document, away, logs)

    @override
    async def versions(self, name: str) -> Row:
        found, away = await self._asked(await self._find(name), VERSIONS_PAGE)
        return {"versions": await asyncio.to_thread(_versions, found), "problem": away or None}

    @override
    async def curve(self, name: str, after: int, file_id: str) -> Row:
        query = {"after": str(after), "file": file_id}
        found, _ = await self._asked(await self._find(name), CURVE_PAGE, **query)  # The run's page has the reason.
        return await asyncio.to_thread(_curve, found, after, file_id)

    @override
    async def log(self, name: str, log: str) -> list[str]:
        experiment = await self._find(name)
        if not _is_served(experiment):
            raise NotThere(f"{name} has no coordinator that keeps logs")
        text = await self._coordinators.ask(experiment, LOG_PAGE, name=log)
        return await asyncio.to_thread(shown_lines, str(text))

    async def _find(self, name: str) -> Row:
        found = _NAME.fullmatch(name)
        experiment = None if found is None else await self._experiments.one(found[1], found[2])
        if experiment is None:
            raise NotThere(f"there is no experiment {name!r}")
        return experiment

    async def _asked(self, experiment: Row, path: str, **options: Any) -> tuple[Any, str]:
        """Return a coordinator's answer and an empty text; or None and the reason, empty if it is not to be asked."""
        if not _is_served(experiment):
            return None, ""
        try:
            return await self._coordinators.ask(experiment, path, **options), ""
        except (CoordinatorAway, NotThere) as error:
            return None, str(error)


@asynccontextmanager
async def cluster_runs(viewing_key: str, namespaces: Sequence[str]) -> AsyncIterator[Runs]:
    """Connect to the cluster; yield its runs. Without namespaces: those of all."""
    async with connect(namespaces) as experiments, open_session() as session:
        yield ClusterRuns(experiments, Coordinators(session, viewing_key=viewing_key))


def _page(experiment: Row, document: Any, away: str, logs: Any) -> Row:
    text = _document(experiment)
    spec, is_live = _read(text), _state(experiment) in _LIVE
    try:
        told = _of_document(document if isinstance(document, Mapping) else {}, spec, is_live=is_live)
    except (ArithmeticError, RecursionError, TypeError, ValueError):
        away, told = "the coordinator's status cannot be used", _of_document({}, spec, is_live=is_live)
    return {
        **_row(experiment),
        **told,
        "problems": [*_failure(experiment), *([away] if away else []), *told["problems"]],
        "conditions": _conditions(experiment),
        "goalReturn": None if spec is None else spec.spec.stop.return_mean,
        "experiment": _yaml(text),
        "statusAge": None if away else 0.0,
        "logs": [str(each) for each in logs] if isinstance(logs, list) else None,
    }


def _of_document(document: Mapping[str, Any], spec: RLExperiment | None, *, is_live: bool) -> Row:
    """Return what the coordinator's status document says.

    Raises:
        ArithmeticError, RecursionError, TypeError, ValueError: it has values that no coordinator reports.
    """
    return {
        "problems": troubles(document) if is_live else [],
        "goals": goals_of(spec.spec.stop, document) if is_live and spec is not None else [],
        "totals": totals_of(document),
        "roles": roles_of(document, is_live=is_live),
        "ledger": ledger_of(mapping(document, "ledger")),
    }


def _versions(found: Any) -> list[Row]:
    """Return the rows of versions in a coordinator's answer."""
    return [
        {
            "version": str(row.get("version")),
            "tags": [str(tag) for tag in row["tags"]] if isinstance(row.get("tags"), list) else [],
            "createdAt": number(row, "createdAt") or 0.0,
            **{name: number(row, name) for name in ("envSteps", "returnMean", "evaluation")},
            "hasState": row.get("hasState") is True,
        }
        for row in objects({"found": found}, "found")
    ]


def _curve(found: Any, after: int, file_id: str) -> Row:
    """Return the part of a learning curve in a coordinator's answer; without one, nothing new."""
    if not isinstance(found, Mapping) or not isinstance(place := found.get("next"), int) or place < 0:
        return {"next": after, "file": file_id, "anew": False, "more": False, "rows": []}
    is_anew = found.get("anew") is True
    rows = [
        {"step": step, "role": str(row.get("role")), "scalars": _numbers(mapping(row, "scalars"))}
        for row in objects(found, "rows")
        if isinstance(step := row.get("step"), int)
    ]
    has_more = found.get("more") is True and place > (0 if is_anew else after)
    return {"next": place, "file": str(found.get("file")), "anew": is_anew, "more": has_more, "rows": rows}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name in values if (value := number(values, name)) is not None}


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
        "state": _state(experiment),
        "returnMean": _float(training.get("returnMean")),
        "envSteps": number(training, "envSteps"),
        "trainSteps": number(training, "trainSteps"),
        "stepsPerSecond": number(training, "envStepsPerSecond"),
        "changedAt": max(map(_seconds, times)),
    }


def _state(experiment: Row) -> str:
    return str(mapping(experiment, "status").get("phase") or "not seen").lower()


def _is_served(experiment: Row) -> bool:
    return _state(experiment) in _SERVED


def _failure(experiment: Row) -> list[str]:
    status = mapping(experiment, "status")
    if not status:
        return [f"{UNSEEN.meaning} {UNSEEN.cure}"]
    if status.get("phase") != "Failed":
        return []
    ends = [each for each in _conditions(experiment) if each["type"] == FINISHED]
    return ["\n".join(filter(None, [f"FAILED: {each['message']}", each["cure"]])) for each in ends]


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


def _document(experiment: Row) -> str:
    """Return the experiment as its author wrote it, as JSON."""
    metadata = {name: experiment["metadata"][name] for name in ("name", "namespace")}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": experiment.get("spec")}
    return json.dumps(document)


# The page asks each second, and both of these take long.


@lru_cache(maxsize=16)
def _read(document: str) -> RLExperiment | None:
    """Return the experiment, or None if this version of rlsrl cannot read it."""
    value = json.loads(document)
    try:
        return load_text(json.dumps({**value, "metadata": {"name": value["metadata"]["name"]}}))
    except SpecError:
        return None


@lru_cache(maxsize=16)
def _yaml(document: str) -> str:
    return yaml.safe_dump(json.loads(document), sort_keys=False)


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _seconds(value: Any) -> float:
    """Return a time as Kubernetes writes it in Unix seconds; 0 for anything else."""
    try:
        return datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError):
        return 0.0
