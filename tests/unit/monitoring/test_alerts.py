"""Each alert fires for its cause, and is silent without problems and for problems that heal without help."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from rlsrl.runtime.metrics import Metrics
from rlsrl_operator.metrics import OperatorMetrics

CHARTS = Path(__file__).parents[3] / "charts"
FILES = sorted((CHARTS / "alerts").glob("*.yaml"))
GROUPS = [group for path in FILES for group in yaml.safe_load(path.read_text())["groups"]]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
EXPERIMENT = 'namespace="lab",experiment="run"'
PHASE = f"rlsrl_experiment_phase{{{EXPERIMENT},phase="
MINUTES = 180

Series = Mapping[str, str | None]
"""Values of each series, one a minute, in promtool's notation; None removes a series."""

WELL: dict[str, str | None] = {
    f'{PHASE}"Running"}}': "1x180",
    f'up{{{EXPERIMENT},role="coordinator"}}': "1x180",
    'up{namespace="rlsrl-system",pod="o",role="operator"}': "1x180",
    f"rlsrl_env_steps_total{{{EXPERIMENT}}}": "0+6000x180",
    f"rlsrl_train_steps_total{{{EXPERIMENT}}}": "0+10x180",
    f'rlsrl_ledger_transitions{{{EXPERIMENT},term="lost.receiver_died"}}': "0x180",
    f'rlsrl_ledger_transitions{{{EXPERIMENT},term="dropped.stale"}}': "0+6000x180",
    f"rlsrl_policy_lag_exceeded_total{{{EXPERIMENT}}}": "0x180",
    f'rlsrl_minibatches_total{{{EXPERIMENT},outcome="taken"}}': "0+600x180",
    f'rlsrl_minibatches_total{{{EXPERIMENT},outcome="skipped"}}': "0x180",
    f"rlsrl_stalled_seconds{{{EXPERIMENT}}}": "0x180",
    f"rlsrl_paused{{{EXPERIMENT}}}": "0x180",
    f"rlsrl_environment_server_waits{{{EXPERIMENT}}}": "0x180",
    f'rlsrl_workers{{{EXPERIMENT},worker_role="actor"}}': "2x180",
    f'rlsrl_workers_wanted{{{EXPERIMENT},worker_role="actor"}}': "2x180",
    f"rlsrl_experiment_gang_restarts_total{{{EXPERIMENT}}}": "0x180",
    f"rlsrl_checkpoints_failed_total{{{EXPERIMENT}}}": "0x180",
    f"rlsrl_durable_version_timestamp_seconds{{{EXPERIMENT}}}": "0+60x180",
    f"rlsrl_checkpoint_period_seconds{{{EXPERIMENT}}}": "10x180",
    f"rlsrl_train_steps_behind{{{EXPERIMENT}}}": "400x180",
    f"rlsrl_train_steps_behind_limit{{{EXPERIMENT}}}": "500x180",
    f"rlsrl_replay_ratio_wanted{{{EXPERIMENT}}}": "0.1x180",
    f"rlsrl_replay_start_missing_transitions{{{EXPERIMENT}}}": "0x180",
    f"rlsrl_replay_shards_away{{{EXPERIMENT}}}": "0x180",
    f'rlsrl_replay_transitions{{{EXPERIMENT},pod="run-trainer-0",endpoint="http"}}': "0+6000x16 100000x163",
    'rlsrl_operator_failing_experiments{namespace="rlsrl-system",pod="o"}': "0x180",
    'rlsrl_operator_oldest_key_seconds{namespace="rlsrl-system",pod="o"}': "0.2x180",
}
"""A run that trains for three hours."""


def series(name: str) -> str:
    """Return the series of that name in ``WELL``."""
    found = [each for each in WELL if each.startswith(f"{name}{{")]
    assert len(found) == 1, name
    return found[0]


