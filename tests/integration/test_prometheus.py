"""A real Prometheus scrapes a real run of every role: each panel shows data, and no alert fires."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
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
RULES_OF_RUNS = [CHARTS / "alerts" / "experiments.yaml"]
EXPERIMENT = (
    GATED_EXPERIMENT.replace("replicas: 2, environments: 8", "replicas: 1, environments: 8, ringSize: 2").replace(
        'gate: "{gate}"}}', 'gate: "{gate}"}}, episodeInfo: [is_open]'
    )
    + """  policyWorkers: {{replicas: 1}}
  bufferWorkers: {{replicas: 1}}
  evaluators: {{replicas: 1, environments: 2, episodesPerEnvironment: 1, video: {{everyEvaluations: 1}}}}
"""
)
REPLAYS = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: live}
spec:
  environment: {id: CartPole-v1}
  algorithm:
    custom:
      factory: rlsrl.testing.q_learning:QLearning
      needs: {minibatchSize: 64, outputs: actionValues, replay: {capacity: 20000, start: 500}}
  actors: {replicas: 2, environments: 8, rolloutLength: 16}
  bufferWorkers: {replicas: 2}
  pacing: {trainStepsPerEnvStep: 0.1}
  stop: {envSteps: 100000000}
"""
OF_REPLAY = re.compile("rlsrl_(replay|train_steps_behind)")
ROLES = {"actor", "buffer", "coordinator", "evaluator", "policy", "trainer"}
VALUES = {"$namespace": "lab", "$experiment": "live", "$role": ".+", "$__rate_interval": "30s"}


def with_values(query: str) -> str:
    """Return a query of the dashboard with its variables replaced by their values."""
    return re.sub(r"\$\w+", lambda match: VALUES[match[0]], query)


def targets_of(run: LiveRun) -> list[Target]:
    """Return the run's workers as targets, with the labels of the chart's PodMonitor."""
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
    """A Prometheus that scrapes a live run and the operator's metrics of it."""
    folder = tmp_path_factory.mktemp("prometheus")
    operator = OperatorMetrics(CollectorRegistry())
    operator.experiments.set_status("lab", "live", ExperimentStatus(phase="Running", restarts=0))
    desk = Desk(folder, EXPERIMENT.format(gate=folder / "gate"))
    with (
        MetricsServer(operator.registry, host="127.0.0.1", port=0, token="") as operator_server,
        desk.begin() as run,
    ):
        run.until(run.is_complete, "all processes at work")
        operator_target = Target(
            address="{}:{}".format(*operator_server.address),
            labels={"namespace": "rlsrl-system", "role": "operator", "pod": "operator"},
            honor_labels=True,
        )
        with Prometheus(folder / "prometheus", [*targets_of(run), operator_target], RULES) as server:
            until(lambda: not server.faults(), "every target answers")
            yield server


@pytest.fixture(scope="module")
def prometheus_of_replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes a live run that replays from two buffer workers."""
    folder = tmp_path_factory.mktemp("replay")
    with Desk(folder, REPLAYS).begin() as run:
        run.until(run.is_complete, "all processes at work")
        with Prometheus(folder / "prometheus", targets_of(run), RULES_OF_RUNS) as server:
            yield server


def of_query(request: pytest.FixtureRequest, query: str) -> Prometheus:
    """Return the Prometheus of the run that has what a query asks for."""
    found: Prometheus = request.getfixturevalue("prometheus_of_replay" if OF_REPLAY.search(query) else "prometheus")
    return found


@pytest.mark.parametrize(
    ("panel", "query"),
    [
        pytest.param(panel["title"], target["expr"], id=f"{panel['title']}-{target['refId']}")
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ],
)
def test_a_panel_shows_data(request: pytest.FixtureRequest, panel: str, query: str) -> None:
    prometheus = of_query(request, query)
    found = until(lambda: prometheus.query(with_values(query)), f"{panel}: {with_values(query)}")
    for labels in found:
        assert dict(labels)["experiment"] == "live"


def test_each_replay_store_reports_itself(prometheus_of_replay: Prometheus) -> None:
    stores = {"live-buffer-0", "live-buffer-1"}

    def is_of_each(name: str) -> bool:
        series = prometheus_of_replay.query(f"rlsrl_{name}")
        return {dict(labels)["pod"] for labels, value in series.items() if value} == stores

    for name in ("replay_transitions", "replay_capacity_transitions", "replay_bytes", "replay_drawn_total"):
        until(partial(is_of_each, name), f"{name} of {stores}")


def test_the_ratio_is_the_one_that_is_wanted(prometheus_of_replay: Prometheus) -> None:
    (panel,) = (each for each in DASHBOARD["panels"] if each["title"] == "Minibatches for each transition")
    achieved, wanted = (with_values(target["expr"]) for target in panel["targets"])

    def is_near() -> bool:
        values = [list(prometheus_of_replay.query(query).values()) for query in (achieved, wanted)]
        return values[1] == [0.1] and len(values[0]) == 1 and abs(values[0][0] - 0.1) < 0.02

    until(is_near, "0.1 minibatches for each transition")


def test_the_variables_have_values(prometheus: Prometheus) -> None:
    variables = {each["name"]: each["query"] for each in DASHBOARD["templating"]["list"][1:]}
    values = {name: prometheus.label_values(with_values(each["query"])) for name, each in variables.items()}
    assert values == {"namespace": {"lab"}, "experiment": {"live"}, "role": ROLES}


def test_waits_add_up_to_at_most_the_elapsed_time(prometheus: Prometheus) -> None:
    """The Busy panel shows shares of time between 0 and 1."""
    (query,) = (panel["targets"][0]["expr"] for panel in DASHBOARD["panels"] if panel["title"] == "Busy")

    def all_are_shares() -> bool:
        busy = {dict(labels)["role"]: share for labels, share in prometheus.query(with_values(query)).items()}
        return all(-0.05 <= busy.get(role, -1.0) <= 1 for role in ("actor", "trainer", "buffer"))

    until(all_are_shares, "shares of time between 0 and 1")


def test_alerts_query_metrics_that_runs_have(request: pytest.FixtureRequest) -> None:
    rules = " ".join(path.read_text() for path in RULES)
    for name in sorted(set(re.findall(r"\b(?:rlsrl_[a-z_]+|up)(?=[{)\[])", rules))):
        prometheus = of_query(request, name)
        until(partial(prometheus.query, name), f"Prometheus has {name}, which an alert queries")


@pytest.mark.parametrize(("run", "rules"), [("prometheus", RULES), ("prometheus_of_replay", RULES_OF_RUNS)])
def test_no_alert_fires(request: pytest.FixtureRequest, run: str, rules: list[Path]) -> None:
    prometheus: Prometheus = request.getfixturevalue(run)
    until(lambda: set(prometheus.evaluations().values()) == {"ok"}, "every rule was evaluated")
    assert len(prometheus.evaluations()) == sum(path.read_text().count("alert: ") for path in rules)
    until(lambda: not prometheus.alerts(), "no alert is pending or firing")
