"""The dashboard of the operator: the experiments' states and the operator's own load."""

from __future__ import annotations

from grafana import Json, Line, Panel, Row, Variable, dashboard
from promql import EXPERIMENT, Targets, age, operator_metrics

METRICS = operator_metrics()
OPERATOR = Targets('role="operator"')
OF_EXPERIMENTS = OPERATOR.where('namespace=~"$namespace"')


def operator_dashboard() -> Json:
    """Return the dashboard."""
    variables = [Variable("namespace", "label_values(rlsrl_experiment_phase, namespace)")]
    about = "The operator of rlsrl: experiments by phase, its queue, its writes, its resources."
    return dashboard("rlsrl-operator", "rlsrl / Operator", about, variables, [experiments(), work(), resources()])


def experiments() -> Row:
    """Return the row about the experiments of the selected namespaces."""
    phase = OF_EXPERIMENTS.level("sum", METRICS["rlsrl_experiment_phase"], "phase")
    restarts = OF_EXPERIMENTS.growth(METRICS["rlsrl_experiment_gang_restarts_total"], "1h", *EXPERIMENT)
    failing = OPERATOR.level("sum", METRICS["rlsrl_operator_failing_experiments"], "role")
    return Row(
        "Experiments",
        (
            Panel("Experiments", "short", (Line(phase, "{{phase}}"),)),
            Panel("Gang restarts in an hour", "short", (Line(restarts, "{{namespace}}/{{experiment}}"),)),
            Panel("Experiments whose pass fails", "short", (Line(failing, "failing"),)),
        ),
    )


def work() -> Row:
    """Return the row about the operator's work and its queue."""
    passes = OPERATOR.rate(METRICS["rlsrl_operator_reconciles_total"], "outcome")
    seconds = METRICS["rlsrl_operator_reconcile_seconds"]
    success = age(OPERATOR.level("max", METRICS["rlsrl_operator_last_success_timestamp_seconds"], "role"))
    writes = OPERATOR.rate(METRICS["rlsrl_operator_api_writes_total"], "kind", "verb")
    return Row(
        "Work",
        (
            Panel("Passes a second", "short", (Line(passes, "{{outcome}}"),)),
            Panel(
                "Duration of a pass",
                "s",
                (
                    Line(OPERATOR.quantile(0.5, seconds), "median"),
                    Line(OPERATOR.quantile(0.99, seconds), "99 %"),
                ),
            ),
            Panel("Since the last successful pass", "s", (Line(success, "seconds"),)),
            level("Experiments in the queue", "short", "rlsrl_operator_queue_length"),
            level("Oldest in the queue", "s", "rlsrl_operator_oldest_key_seconds"),
            Panel("Writes a second", "short", (Line(writes, "{{verb}} {{kind}}"),)),
        ),
    )


def resources() -> Row:
    """Return the row about the operator's resources."""
    cores = OPERATOR.rate(METRICS["process_cpu_seconds_total"], "pod")
    return Row(
        "Resources",
        (
            Panel("CPU cores", "short", (Line(cores, "{{pod}}"),)),
            level("Resident memory", "bytes", "process_resident_memory_bytes"),
            Panel("Open files of those allowed", "percentunit", (Line(OPERATOR.open_files("pod"), "{{pod}}"),)),
        ),
    )


def level(title: str, unit: str, name: str) -> Panel:
    """Return a panel of one gauge."""
    return Panel(title, unit, (Line(OPERATOR.level("max", METRICS[name], "pod"), "{{pod}}"),))
