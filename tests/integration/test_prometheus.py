"""A real Prometheus scrapes a real run of every role: each panel shows something, and no alert is raised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from rlsrl.api.status import ExperimentStatus
from rlsrl.runtime.exposition import MetricsServer
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, LiveRun
from rlsrl.testing.prometheus import Prometheus, Target
from rlsrl.testing.waiting import until
from rlsrl_operator.metrics import OperatorMetrics

CHARTS = Path(__file__).parents[2] / "charts"
DASHBOARD = json.loads((CHARTS / "dashboards" / "experiment.json").read_text())
RULES = sorted((CHARTS / "alerts").glob("*.yaml"))
EXPERIMENT = (
    GATED_EXPERIMENT.replace("replicas: 2, environments: 8", "replicas: 1, environments: 8, ringSize: 2")
    + """  policyWorkers: {{replicas: 1}}
  bufferWorkers: {{replicas: 1}}
  evaluators: {{replicas: 1, environments: 2, episodesPerEnvironment: 1}}
"""
)
ROLES = {"actor", "buffer", "coordinator", "evaluator", "policy", "trainer"}
CHOICES = {"$namespace": "lab", "$experiment": "live", "$role": ".+", "$__rate_interval": "30s"}


def chosen(query: str) -> str:
    """A query of the dashboard with its variables' values."""
    return re.sub(r"\$\w+", lambda match: CHOICES[match[0]], query)


def targets_of(run: LiveRun) -> list[Target]:
    """The run's workers, labelled as the chart's PodMonitor labels their pods."""
    status = run.facts.status()
    assert status is not None
    addresses = {
        (role, worker["index"]): worker["endpoints"]["metrics"]
        for role, workers in status["roles"].items()
        for worker in workers
    }
    addresses["coordinator", 0] = status["endpoints"]["http"]
    return [
        Target(
            address=address,
            labels={"namespace": "lab", "experiment": "live", "role": role, "pod": f"live-{role}-{index}"},
        )
        for (role, index), address in addresses.items()
    ]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It scrapes a run that goes on, and what an operator would show of it."""
    folder = tmp_path_factory.mktemp("prometheus")
    operator = OperatorMetrics(CollectorRegistry())
    operator.experiments.set_status("lab", "live", ExperimentStatus(phase="Running", restarts=0))
    desk = Desk(folder, EXPERIMENT.format(gate=folder / "gate"))
    with (
        MetricsServer(operator.registry, host="127.0.0.1", port=0, token="") as shown,
        desk.begin() as run,
    ):
        run.until(run.is_complete, "all processes at work")
        itself = Target(
            address="{}:{}".format(*shown.address),
            labels={"namespace": "rlsrl-system", "role": "operator", "pod": "operator"},
            honor_labels=True,
        )
        with Prometheus(folder / "prometheus", [*targets_of(run), itself], RULES) as server:
            until(lambda: not server.faults(), "every target answers")
            yield server


@pytest.mark.parametrize(
    ("panel", "query"),
    [
        pytest.param(panel["title"], target["expr"], id=f"{panel['title']}-{target['refId']}")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ],
)
def test_a_panel_shows_data(prometheus: Prometheus, panel: str, query: str) -> None:
    found = until(lambda: prometheus.query(chosen(query)), f"{panel}: {chosen(query)}")
    for labels in found:
        assert dict(labels)["experiment"] == "live"


def test_the_variables_have_values(prometheus: Prometheus) -> None:
    variables = {each["name"]: each["query"] for each in DASHBOARD["templating"]["list"][1:]}
    values = {name: prometheus.label_values(chosen(each["query"])) for name, each in variables.items()}
    assert values == {"namespace": {"lab"}, "experiment": {"live"}, "role": ROLES}


def test_waits_add_up_to_at_most_the_elapsed_time(prometheus: Prometheus) -> None:
    """What the panels show makes sense: soon nobody is seen to wait longer than time goes."""
    (query,) = (panel["targets"][0]["expr"] for panel in DASHBOARD["panels"] if panel["title"] == "Busy")

    def makes_sense() -> bool:
        busy = {dict(labels)["role"]: share for labels, share in prometheus.query(chosen(query)).items()}
        return all(-0.05 <= busy.get(role, -1.0) <= 1 for role in ("actor", "trainer", "buffer"))

    until(makes_sense, "shares of time between 0 and 1")


def test_no_alert_fires(prometheus: Prometheus) -> None:
    rules = " ".join(path.read_text() for path in RULES)
    for name in set(re.findall(r"\b(?:rlsrl_[a-z_]+|up)(?=[{)\[])", rules)):
        until(lambda name=name: prometheus.query(name), f"{name}, which an alert asks for, is there")
    until(lambda: set(prometheus.evaluations().values()) == {"ok"}, "every rule was evaluated")
    assert len(prometheus.evaluations()) == rules.count("alert: ")
    until(lambda: not prometheus.alerts(), "the run is seen to make steps, and no alert is even pending")
