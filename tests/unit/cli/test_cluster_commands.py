"""``kubectl rlsrl status``, ``why`` and ``logs`` with a fake kubectl."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlsrl.api.pods import EXPERIMENT_LABEL, ROLE_LABEL
from rlsrl.api.reasons import ENDS
from rlsrl.api.retry import FRESH_ANNOTATION, RETRY_ANNOTATION
from rlsrl.cli import main
from rlsrl.cli.top import WITHOUT_WORKERS
from rlsrl.testing.cluster_objects import UID, condition, experiment, pod, token_secret, warning, workload
from rlsrl.testing.kubectl_standin import KubectlStandIn
from rlsrl.testing.waiting import DEADLINE_SECONDS, until

READY = condition("Ready", "Ready", "every pod is ready")
RUNNING = experiment("Running", READY, attempt=1)
OTHER = experiment("Running", name="pong", uid="another")
TRAINER = pod("cartpole-trainer-0", "trainer", index=0)
ACTOR = pod("cartpole-actor-x", "actor")
COMMANDS = ("status", "why", "logs", "retry")


def called(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(autouse=True)
def without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no run of this machine has the experiment's name: after `make run` the clone has one."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelt_experiment_is_named_with_the_nearest(cluster: KubectlStandIn, command: str) -> None:
    cluster.show(RUNNING, OTHER)
    result = called(command, "cartpol", "-n", "research")
    assert result.exit_code == 2
    assert result.output == "Error: experiment cartpol does not exist in this namespace (did you mean 'cartpole'?)\n"
    assert cluster.calls[0].startswith("--namespace research get rlexperiments.rlsrl.dev cartpol ")


def test_experiments_are_listed_if_no_name_is_similar(cluster: KubectlStandIn) -> None:
    cluster.show(RUNNING, OTHER)
    assert "in this namespace; experiments here: cartpole, pong\n" in called("status", "x").output
    cluster.show()
    assert "in this namespace; experiments here: none\n" in called("status", "x").output


REFUSED = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
NO_KIND = 'error: the server doesn\'t have a resource type "rlexperiments"'
FORBIDDEN = 'Error from server (Forbidden): rlexperiments.rlsrl.dev is forbidden: User "me" cannot get it'


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            f"E1121 09:27:35.020298 11662 memcache.go:265] Unhandled Error\n{REFUSED}\n",
            f"{REFUSED} (the cluster does not answer: `kubectl config get-contexts` lists your contexts)",
        ),
        (NO_KIND, f"{NO_KIND} (rlsrl is not installed on this cluster: run `helm install rlsrl charts/`)"),
        (FORBIDDEN, f"{FORBIDDEN} (ask the administrator of the namespace for permission)"),
        ("", "it failed without a message"),
    ],
)
def test_kubectl_errors_are_one_line_with_the_cure(cluster: KubectlStandIn, command: str, said: str, told: str) -> None:
    cluster.refuse(said)
    result = called(command, "cartpole")
    assert result.exit_code == 2
    assert result.output == f"Error: kubectl get rlexperiments.rlsrl.dev: {told}\n"


def test_a_missing_kubectl_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert called("status", "cartpole").output.startswith("Error: kubectl is not on the PATH")


def test_status_counts_only_the_pods_of_this_experiment(cluster: KubectlStandIn) -> None:
    before = workload("actor", ready=9, replicas=9)
    before["metadata"]["labels"]["rlsrl.dev/uid"] = "of an earlier one"
    cluster.show(RUNNING, workload("actor", ready=1, replicas=2), before)
    result = called("status", "cartpole")
    assert result.exit_code == 0, result.output
    assert "experiment  research/cartpole" in result.output
    assert "ROLE   READY\nactor  1/2\n" in result.output
    assert f"rlsrl.dev/uid={UID}" in cluster.calls[-1]


def test_watching_shows_what_changes_and_ends_with_the_experiment(cluster: KubectlStandIn) -> None:
    cluster.show(RUNNING)
    with started("status", "cartpole", "--watch") as watching:
        assert watching.stdout is not None
        until_said(watching, "phase")
        cluster.show(experiment("Succeeded", condition("Finished", "Succeeded", "stop.envSteps holds"), attempt=1))
        told, _ = watching.communicate(timeout=DEADLINE_SECONDS)
    assert "result      stop.envSteps holds" in told
    assert watching.returncode == 0


@pytest.mark.parametrize("arguments", [("status", "cartpole", "--watch"), ("logs", "cartpole", "--follow")])
def test_an_interrupt_is_quiet(cluster: KubectlStandIn, arguments: tuple[str, ...]) -> None:
    cluster.show(RUNNING, TRAINER)
    cluster.log("cartpole-trainer-0", "a line")
    with started(*arguments) as running:
        until_said(running, "cartpole")
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=DEADLINE_SECONDS)
    assert running.returncode == 130
    assert said == ""


KEPT_LOGS = "kubectl rlsrl logs cartpole --kept"
FAILED = experiment("Failed", condition("Finished", "BudgetExhausted", "11 failures"), attempt=3)


@pytest.mark.parametrize(
    ("options", "asked", "start"),
    [
        ([], RETRY_ANNOTATION, "the newest intact version, or from step 0 if there is none"),
        (["--fresh"], FRESH_ANNOTATION, "step 0"),
    ],
)
def test_retry_asks_the_operator(cluster: KubectlStandIn, options: list[str], asked: str, start: str) -> None:
    cluster.show(FAILED)
    for first in ([], ["--fresh"]):
        called("retry", "cartpole", *first)
    result = called("retry", "cartpole", *options)
    assert result.exit_code == 0, result.output
    assert cluster.annotations("RLExperiment", "cartpole") == {asked: "3"}, "the last request alone counts"
    first_line, *rest = result.output.splitlines()
    assert first_line == f"attempt 4 of cartpole begins once the pods of attempt 3 are gone, from {start}"
    kept = ["nothing is deleted: all earlier versions stay on volume cartpole-data"] if options else []
    assert rest == [*kept, "see: kubectl rlsrl status cartpole"]


@pytest.mark.parametrize("phase", ["Running", "Succeeded", None])
def test_only_a_failed_experiment_is_tried_again(cluster: KubectlStandIn, phase: str | None) -> None:
    cluster.show(experiment(phase, READY, attempt=1))
    result = called("retry", "cartpole")
    assert result.exit_code == 2
    assert "only a failed experiment can be tried again" in result.output
    assert cluster.annotations("RLExperiment", "cartpole") == {}


def test_a_suspended_experiment_is_not_tried_again(cluster: KubectlStandIn) -> None:
    cluster.show({**FAILED, "spec": {**FAILED["spec"], "suspend": True}})
    result = called("retry", "cartpole")
    assert result.exit_code == 2
    assert "set spec.suspend to false" in result.output


def test_status_says_that_an_experiment_is_tried_again(cluster: KubectlStandIn) -> None:
    cluster.show(experiment("Running", condition("Finished", "Retried", "attempt 4 continues attempt 3"), attempt=4))
    output = called("status", "cartpole").output
    assert "retried     attempt 4 continues attempt 3" in output
    assert "result" not in output
    assert called("why", "cartpole").exit_code == 0


def test_why_and_status_tell_of_a_rollback(cluster: KubectlStandIn) -> None:
    lost = "attempt 2 resumed from version 1.1, since version 1.2 cannot be used (it is cut): training steps lost: 1"
    cluster.show(experiment("Running", READY, condition("RolledBack", "OlderVersion", lost), attempt=2), TRAINER)
    result = called("why", "cartpole")
    assert (result.exit_code, result.output.splitlines()[1:]) == (0, [lost])
    assert lost in called("status", "cartpole").output


def test_why_and_status_tell_what_a_restart_cost(cluster: KubectlStandIn) -> None:
    over = "attempt 1 is over: cartpole-trainer-0 was replaced"
    cost = f"attempt 2 resumed from version 1.1200; training steps lost after it: at least 31; {over}"
    cluster.show(experiment("Running", READY, condition("Resumed", "NextAttempt", cost), attempt=2), TRAINER)
    result = called("why", "cartpole")
    assert (result.exit_code, result.output.splitlines()[1:]) == (0, [cost])
    assert cost in called("status", "cartpole").output
    restarting = condition("Resumed", "Restarting", over)
    cluster.show(experiment("Running", READY, restarting, attempt=2), TRAINER)
    assert over not in called("why", "cartpole").output, "GangComplete says so meanwhile"


def test_why_and_status_tell_of_environments_that_raise(cluster: KubectlStandIn) -> None:
    errors = (
        "3 errors of environments since their actors started; each environment was made again, and training goes on; "
        "the last of actor-0: environment rank 3 raised OSError"
    )
    cluster.show(experiment("Running", READY, condition("EnvironmentErrors", "MadeAgain", errors), attempt=1), TRAINER)
    result = called("why", "cartpole")
    assert result.exit_code == 0, "training goes on"
    assert result.output == f"cartpole has no problems: Running: The trainers train.\n{errors}\n"
    assert errors in called("status", "cartpole").output


def test_why_and_status_tell_of_values_that_are_not_finite(cluster: KubectlStandIn) -> None:
    values = (
        "NaN or infinity in 7 steps or resets of environments since their actors started; none of them is trained, and "
        "training goes on; the last of actor-0: environment rank 3: reward is nan at step 50 of its episode"
    )
    cluster.show(experiment("Running", READY, condition("NonFiniteValues", "Dropped", values), attempt=1), TRAINER)
    result = called("why", "cartpole")
    assert result.exit_code == 0, "training goes on"
    assert result.output == f"cartpole has no problems: Running: The trainers train.\n{values}\n"
    assert values in called("status", "cartpole").output


def test_why_and_status_tell_of_a_server_of_environments_that_is_away(cluster: KubectlStandIn) -> None:
    text = (
        "8 environments have waited since 2026-01-01T12:00:00Z: the environment server http://simulators.games:8765 is "
        "away: connection refused (actor-0)"
    )
    away = condition("EnvironmentServerAway", "ServerAway", text)
    cluster.show(experiment("Running", READY, away, attempt=1), TRAINER)
    result = called("why", "cartpole")
    assert result.exit_code == 1
    assert text in result.output
    assert "Look at the server." in result.output
    assert text in called("status", "cartpole").output
    back = condition("EnvironmentServerAway", "NoneWaits", "no environment waits for its server")
    cluster.show(experiment("Running", READY, back, attempt=1), TRAINER)
    assert called("why", "cartpole").exit_code == 0
    assert text not in called("status", "cartpole").output


def claim(name: str, **labels: str) -> dict[str, Any]:
    return {
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "labels": labels, "creationTimestamp": "2026-01-01T12:00:00Z"},
        "spec": {"resources": {"requests": {"storage": "10Gi"}}},
    }


def test_volumes_lists_the_claims_that_no_experiment_uses(cluster: KubectlStandIn) -> None:
    moved = {**OTHER, "spec": {"parameters": {"store": {"objectStore": {"url": "s3://weights"}}}}}
    left = claim("walker-data", **{EXPERIMENT_LABEL: "walker"})
    left["status"] = {"capacity": {"storage": "12Gi"}}
    cluster.show(
        RUNNING,
        moved,
        claim("cartpole-data", **{EXPERIMENT_LABEL: "cartpole"}),
        claim("somebody-elses"),
        left,
        claim("pong-data", **{EXPERIMENT_LABEL: "pong"}),
        claim("state-pong-buffer-0", **{EXPERIMENT_LABEL: "pong", ROLE_LABEL: "buffer"}),
        claim("state-walker-buffer-0", **{EXPERIMENT_LABEL: "walker", ROLE_LABEL: "buffer"}),
    )
    result = called("volumes", "-n", "research")
    assert result.exit_code == 0, result.output
    header, *rows, how = result.output.splitlines()
    assert header.split() == ["CLAIM", "SIZE", "AGE", "EXPERIMENT"]
    parts = [row.split() for row in rows]
    assert [(name, size, of) for name, size, _, of in parts] == [
        ("pong-data", "10Gi", "pong"),
        ("state-walker-buffer-0", "10Gi", "walker"),
        ("walker-data", "12Gi", "walker"),
    ]
    assert all(re.fullmatch(r"\d+d(\d+h)?", age) for _, _, age, _ in parts)
    assert how.endswith("kubectl delete pvc CLAIM --namespace research")


def test_without_unused_claims_volumes_says_so(cluster: KubectlStandIn) -> None:
    cluster.show(RUNNING, claim("cartpole-data", **{EXPERIMENT_LABEL: "cartpole"}))
    result = called("volumes")
    assert (result.exit_code, result.output) == (0, "no volume claim is unused\n")


def test_top_without_permission_to_read_secrets_shows_the_status(cluster: KubectlStandIn) -> None:
    """As with Kubernetes' role ``view``."""
    numbers = {"envSteps": 4096, "trainSteps": 16, "envStepsPerSecond": 1200}
    cluster.show(experiment("Running", READY, attempt=1, training=numbers), workload("actor", ready=1, replicas=2))
    cluster.forbid("secrets")
    result = called("top", "cartpole", "-n", "research")
    assert result.exit_code == 0, result.output
    assert "4,096 env steps, 16 train steps, 1,200 env steps/s" in result.output
    assert "actor  1/2" in result.output
    assert result.output.endswith(f"\n\n{WITHOUT_WORKERS}\n")