STEPS = series("rlsrl_env_steps_total")
TRAIN_STEPS = series("rlsrl_train_steps_total")
STALLED = series("rlsrl_stalled_seconds")
STORED_AT = series("rlsrl_durable_version_timestamp_seconds")
STORE = series("rlsrl_replay_transitions")
OTHER_STORE = STORE.replace("trainer-0", "trainer-1")
SHARDS = [STORE.replace("trainer-0", f"buffer-{index}") for index in range(3)]
SHARDS_AWAY = series("rlsrl_replay_shards_away")
START_MISSING = series("rlsrl_replay_start_missing_transitions")
LOST = f'rlsrl_ledger_transitions{{{EXPERIMENT},term="lost.receiver_died"}}'
COORDINATOR = f'up{{{EXPERIMENT},role="coordinator"}}'
OPERATOR = 'up{namespace="rlsrl-system",pod="o",role="operator"}'
SKIPPED = f'rlsrl_minibatches_total{{{EXPERIMENT},outcome="skipped"}}'
TAKEN = f'rlsrl_minibatches_total{{{EXPERIMENT},outcome="taken"}}'
STALE = f'rlsrl_ledger_transitions{{{EXPERIMENT},term="dropped.stale"}}'
RUNNING = f'{PHASE}"Running"}}'

RESTARTS = series("rlsrl_experiment_gang_restarts_total")
BEHIND = series("rlsrl_train_steps_behind")
OF_PODS = {name: values for name, values in WELL.items() if EXPERIMENT in name and name not in (RUNNING, RESTARTS)}
"""What a run's own pods export."""

PAUSED: Series = {
    series("rlsrl_paused"): "0x60 1x110 0x8",
    STEPS: "0+6000x60 360000x110 366000+6000x8",
    TRAIN_STEPS: "0+10x60 600x110 610+10x8",
    STALE: "0+6000x60 360000x110 366000+6000x8",
    TAKEN: "0+600x60 36000x110 36600+600x8",
    STORED_AT: "0+60x60 3600x110 10320+60x8",
}
"""A pause of all workers from the 61st to the 171st minute. Workers keep their leases, and the phase stays Running."""

