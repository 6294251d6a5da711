"""The dashboard of experiments: progress, waits, ledger and resources."""

from __future__ import annotations

from grafana import Json, Line, Panel, Row, Variable, dashboard
from promql import EXPERIMENT, Asking, Expression, age, operator_metrics, rest_of_one, zero

from rlsrl.runtime.metrics import LEDGER_TRANSITIONS, Metrics

ROLE = (*EXPERIMENT, "role")
ASKING = Asking('namespace=~"$namespace", experiment=~"$experiment"')
CHOSEN = ASKING.where('role=~"$role"')
"""The selected roles only."""
PROCESS = operator_metrics()
"""Metrics that every process serves."""
PRESENT = ASKING.level("max", Metrics.workers_wanted, *EXPERIMENT)
"""A series for each experiment."""


def experiment_dashboard() -> Json:
    """Return the dashboard."""
    variables = [
        Variable("namespace", f"label_values({Metrics.workers_wanted.name}, namespace)"),
        Variable("experiment", f'label_values({Metrics.workers_wanted.name}{{namespace=~"$namespace"}}, experiment)'),
        Variable("role", f'label_values(process_start_time_seconds{{{ASKING.matchers}, role!="operator"}}, role)'),
    ]
    rows = [progress(), versions(), time(), samples(), inference(), workers(), resources()]
    about = "Experiments of rlsrl: training, waiting, samples, workers, resources."
    return dashboard("rlsrl-experiment", "rlsrl / Experiment", about, variables, rows)


def progress() -> Row:
    """Return the row about progress."""
    trained = ASKING.rate(Metrics.transitions_trained, *EXPERIMENT)
    steps = ASKING.rate(Metrics.train_steps, *EXPERIMENT, aggregate="avg")
    return Row(
        "Progress",
        (
            one("Environment steps a second", "short", ASKING.rate(Metrics.env_steps, *EXPERIMENT)),
            one("Transitions trained", "short", ledger("trained")),
            Panel(
                "Return",
                "short",
                (
                    Line(ASKING.level("max", Metrics.return_mean, *EXPERIMENT), "{{experiment}}"),
                    Line(ASKING.level("max", Metrics.evaluation_return_mean, *EXPERIMENT), "{{experiment}} evaluated"),
                ),
            ),
            one(
                "Episode length", "short", trained / ASKING.rate(Metrics.episodes, *EXPERIMENT), "In environment steps."
            ),
            one("Training steps a second", "short", steps),
            one(
                "Transitions in a training step", "short", ASKING.rate(Metrics.transitions_trained, *EXPERIMENT) / steps
            ),
        ),
    )


def versions() -> Row:
    """Return the row about policy lag and durable versions."""
    trainers = ASKING.where('role="trainer"')
    newest = trainers.level("max", Metrics.version_step, *EXPERIMENT)
    behind = ASKING.where('role!="trainer"').level("min", Metrics.version_step, *ROLE)
    matched = f"{newest.text} - on ({', '.join(EXPERIMENT)}) group_right () {behind.text}"
    stored = ASKING.level("max", Metrics.durable_version_timestamp_seconds, *EXPERIMENT)
    return Row(
        "Weights",
        (
            Panel(
                "Policy lag",
                "short",
                (
                    Line(ASKING.quantile(0.5, Metrics.policy_lag, *EXPERIMENT), "{{experiment}} median"),
                    Line(ASKING.quantile(1, Metrics.policy_lag, *EXPERIMENT), "{{experiment}} at most"),
                    Line(
                        ASKING.rate(Metrics.policy_lag_exceeded, *EXPERIMENT),
                        "{{experiment}} batches/s above the bound",
                    ),
                ),
            ),
            by("Newest version", "short", ASKING.level("max", Metrics.version_step, *ROLE), "role"),
            by(
                "Steps behind the trainers", "short", Expression(matched, newest.metrics), "role", "The slowest worker."
            ),
            Panel(
                "Age of the newest durable version",
                "s",
                (
                    Line(age(stored), "{{experiment}}"),
                    Line(ASKING.level("max", Metrics.checkpoint_period_seconds, *EXPERIMENT), "{{experiment}} period"),
                ),
            ),
            one("Newest durable version", "short", ASKING.level("max", Metrics.durable_version_step, *EXPERIMENT)),
            one(
                "Checkpoints failed in 10 minutes",
                "short",
                ASKING.growth(Metrics.checkpoints_failed, "10m", *EXPERIMENT),
            ),
        ),
    )