@pytest.mark.parametrize(
    ("phase", "reported", "shown"),
    [("Failed", "recovering", "failed"), ("Running", "recovering", "recovering"), ("Failed", "training", "training")],
)
def test_top_says_that_an_experiment_has_failed_unless_it_trains_again(
    cluster: KubectlStandIn, monkeypatch: pytest.MonkeyPatch, phase: str, reported: str, shown: str
) -> None:
    cluster.show(experiment(phase, attempt=1))
    document = {"experiment": "cartpole", "phase": reported, "totals": {}, "roles": {}}
    monkeypatch.setattr("rlsrl.cli.top.coordinator_status", lambda kubectl, experiment: document)
    assert called("top", "cartpole", "-n", "research").output.startswith(f"cartpole: {shown}, ")


def test_why_exits_with_0_without_problems(cluster: KubectlStandIn) -> None:
    cluster.show(RUNNING, TRAINER)
    result = called("why", "cartpole")
    assert (result.exit_code, result.output) == (0, "cartpole has no problems: Running: The trainers train.\n")


def test_why_says_that_an_experiment_is_paused(cluster: KubectlStandIn) -> None:
    paused = condition("Progressing", "Paused", "all workers are paused")
    cluster.show(experiment("Running", READY, paused, attempt=1), TRAINER)
    result = called("why", "cartpole")
    assert result.exit_code == 0
    assert result.output.startswith("cartpole has no problems: Paused: all workers are paused. `kubectl rlsrl control ")
    assert result.output.endswith("cartpole resume` lets them go on.\n")