SILENT: dict[str, Series] = {
    "a run that trains": {},
    "a run that has ended well: only the coordinator stays": {
        RUNNING: "1x100",
        f'{PHASE}"Succeeded"}}': "_x100 1x80",
        STEPS: "0+6000x100",
        series("rlsrl_workers"): "2x100 0x80",
        STORED_AT: "0+60x100",
        TRAIN_STEPS: "0+10x100",
        series("rlsrl_checkpoint_period_seconds"): "10x100",
    },
    "a run that takes 20 minutes to start": {
        RUNNING: "_x20 1x160",
        f'{PHASE}"Starting"}}': "1x19 _x160",
        STEPS: "_x20 0+6000x160",
        TRAIN_STEPS: "_x20 0+10x160",
        series("rlsrl_workers"): "1x10 2x170",
    },
    "an actor is replaced, within ten minutes": {series("rlsrl_workers"): "2x60 1x9 2x110"},
    "the coordinator moves to another node, within three minutes": {COORDINATOR: "1x60 0x2 1x118"},
    "the operator is upgraded": {OPERATOR: "1x60 _x2 1x118"},
    "a trainer dies once: the gang restarts, and loses little": {
        RESTARTS: "0x60 1x120",
        LOST: "0x60 2048x120",
        STORED_AT: "0+60x60 3600x4 3900+60x116",
    },
    "a run is suspended: no pod stays": {
        RUNNING: "1x60",
        f'{PHASE}"Suspended"}}': "_x60 1x120",
        **{name: values.replace("x180", "x60") for name, values in OF_PODS.items()},
    },
    "a run is paused by `control`, and goes on": PAUSED,
    "a trainer dies shortly before a pause": {**PAUSED, RESTARTS: "0x57 1x122", LOST: "0x57 2048x122"},
    "a trainer dies during a pause": {**PAUSED, RESTARTS: "0x100 1x79", LOST: "0x100 2048x79"},
    "a trainer dies shortly before the end of a pause": {**PAUSED, RESTARTS: "0x164 1x15", LOST: "0x164 2048x15"},
    "trainers are paused, and actors gather as much as the bound allows": {**PAUSED, STEPS: "0+6000x180"},
    "a run is paused while it catches up after a rollback": {**PAUSED, BEHIND: "400x50 4000-150x9 2500x119"},
    "a run stands still for three minutes": {STALLED: "0x60 60+60x2 0x117"},
    "the server of the environments starts again": {series("rlsrl_environment_server_waits"): "0x60 8x3 0x117"},
    "training catches up after a rollback": {BEHIND: "400x60 4000-150x20 400x99"},
    "a trainer begins again with its store": {STORE: "90000x60 _x2 90000x117"},
    "trainers begin again with their stores, and are scraped one after the other": {
        STORE: "90000x60 _x2 90000x117",
        OTHER_STORE: "90000x60 _x3 90000x116",
    },
    "a buffer worker begins again with its store": {
        STORE: None,
        **dict.fromkeys(SHARDS, "90000x180"),
        SHARDS[1]: "90000x60 _x5 90000x114",
        SHARDS_AWAY: "0x60 1x5 0x114",
    },
    "a store fills for an hour before training begins": {
        START_MISSING: "120000-2000x60 0x119",
        TAKEN: "_x61 0+600x119",
        SKIPPED: "_x61 0x119",
    },
    "a lost store fills for an hour before training goes on": {
        START_MISSING: "0x40 120000-2000x60 0x79",
        TAKEN: "0+600x40 24000x60 24000+600x79",
        BEHIND: "400x40 400+600x60 36400-3000x12 400x67",
    },
    "gathering leads by as much as the bound allows": {
        series("rlsrl_train_steps_behind_limit"): "1000000x180",
        BEHIND: "0+590x180",
        TAKEN: "0+10x180",
    },
    "env steps are slow: a training step takes place each hour": {
        STEPS: "0+10x180",
        TAKEN: "0x50 60x60 120x70",
    },
    "a few minibatches are skipped": {SKIPPED: "0x60 30x120"},
    "versions are meant to be rare": {
        series("rlsrl_checkpoint_period_seconds"): "3600x180",
        STORED_AT: "0x60 3600x60 7200x60",
    },
    "the operator is busy for a while": {
        series("rlsrl_operator_oldest_key_seconds"): "0.2x60 0+60x5 0.2x115",
        series("rlsrl_operator_failing_experiments"): "0x60 1x5 0x115",
    },
}
"""Series of problems that heal without help."""

FIRING: dict[str, Sequence[Series]] = {
    "RlsrlExperimentNotStarting": [
        {RUNNING: None, f'{PHASE}"Pending"}}': "1x180", STEPS: None},
        {RUNNING: None, f'{PHASE}"Starting"}}': "_x20 1x160", f'{PHASE}"Pending"}}': "1x19", STEPS: None},
    ],
    "RlsrlExperimentStalled": [{STALLED: "0x160 60+60x20"}],
    "RlsrlEnvironmentServerAway": [{series("rlsrl_environment_server_waits"): "0x160 8x20"}],
    "RlsrlExperimentFailed": [{RUNNING: "1x150", f'{PHASE}"Failed"}}': "_x150 1x30"}],
    "RlsrlGangRestarting": [{RESTARTS: "0x140 1x10 2x10 3x20"}],
    "RlsrlCoordinatorAbsent": [{COORDINATOR: "1x150 0x30"}, {COORDINATOR: "1x150"}],
    "RlsrlWorkersAbsent": [{series("rlsrl_workers"): "2x150 1x30"}],
    "RlsrlCheckpointsFailing": [{series("rlsrl_checkpoints_failed_total"): "0x170 1x10"}],
    "RlsrlCheckpointLate": [{STORED_AT: "0+60x150 9000x30"}],
    "RlsrlMinibatchesSkipped": [{SKIPPED: "0x170 0+300x10"}],
    "RlsrlSamplesLost": [{LOST: "0x160 0+2000x20"}],
    "RlsrlTrainingBehindGathering": [{BEHIND: "400x140 4000x40"}],
    "RlsrlReplayRatioStuck": [
        {TAKEN: "0+600x140 84000x40"},
        {TAKEN: None, SKIPPED: None},
        {TAKEN: "0+600x100 60000x80", START_MISSING: "0x100 120000x80"},
    ],
    "RlsrlReplayShardAway": [{SHARDS_AWAY: "0x160 1x20"}],
    "RlsrlReplayStoreLost": [
        {STORE: "90000x170 0+1000x10"},
        {OTHER_STORE: "90000x170 0+1000x10"},
        {STORE: None, **dict.fromkeys(SHARDS, "90000x180"), SHARDS[1]: "90000x165 _x5 0+1000x10"},
    ],
    "RlsrlPolicyLagExceeded": [{series("rlsrl_policy_lag_exceeded_total"): "0x170 1x10"}],
    "RlsrlOperatorAbsent": [{OPERATOR: "1x150 0x30"}, {OPERATOR: "1x150"}],
    "RlsrlReconcileFailing": [{series("rlsrl_operator_failing_experiments"): "0x160 1x20"}],
    "RlsrlOperatorQueueStuck": [{series("rlsrl_operator_oldest_key_seconds"): "0.2x160 0+60x20"}],
}
"""For each alert the series that make it fire, each alone."""


