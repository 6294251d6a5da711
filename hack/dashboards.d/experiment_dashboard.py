"""The dashboard of experiments: progress, waits, ledger and resources."""

from __future__ import annotations

from grafana import Json, Line, Panel, Row, Variable, dashboard
from promql import EXPERIMENT, Expression, Targets, age, operator_metrics, rest_of_one, zero

from rlsrl.runtime.metrics import LEDGER_TRANSITIONS, Metrics

ROLE = (*EXPERIMENT, "role")
TARGETS = Targets('namespace=~"$namespace", experiment=~"$experiment"')
CHOSEN_ROLES = TARGETS.where('role=~"$role"')
"""Targets of the selected roles only."""
PROCESS = operator_metrics()
"""Metrics that every process serves."""
PRESENT = TARGETS.level("max", Metrics.workers_wanted, *EXPERIMENT)
"""A series for each experiment."""


def experiment_dashboard() -> Json:
    """Return the dashboard."""
    variables = [
        Variable("namespace", f"label_values({Metrics.workers_wanted.name}, namespace)"),
        Variable("experiment", f'label_values({Metrics.workers_wanted.name}{{namespace=~"$namespace"}}, experiment)'),
        Variable("role", f'label_values(process_start_time_seconds{{{TARGETS.matchers}, role!="operator"}}, role)'),
    ]
    rows = [progress(), versions(), replay(), time(), samples(), inference(), workers(), resources()]
    about = "Experiments of rlsrl: training, waiting, samples, workers, resources."
    return dashboard("rlsrl-experiment", "rlsrl / Experiment", about, variables, rows)


def progress() -> Row:
    """Return the row about progress."""
    steps = TARGETS.rate(Metrics.train_steps, *EXPERIMENT, aggregate="avg")
    return Row(
        "Progress",
        (
            one("Environment steps a second", "short", TARGETS.rate(Metrics.env_steps, *EXPERIMENT)),
            one("Transitions trained", "short", ledger("trained")),
            Panel(
                "Return",
                "short",
                (
                    Line(TARGETS.level("max", Metrics.return_mean, *EXPERIMENT), "{{experiment}}"),
                    Line(TARGETS.level("max", Metrics.evaluation_return_mean, *EXPERIMENT), "{{experiment}} evaluated"),
                ),
            ),
            Panel(
                "Episode length",
                "short",
                (
                    Line(TARGETS.level("max", Metrics.episode_length_mean, *EXPERIMENT), "{{experiment}}"),
                    Line(TARGETS.level("max", Metrics.evaluation_length_mean, *EXPERIMENT), "{{experiment}} evaluated"),
                ),
            ),
            Panel(
                "Values of info",
                "short",
                (
                    Line(TARGETS.level("max", Metrics.episode_info_mean, *EXPERIMENT, "key"), "{{experiment}} {{key}}"),
                    Line(
                        TARGETS.level("max", Metrics.evaluation_info_mean, *EXPERIMENT, "key"),
                        "{{experiment}} {{key}} evaluated",
                    ),
                ),
            ),
            Panel(
                "Episodes a second",
                "short",
                (
                    Line(TARGETS.rate(Metrics.episodes, *EXPERIMENT), "{{experiment}}"),
                    Line(TARGETS.rate(Metrics.episode_info, *EXPERIMENT, "key"), "{{experiment}} with {{key}}"),
                ),
            ),
            by(
                "Environment faults a second",
                "short",
                TARGETS.rate(Metrics.environment_faults, *EXPERIMENT, "reason"),
                "reason",
                "Steps and resets that raised or gave NaN or infinity, and episodes that another environment ended.",
            ),
            one("Training steps a second", "short", steps),
            one(
                "Transitions in a training step",
                "short",
                TARGETS.rate(Metrics.transitions_trained, *EXPERIMENT) / steps,
            ),
            one(
                "Minibatches skipped in 10 minutes",
                "short",
                TARGETS.where('outcome="skipped"').growth(Metrics.minibatches, "10m", *EXPERIMENT),
                "Their loss or gradient was not finite.",
            ),
        ),
    )