def test_why_reports_the_end_of_an_experiment(cluster: KubectlStandIn) -> None:
    cluster.show(experiment("Succeeded", condition("Finished", "Succeeded", "stop.envSteps holds"), attempt=1))
    result = called("why", "cartpole")
    assert result.exit_code == 0
    assert result.output.startswith("cartpole has no problems: Succeeded: The experiment has finished with a result")
    assert result.output.endswith("params export cartpole -o weights.safetensors`, then delete the experiment.\n")


@pytest.mark.parametrize(
    ("phase", "about", "reason", "message"),
    [
        ("Running", "Durable", "NotStored", "the last 2 scheduled versions could not be stored: 1.9: No space left"),
        ("Running", "Durable", "StoredLate", "the store is slow: version 1.9 was due 95 s ago and is not stored yet"),
        (
            "Running",
            "Durable",
            "EvaluationsFailed",
            "the newest 2 evaluations failed, the last of evaluator-0: 1.9: [Errno 28] No space left on device",
        ),
        ("Failed", "Finished", "NotStored", "a-trainer-1: the last version, 1.9, could not be stored for 300 s"),
        ("Failed", "Finished", "EnvironmentFault", "a-actor-3: environment rank 7: reward is nan"),
        ("Failed", "Finished", "BudgetExhausted", "3 failures exceed restarts.budget 2; the last: a-trainer-1 ended"),
        ("Pending", "Accepted", "ObjectRefused", "Service a-coordinator: exceeded quota"),
        ("Pending", "Accepted", "NameConflict", "Service a-coordinator exists and does not belong to this experiment"),
        ("Starting", "GangComplete", "Restarting", "attempt 1 is over: a-trainer-1 was deleted"),
        ("Starting", "GangComplete", "Restarting", "attempt 5 is over: a-trainer-1 was disrupted: Evicted"),
        (
            "Running",
            "Progressing",
            "Stalled",
            "no environment step and no training step for 61 s: trainer-0 has not answered for 61 s",
        ),
        (
            "Starting",
            "Progressing",
            "Stalled",
            "no environment step and no training step for 61 s: environment rank 3 has been in make for 61 s (actor-0)",
        ),
    ],
)
def test_why_begins_with_the_condition_that_is_in_trouble(
    cluster: KubectlStandIn, phase: str, about: str, reason: str, message: str
) -> None:
    cluster.show(experiment(phase, READY, condition(about, reason, message), attempt=1), TRAINER)
    result = called("why", "cartpole")
    assert result.exit_code == 1
    first, second, meaning, cure, *_ = result.output.splitlines()
    assert first.startswith(f"{about}: {reason}, for ")
    assert second == f"  {message}"
    assert meaning.startswith("  meaning: ")
    assert cure.startswith("  cure: ")