def time() -> Row:
    """Return the row about work and waits."""
    trainers = ASKING.where('role="trainer"')
    waiting = f"sum without (reason) (rate({CHOSEN.series(Metrics.waiting_seconds)}[$__rate_interval]))"
    busy = Expression(f"avg by ({', '.join(ROLE)}) (1 - {waiting})", (Metrics.waiting_seconds,))
    waits = CHOSEN.rate(Metrics.waiting_seconds, *ROLE, "reason", aggregate="avg")
    works = CHOSEN.rate(Metrics.working_seconds, *ROLE, "stage", aggregate="avg")
    learning = trainers.share_of_time(Metrics.step_seconds, *EXPERIMENT)
    batches = trainers.where('reason="batch"').rate(Metrics.waiting_seconds, *EXPERIMENT, aggregate="avg")
    credit = ASKING.where('reason="credit"').rate(Metrics.waiting_seconds, *ROLE, "pod", aggregate="avg")
    return Row(
        "Where time goes",
        (
            by(
                "Busy",
                "percentunit",
                busy,
                "role",
                "Share of their time in which workers wait for nothing, on average.",
            ),
            Panel(
                "Waiting",
                "percentunit",
                (Line(waits, "{{experiment}} {{role}} for {{reason}}"),),
                "Share of their time, on average over the role's workers.",
            ),
            Panel(
                "Working",
                "percentunit",
                (Line(works, "{{experiment}} {{role}} on {{stage}}"),),
                "Share of their time, on average over the role's workers; what is missing to busy is the rest.",
            ),
            by("Waiting for credit", "percentunit", credit, "pod", "Actors that wait long are held back by training."),
            Panel(
                "Training thread",
                "percentunit",
                (
                    Line(learning, "{{experiment}} step"),
                    Line(batches, "{{experiment}} waits for a batch"),
                    Line(rest_of_one(learning, batches), "{{experiment}} the rest: publishing, checkpoints, agreeing"),
                ),
                "Share of its time, on average over the ranks.",
            ),
            Panel(
                "Duration of a training step",
                "s",
                (
                    Line(ASKING.mean(Metrics.step_seconds, *EXPERIMENT), "{{experiment}} mean"),
                    Line(ASKING.quantile(0.99, Metrics.step_seconds, *EXPERIMENT), "{{experiment}} 99 %"),
                ),
            ),
            Panel(
                "Compiled training step",
                "short",
                (Line(ASKING.level("min", Metrics.compiled, *EXPERIMENT), "{{experiment}}"),),
                "If it should be and is not, the logs of the trainers say why (`not_compiled`).",
            ),
        ),
    )


def samples() -> Row:
    """Return the row about the ledger."""
    terms = (*EXPERIMENT, "term")
    gone = ASKING.where('term=~"(dropped|lost)[.].+"').level("sum", LEDGER_TRANSITIONS, *terms)
    settled = ASKING.where('term=~"trained|in_buffer|(dropped|lost)[.].+"').level(
        "sum", LEDGER_TRANSITIONS, *EXPERIMENT
    )
    held = ASKING.where('term="in_buffer"').level("sum", LEDGER_TRANSITIONS, *ROLE)
    return Row(
        "Samples",
        (
            by("Transitions waiting in buffers", "short", held, "role"),
            by("Slots posted a second", "short", ASKING.rate(Metrics.rollouts, *ROLE), "role"),
            by("Ledger", "short", ASKING.level("sum", LEDGER_TRANSITIONS, *terms), "term"),
            by("Dropped and lost", "short", gone, "term"),
            one(
                "Ledger: produced and not settled",
                "short",
                ledger("produced|outlived") - settled,
                "On the way between two processes. It should not grow, but jumps while a pod is replaced.",
            ),
        ),
    )