def replay() -> Row:
    """Return the row about replay stores and their pace. Its panels are empty for experiments that replay nothing."""
    store = (*EXPERIMENT, "pod")
    held = TARGETS.level("sum", Metrics.replay_transitions, *store)
    wanted = TARGETS.level("max", Metrics.replay_ratio_wanted, *EXPERIMENT)
    updates = TARGETS.rate_of_processes(Metrics.minibatches, "outcome", *EXPERIMENT)
    achieved = updates / TARGETS.rate(Metrics.env_steps, *EXPERIMENT)
    actors = TARGETS.where('role="actor", reason="credit"')
    trainers = TARGETS.where('role="trainer", reason=~"batch|buffer workers"')
    gathering = actors.rate(Metrics.waiting_seconds, *EXPERIMENT, aggregate="avg")
    training = trainers.rate_of_processes(Metrics.waiting_seconds, "reason", *EXPERIMENT)
    return Row(
        "Replay",
        (
            Panel(
                "Transitions in the stores",
                "short",
                (
                    Line(TARGETS.level("sum", Metrics.replay_transitions, *EXPERIMENT), "{{experiment}}"),
                    Line(TARGETS.level("sum", Metrics.replay_capacity, *EXPERIMENT), "{{experiment}} capacity"),
                    Line(
                        TARGETS.level("sum", Metrics.replay_start_missing, *EXPERIMENT),
                        "{{experiment}} missing until training begins",
                    ),
                ),
            ),
            by(
                "Share of each store in use",
                "percentunit",
                held / TARGETS.level("sum", Metrics.replay_capacity, *store),
                "pod",
                "A store whose line falls was lost.",
            ),
            one("Size of the stores' files", "bytes", TARGETS.level("sum", Metrics.replay_bytes, *EXPERIMENT)),
            Panel(
                "Age of transitions",
                "short",
                (
                    Line(TARGETS.level("max", Metrics.replay_age, *store), "{{experiment}} {{pod}} drawn, on average"),
                    Line(
                        TARGETS.level("max", Metrics.replay_transitions, *store),
                        "{{experiment}} {{pod}} the oldest in the store",
                    ),
                ),
                "Env steps that the same process stored later. After the oldest it stored all others that it holds.",
            ),
            by("Transitions drawn a second", "short", TARGETS.rate(Metrics.replay_drawn, *store), "pod"),
            by(
                "Transitions evicted a second",
                "short",
                TARGETS.rate(Metrics.replay_evicted, *EXPERIMENT, "outcome"),
                "outcome",
                "Newer transitions replaced them.",
            ),
            Panel(
                "Minibatches for each transition",
                "short",
                (
                    Line(achieved.where_present(wanted), "{{experiment}}"),
                    Line(wanted, "{{experiment}} wanted"),
                ),
                "Less than wanted while a store fills to `start`, more while training catches up.",
            ),
            Panel(
                "Who waits",
                "percentunit",
                (
                    Line(gathering.where_present(wanted), "{{experiment}} gathering: training is behind"),
                    Line(training.where_present(wanted), "{{experiment}} training: nothing is due"),
                ),
                "Share of the time, on average over actors and over trainers.",
            ),
            Panel(
                "Minibatches that training is behind",
                "short",
                (
                    Line(TARGETS.level("max", Metrics.train_steps_behind, *EXPERIMENT), "{{experiment}}"),
                    Line(TARGETS.level("max", Metrics.train_steps_behind_limit, *EXPERIMENT), "{{experiment}} limit"),
                ),
            ),
            by(
                "Buffer workers away",
                "short",
                TARGETS.level("sum", Metrics.replay_shards_away, *store),
                "pod",
                "Those of each trainer pod. It draws from the others meanwhile.",
            ),
        ),
    )


def versions() -> Row:
    """Return the row about policy lag and durable versions."""
    trainers = TARGETS.where('role="trainer"')
    newest = trainers.level("max", Metrics.version_step, *EXPERIMENT)
    behind = TARGETS.where('role!="trainer"').level("min", Metrics.version_step, *ROLE)
    matched = f"{newest.text} - on ({', '.join(EXPERIMENT)}) group_right () {behind.text}"
    stored = TARGETS.level("max", Metrics.durable_version_timestamp_seconds, *EXPERIMENT)
    return Row(
        "Weights",
        (
            Panel(
                "Policy lag",
                "short",
                (
                    Line(TARGETS.quantile(0.5, Metrics.policy_lag, *EXPERIMENT), "{{experiment}} median"),
                    Line(TARGETS.quantile(1, Metrics.policy_lag, *EXPERIMENT), "{{experiment}} at most"),
                    Line(
                        TARGETS.rate(Metrics.policy_lag_exceeded, *EXPERIMENT),
                        "{{experiment}} batches/s above the bound",
                    ),
                ),
            ),
            by("Newest version", "short", TARGETS.level("max", Metrics.version_step, *ROLE), "role"),
            by(
                "Steps behind the trainers", "short", Expression(matched, newest.metrics), "role", "The slowest worker."
            ),
            Panel(
                "Age of the newest durable version",
                "s",
                (
                    Line(age(stored), "{{experiment}}"),
                    Line(TARGETS.level("max", Metrics.checkpoint_period_seconds, *EXPERIMENT), "{{experiment}} period"),
                ),
            ),
            one("Newest durable version", "short", TARGETS.level("max", Metrics.durable_version_step, *EXPERIMENT)),
            one(
                "Checkpoints failed in 10 minutes",
                "short",
                TARGETS.growth(Metrics.checkpoints_failed, "10m", *EXPERIMENT),
            ),
        ),
    )