def test_why_reports_problems_with_cures_and_exits_with_1(cluster: KubectlStandIn) -> None:
    ended = {"reason": "Error", "exitCode": 1, "message": "ValueError: no such thing"}
    waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
    crashing = pod("cartpole-actor-x", "actor", state=waiting, lastState={"terminated": ended}, restartCount=4)
    blamed = condition("Ready", "CrashLoopBackOff", "actor 0/1 ready: cartpole-actor-x: ValueError: no such thing")
    cluster.show(experiment("Running", blamed, attempt=1), crashing, warning(crashing, "BackOff", "restarting it"))
    result = called("why", "cartpole")
    assert result.exit_code == 1
    condition_line, *rest = result.output.splitlines()
    assert condition_line.startswith("Ready: CrashLoopBackOff, for ")
    assert rest[:3] == [
        "  actor 0/1 ready: cartpole-actor-x: ValueError: no such thing",
        "  meaning: The worker ends repeatedly. The message has the last line of its log.",
        "  cure: Read its log before the last restart: `kubectl logs POD --previous`.",
    ]
    assert rest[3].startswith("pod cartpole-actor-x (actor): CrashLoopBackOff, for ")
    assert rest[4:] == [
        "  worker terminated: Error, exit code 1",
        "  last output:",
        "    ValueError: no such thing",
        "  event: BackOff at 2026-01-01T12:02:00Z: restarting it",
        f"  meaning: {ENDS['Error'].meaning}",
        "  cure: Read its log: `kubectl rlsrl logs cartpole --previous`.",
    ]