def firing(changes: Series, folder: Path, *moments: int) -> list[set[str]]:
    """Return the alerts that fire at each of these minutes."""
    values = {name: value for name, value in {**WELL, **changes}.items() if value is not None}
    asked = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        # Expects what never is, so that promtool tells what there is.
        "exp_samples": [{"labels": '{never="1"}', "value": 1}],
    }
    document = {
        "rule_files": [str(path) for path in FILES],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": value} for name, value in values.items()],
                "promql_expr_test": [{**asked, "eval_time": f"{minute}m"} for minute in moments],
            }
        ],
    }
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump(document))
    said = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    got = re.findall(r"got:(.*)", said.stdout + said.stderr)
    assert len(got) == len(moments), said
    return [set(re.findall(r'alertname="(\w+)"', each)) for each in got]


def test_promtool_takes_the_rules() -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", "--lint-fatal", *map(str, FILES)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("what", SILENT)
def test_no_alert_fires_for_problems_that_heal(what: str, tmp_path: Path) -> None:
    moments = (10, 30, 66, 75, 85, 110, 130, 174, 179)
    assert firing(SILENT[what], tmp_path, *moments) == [set() for _ in moments]


@pytest.mark.parametrize(("alert", "cause"), [(alert, cause) for alert, causes in FIRING.items() for cause in causes])
def test_each_cause_fires_its_alert_only(alert: str, cause: Series, tmp_path: Path) -> None:
    assert firing(cause, tmp_path, 179) == [{alert}]


def test_a_failure_fires_for_an_hour(tmp_path: Path) -> None:
    cause = {RUNNING: "1x20", f'{PHASE}"Failed"}}': "_x20 1x160"}
    assert firing(cause, tmp_path, 19, 30, 75, 90, 179) == [set(), *[{"RlsrlExperimentFailed"}] * 2, set(), set()]


def test_each_alert_is_tried() -> None:
    assert set(FIRING) == set(RULES)


@pytest.mark.parametrize("alert", RULES)
def test_each_alert_says_what_to_do(alert: str) -> None:
    rule = RULES[alert]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert rule["annotations"]["summary"].endswith(".")
    assert re.search(r"[Cc]heck|[Ff]ind out|[Ll]ook at|report|`kubectl", rule["annotations"]["description"])


def test_alerts_use_existing_metrics() -> None:
    workers = {each.name for each in Metrics.declared()}
    families = OperatorMetrics(CollectorRegistry()).registry.collect()
    operator = {f"{each.name}_total" if each.type == "counter" else each.name for each in families}
    asked = {name for rule in RULES.values() for name in re.findall(r"\brlsrl_[a-z_]+", rule["expr"])}
    assert asked <= workers | operator
    tried = {re.split(r"[{]", each)[0] for each in WELL} - {"up"}
    assert asked <= tried, "each has a series in a healthy run"