def time() -> Row:
    """Return the row about work and waits."""
    trainers = TARGETS.where('role="trainer"')
    waiting = f"sum without (reason) (rate({CHOSEN_ROLES.series(Metrics.waiting_seconds)}[$__rate_interval]))"
    busy = Expression(f"avg by ({', '.join(ROLE)}) (1 - {waiting})", (Metrics.waiting_seconds,))
    waits = CHOSEN_ROLES.rate(Metrics.waiting_seconds, *ROLE, "reason", aggregate="avg")
    works = CHOSEN_ROLES.rate(Metrics.working_seconds, *ROLE, "stage", aggregate="avg")
    learning = trainers.share_of_time(Metrics.step_seconds, *EXPERIMENT)
    batches = trainers.where('reason="batch"').rate(Metrics.waiting_seconds, *EXPERIMENT, aggregate="avg")
    credit = TARGETS.where('reason="credit"').rate(Metrics.waiting_seconds, *ROLE, "pod", aggregate="avg")
    return Row(
        "Where time goes",
        (
            by(
                "Busy",
                "percentunit",
                busy,
                "role",
                "Share of the time in which workers do not wait, on average.",
            ),
            Panel(
                "Waiting",
                "percentunit",
                (Line(waits, "{{experiment}} {{role}} for {{reason}}"),),
                "Share of the time, on average over the role's workers.",
            ),
            Panel(
                "Working",
                "percentunit",
                (Line(works, "{{experiment}} {{role}} on {{stage}}"),),
                "Share of the time, on average over the role's workers. Busy minus these stages is other work.",
            ),
            by("Waiting for credit", "percentunit", credit, "pod", "Training limits actors that wait long."),
            Panel(
                "Training thread",
                "percentunit",
                (
                    Line(learning, "{{experiment}} step"),
                    Line(batches, "{{experiment}} waits for a batch"),
                    Line(
                        rest_of_one(learning, batches),
                        "{{experiment}} the rest: publishing, checkpoints, agreement of ranks",
                    ),
                ),
                "Share of the time, on average over the ranks.",
            ),
            Panel(
                "Duration of a training step",
                "s",
                (
                    Line(TARGETS.mean(Metrics.step_seconds, *EXPERIMENT), "{{experiment}} mean"),
                    Line(TARGETS.quantile(0.99, Metrics.step_seconds, *EXPERIMENT), "{{experiment}} 99 %"),
                ),
            ),
            Panel(
                "Compiled training step",
                "short",
                (Line(TARGETS.level("min", Metrics.compiled, *EXPERIMENT), "{{experiment}}"),),
                "If it stays 0, the trainers' logs have the reason (`not_compiled`).",
            ),
        ),
    )


def samples() -> Row:
    """Return the row about the ledger."""
    terms = (*EXPERIMENT, "term")
    gone = TARGETS.where('term=~"(dropped|lost)[.].+"').level("sum", LEDGER_TRANSITIONS, *terms)
    settled = TARGETS.where('term=~"trained|in_buffer|(dropped|lost)[.].+"').level(
        "sum", LEDGER_TRANSITIONS, *EXPERIMENT
    )
    held = TARGETS.where('term="in_buffer"').level("sum", LEDGER_TRANSITIONS, *ROLE)
    return Row(
        "Samples",
        (
            by("Transitions waiting in buffers", "short", held, "role"),
            by("Slots posted a second", "short", TARGETS.rate(Metrics.rollouts, *ROLE), "role"),
            by("Ledger", "short", TARGETS.level("sum", LEDGER_TRANSITIONS, *terms), "term"),
            by("Dropped and lost", "short", gone, "term"),
            one(
                "Ledger: produced and not settled",
                "short",
                ledger("produced|outlived|outlived[.]buffer") - settled,
                "Transitions between two processes. The value must not grow; it jumps while a pod is replaced.",
            ),
        ),
    )