def test_control_characters_in_the_last_output_are_replaced(cluster: KubectlStandIn) -> None:
    ended = {"reason": "Error", "exitCode": 1, "message": "a\tb\x1b[2J\x07 end"}
    crashing = pod("cartpole-actor-x", "actor", state={"terminated": ended})
    cluster.show(experiment("Running", condition("Ready", "Waiting", "\x1b]0;title\x07"), attempt=1), crashing)
    for command in ("why", "status"):
        output = called(command, "cartpole").output
        assert "\x1b" not in output
        assert "\x07" not in output
    assert "    a   b\ufffd[2J\ufffd end\n" in called("why", "cartpole").output


def test_of_many_equal_problems_the_first_are_shown_and_the_rest_counted(cluster: KubectlStandIn) -> None:
    waiting = {"waiting": {"reason": "ErrImagePull"}}
    cluster.show(RUNNING, *(pod(f"cartpole-actor-{number}", "actor", state=waiting) for number in range(20)))
    output = called("why", "cartpole").output
    assert output.count("pod cartpole-actor-") == 8
    assert output.endswith("and 12 more\n")


def test_logs_have_their_pod_before_each_line(cluster: KubectlStandIn, capfd: pytest.CaptureFixture[str]) -> None:
    unborn = pod("cartpole-actor-y", "actor", state={"waiting": {"reason": "ContainerCreating"}})
    cluster.show(RUNNING, TRAINER, ACTOR, unborn)
    cluster.log("cartpole-trainer-0", "one\ntwo")
    cluster.log("cartpole-actor-x", "three")
    assert called("logs", "cartpole", "--tail", "7").exit_code == 0
    assert capfd.readouterr().out.splitlines() == [
        "[pod/cartpole-actor-x/worker] three",
        "[pod/cartpole-trainer-0/worker] one",
        "[pod/cartpole-trainer-0/worker] two",
    ]
    assert "--container worker --prefix --tail 7" in cluster.calls[-1]


def test_logs_of_one_role_of_one_rank_and_before_the_last_restart(
    cluster: KubectlStandIn, capfd: pytest.CaptureFixture[str]
) -> None:
    again = pod("cartpole-trainer-1", "trainer", index=1, ready=True, restartCount=1)
    cluster.show(RUNNING, TRAINER, again, ACTOR)
    for name in ("cartpole-trainer-0", "cartpole-trainer-1", "cartpole-actor-x"):
        cluster.log(name, "now")
    cluster.log("cartpole-trainer-1", "before", previous=True)

    def lines(*arguments: str) -> list[str]:
        assert called("logs", "cartpole", *arguments).exit_code == 0
        return capfd.readouterr().out.splitlines()

    assert len(lines("--role", "trainer")) == 2
    assert lines("--role", "trainer", "--index", "1") == ["[pod/cartpole-trainer-1/worker] now"]
    assert lines("--previous") == ["[pod/cartpole-trainer-1/worker] before"]