def inference() -> Row:
    """Return the row about policy workers and evaluators; empty without any."""
    stage = (*EXPERIMENT, "stage")
    queueing = ASKING.where('stage="queueing"')
    return Row(
        "Inference and evaluation",
        (
            one("Inference requests a second", "short", ASKING.rate(Metrics.inference_requests, *EXPERIMENT)),
            Panel(
                "Environments evaluated together",
                "short",
                (
                    Line(ASKING.mean(Metrics.inference_batch_environments, *EXPERIMENT), "{{experiment}} mean"),
                    Line(
                        ASKING.quantile(0.99, Metrics.inference_batch_environments, *EXPERIMENT), "{{experiment}} 99 %"
                    ),
                ),
            ),
            by("Time of an inference batch", "s", ASKING.mean(Metrics.inference_seconds, *stage), "stage"),
            one(
                "Requests wait in the queue (99 %)",
                "s",
                queueing.quantile(0.99, Metrics.inference_seconds, *EXPERIMENT),
            ),
            by(
                "Evaluations in 10 minutes",
                "short",
                ASKING.growth(Metrics.evaluations, "10m", *EXPERIMENT, "outcome"),
                "outcome",
            ),
            one("Duration of an evaluation", "s", ASKING.mean(Metrics.evaluation_seconds, *EXPERIMENT)),
        ),
    )


def workers() -> Row:
    """Return the row about workers and refused clients."""
    role = (*EXPERIMENT, "worker_role")
    return Row(
        "Workers",
        (
            Panel(
                "Workers",
                "short",
                (
                    Line(ASKING.level("max", Metrics.workers, *role), "{{experiment}} {{worker_role}}"),
                    Line(ASKING.level("max", Metrics.workers_wanted, *role), "{{experiment}} {{worker_role}} wanted"),
                ),
            ),
            by("Oldest heartbeat", "s", ASKING.level("max", Metrics.heartbeat_age_seconds, *role), "worker_role"),
            by("Workers joined in 10 minutes", "short", ASKING.growth(Metrics.joins, "10m", *role), "worker_role"),
            one(
                "Attempt of the trainers",
                "short",
                ASKING.level("max", Metrics.version_attempt, *EXPERIMENT),
                "One more for each time that the gang was started anew.",
            ),
            Panel(
                "Refused and failed in 10 minutes",
                "short",
                tuple(
                    Line(ASKING.growth(metric, "10m", *EXPERIMENT, *labels).or_else(zero(PRESENT)), legend)
                    for metric, labels, legend in (
                        (Metrics.joins_refused, ("worker_role",), "{{experiment}} joins {{worker_role}}"),
                        (Metrics.inference_refused, ("kind",), "{{experiment}} inference {{kind}}"),
                        (Metrics.parameter_calls_refused, ("kind",), "{{experiment}} weights {{kind}}"),
                        (Metrics.strangers_refused, ("role", "kind"), "{{experiment}} {{role}} strangers {{kind}}"),
                        (Metrics.tracking_failures, ("tracker",), "{{experiment}} tracking {{tracker}}"),
                    )
                ),
            ),
        ),
    )


def resources() -> Row:
    """Return the row about the resources of the selected roles."""
    cores = CHOSEN.rate(PROCESS["process_cpu_seconds_total"], *ROLE)
    memory = CHOSEN.level("sum", PROCESS["process_resident_memory_bytes"], *ROLE)
    largest = CHOSEN.level("max", PROCESS["process_resident_memory_bytes"], *ROLE)
    return Row(
        "Resources",
        (
            by("CPU cores", "short", cores, "role"),
            Panel(
                "Resident memory",
                "bytes",
                (Line(memory, "{{experiment}} {{role}}"), Line(largest, "{{experiment}} {{role}} largest process")),
            ),
            by("Open files of those allowed", "percentunit", CHOSEN.open_files(*ROLE), "role"),
        ),
    )


def ledger(term: str) -> Expression:
    """Return one term of the ledger, or several joined by ``|``, summed over all pages."""
    return ASKING.where(f'term=~"{term}"').level("sum", LEDGER_TRANSITIONS, *EXPERIMENT)


def one(title: str, unit: str, expression: Expression, note: str = "") -> Panel:
    """Return a panel with one line for each experiment."""
    return Panel(title, unit, (Line(expression, "{{experiment}}"),), note)


def by(title: str, unit: str, expression: Expression, label: str, note: str = "") -> Panel:
    """Return a panel with one line for each value of a label."""
    return Panel(title, unit, (Line(expression, f"{{{{experiment}}}} {{{{{label}}}}}"),), note)