def inference() -> Row:
    """Return the row about policy workers and evaluators; its panels are empty if an experiment has neither."""
    stage = (*EXPERIMENT, "stage")
    queueing = TARGETS.where('stage="queueing"')
    return Row(
        "Inference and evaluation",
        (
            one("Inference requests a second", "short", TARGETS.rate(Metrics.inference_requests, *EXPERIMENT)),
            Panel(
                "Environments evaluated together",
                "short",
                (
                    Line(TARGETS.mean(Metrics.inference_batch_environments, *EXPERIMENT), "{{experiment}} mean"),
                    Line(
                        TARGETS.quantile(0.99, Metrics.inference_batch_environments, *EXPERIMENT), "{{experiment}} 99 %"
                    ),
                ),
            ),
            by("Time of an inference batch", "s", TARGETS.mean(Metrics.inference_seconds, *stage), "stage"),
            one(
                "Wait of requests in the queue (99 %)",
                "s",
                queueing.quantile(0.99, Metrics.inference_seconds, *EXPERIMENT),
            ),
            by(
                "Evaluations in 10 minutes",
                "short",
                TARGETS.growth(Metrics.evaluations, "10m", *EXPERIMENT, "outcome"),
                "outcome",
            ),
            one("Duration of an evaluation", "s", TARGETS.mean(Metrics.evaluation_seconds, *EXPERIMENT)),
            by(
                "Videos in 10 minutes",
                "short",
                TARGETS.growth(Metrics.videos, "10m", *EXPERIMENT, "outcome"),
                "outcome",
            ),
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
                    Line(TARGETS.level("max", Metrics.workers, *role), "{{experiment}} {{worker_role}}"),
                    Line(TARGETS.level("max", Metrics.workers_wanted, *role), "{{experiment}} {{worker_role}} wanted"),
                ),
            ),
            by("Oldest heartbeat", "s", TARGETS.level("max", Metrics.heartbeat_age_seconds, *role), "worker_role"),
            one(
                "Time without a step",
                "s",
                TARGETS.level("max", Metrics.stalled_seconds, *EXPERIMENT),
                "Since the last step, once the run stands still; 0 before.",
            ),
            one(
                "Paused",
                "short",
                TARGETS.level("max", Metrics.paused, *EXPERIMENT),
                "1 while workers without which no step is taken are paused.",
            ),
            one(
                "Environments that wait for their server",
                "short",
                TARGETS.level("max", Metrics.environment_server_waits, *EXPERIMENT),
                "The server of environment.http is away.",
            ),
            by("Workers joined in 10 minutes", "short", TARGETS.growth(Metrics.joins, "10m", *role), "worker_role"),
            one(
                "Attempt of the trainers",
                "short",
                TARGETS.level("max", Metrics.version_attempt, *EXPERIMENT),
                "Rises by one with each restart of the trainers.",
            ),
            Panel(
                "Refused and failed in 10 minutes",
                "short",
                tuple(
                    Line(TARGETS.growth(metric, "10m", *EXPERIMENT, *labels).or_else(zero(PRESENT)), legend)
                    for metric, labels, legend in (
                        (Metrics.joins_refused, ("worker_role",), "{{experiment}} joins {{worker_role}}"),
                        (Metrics.inference_refused, ("kind",), "{{experiment}} inference {{kind}}"),
                        (Metrics.parameter_calls_refused, ("kind",), "{{experiment}} weights {{kind}}"),
                        (Metrics.strangers_refused, ("role", "kind"), "{{experiment}} {{role}} strangers {{kind}}"),
                        (Metrics.tracking_failures, ("tracker",), "{{experiment}} tracking {{tracker}}"),
                        (Metrics.worker_metrics_lost, ("tracker",), "{{experiment}} worker metrics {{tracker}}"),
                    )
                ),
            ),
        ),
    )


def resources() -> Row:
    """Return the row about the resources of the selected roles."""
    cores = CHOSEN_ROLES.rate(PROCESS["process_cpu_seconds_total"], *ROLE)
    memory = CHOSEN_ROLES.level("sum", PROCESS["process_resident_memory_bytes"], *ROLE)
    largest = CHOSEN_ROLES.level("max", PROCESS["process_resident_memory_bytes"], *ROLE)
    return Row(
        "Resources",
        (
            by("CPU cores", "short", cores, "role"),
            Panel(
                "Resident memory",
                "bytes",
                (Line(memory, "{{experiment}} {{role}}"), Line(largest, "{{experiment}} {{role}} largest process")),
            ),
            by("Open files of those allowed", "percentunit", CHOSEN_ROLES.open_files(*ROLE), "role"),
        ),
    )


def ledger(term: str) -> Expression:
    """Return one term of the ledger, or several joined by ``|``, summed over all pages."""
    return TARGETS.where(f'term=~"{term}"').level("sum", LEDGER_TRANSITIONS, *EXPERIMENT)


def one(title: str, unit: str, expression: Expression, note: str = "") -> Panel:
    """Return a panel with one line for each experiment."""
    return Panel(title, unit, (Line(expression, "{{experiment}}"),), note)


def by(title: str, unit: str, expression: Expression, label: str, note: str = "") -> Panel:
    """Return a panel with one line for each value of a label."""
    return Panel(title, unit, (Line(expression, f"{{{{experiment}}}} {{{{{label}}}}}"),), note)