def test_a_pod_with_several_gpus_holds_as_many_ranks(
    cluster: KubectlStandIn, capfd: pytest.CaptureFixture[str]
) -> None:
    document = experiment("Running")
    document["spec"]["trainers"] = {"replicas": 8, "gpusPerPod": 4}
    cluster.show(document, TRAINER, pod("cartpole-trainer-1", "trainer", index=1))
    cluster.log("cartpole-trainer-1", "of four ranks")
    assert called("logs", "cartpole", "--role", "trainer", "--index", "6").exit_code == 0
    assert capfd.readouterr().out == "[pod/cartpole-trainer-1/worker] of four ranks\n"


@pytest.mark.parametrize("options", [(), ("--follow",)])
def test_unreadable_logs_are_reported(cluster: KubectlStandIn, options: tuple[str, ...]) -> None:
    cluster.show(RUNNING, TRAINER)
    result = called("logs", "cartpole", *options)
    assert result.exit_code == 2
    assert result.output.startswith("Error: kubectl logs cartpole-trainer-0: Error from server (BadRequest): container")


def test_following_continues_with_readable_logs(cluster: KubectlStandIn, capfd: pytest.CaptureFixture[str]) -> None:
    cluster.show(RUNNING, TRAINER, ACTOR)
    cluster.log("cartpole-actor-x", "a line", ended=True)
    result = called("logs", "cartpole", "--follow")
    assert result.exit_code == 0
    assert result.stderr.startswith("kubectl logs cartpole-trainer-0: ")
    assert capfd.readouterr().out == "[pod/cartpole-actor-x/worker] a line\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--role", "trainr"), "--role trainr: cartpole has pods of actor, trainer (did you mean 'trainer'?)"),
        (("--index", "0"), "--index needs --role: indices count within a role"),
        (("--role", "trainer", "--index", "3"), "--index 3: role trainer has the indices 0"),
        (("-f", "--previous"), "--follow and --previous exclude each other: a terminated worker writes nothing"),
        (
            ("--kept", "--previous"),
            "--kept excludes --follow and --previous: it prints the lines of all restarts until now",
        ),
        (
            ("--kept", "--role", "actr"),
            "--role actr: the roles are coordinator, trainer, buffer, policy, actor, evaluator (did you mean 'actor'?)",
        ),
        (
            ("--previous",),
            "no worker has restarted in cartpole-actor-x, cartpole-trainer-0; for replaced pods: " + KEPT_LOGS,
        ),
    ],
)
def test_missing_logs_are_reported(cluster: KubectlStandIn, arguments: tuple[str, ...], told: str) -> None:
    cluster.show(RUNNING, TRAINER, ACTOR)
    result = called("logs", "cartpole", *arguments)
    assert (result.exit_code, result.output) == (2, f"Error: {told}\n")


@pytest.mark.parametrize("phase", ["Suspended", "Succeeded", "Failed"])
def test_without_pods_the_kept_logs_are_read_unless_those_of_pods_are_asked_for(
    cluster: KubectlStandIn, phase: str
) -> None:
    cluster.show(experiment(phase), token_secret("a token"))
    kept = called("logs", "cartpole")
    assert kept.exit_code == 2
    assert kept.output.startswith("Error: no pod serves cartpole: it")
    for option in ("--follow", "--previous"):
        asked = called("logs", "cartpole", option)
        assert asked.output == "Error: cartpole has no pods; see: kubectl rlsrl why cartpole\n"


PROGRAM = """
import signal
from rlsrl.cli import main
from rlsrl.cli.top import WITHOUT_WORKERS
# Whoever runs the tests in the background lets them ignore it, which a process inherits.
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""


def started(*arguments: str) -> subprocess.Popen[str]:
    """Start the command as the leader of its own process group, as a shell does."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def until_said(process: subprocess.Popen[str], word: str) -> None:
    """Wait until a line has the word."""
    assert process.stdout is not None
    stdout = process.stdout
    until(lambda: word in stdout.readline(), f"{word} in the output")
