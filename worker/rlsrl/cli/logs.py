"""``kubectl rlsrl logs``: print the logs of an experiment's pods, or those that its run keeps."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import click

from rlsrl.api.pods import CONTAINER, ROLE_LABEL, restarts
from rlsrl.api.role_names import TRAINER
from rlsrl.api.status import TERMINAL
from rlsrl.cli.errors import UserError
from rlsrl.cli.kubectl import Kubectl, Object, complaint, own_labels
from rlsrl.cli.live import quiet_interrupt
from rlsrl.cli.text import printable
from rlsrl.runtime.errors import did_you_mean

INDEX_LABEL = "apps.kubernetes.io/pod-index"
NAMED = 3
"""Pods named in a message."""


@click.command()
@click.argument("name")
@click.option("-n", "--namespace", metavar="NAME", help="By default the namespace of kubectl's context.")
@click.option("--role", metavar="ROLE", help="Only workers of this role: trainer, actor and so on.")
@click.option("--index", metavar="N", type=click.IntRange(min=0), help="Only the worker with this index; needs --role.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines.")
@click.option("--previous", is_flag=True, help="The logs before each worker's last restart.")
@click.option(
    "--kept",
    is_flag=True,
    help="The last megabyte of each worker, which the run keeps over restarts and lost pods. "
    "The default once the experiment has ended, or is suspended. On a volume they cannot be read during a suspension.",
)
@click.option(
    "--tail",
    metavar="N",
    type=click.IntRange(min=-1),
    default=100,
    show_default=True,
    help="Last lines of each pod or worker; -1: all lines.",
)
def logs(
    name: str,
    namespace: str | None,
    role: str | None,
    index: int | None,
    follow: bool,
    previous: bool,
    kept: bool,
    tail: int,
) -> None:
    """Print the logs of the experiment NAME on the cluster, each line after the name of its pod or worker."""
    if index is not None and role is None:
        raise UserError("--index needs --role: indices count within a role")
    if follow and previous:
        raise UserError("--follow and --previous exclude each other: a terminated worker writes nothing")
    if kept and (follow or previous):
        raise UserError("--kept excludes --follow and --previous: it prints the lines of all restarts until now")
    kubectl = Kubectl(namespace)
    with quiet_interrupt():
        experiment = kubectl.experiment(name)
        has_ended = experiment.get("status", {}).get("phase") in (*TERMINAL, "Suspended")
        if kept or (has_ended and not (follow or previous)):
            _print_kept(kubectl, experiment, role, index, None if tail < 0 else tail)
            return
        pods = kubectl.objects("pods", own_labels(experiment))
        chosen = _of_role(pods, role, name)
        if role is not None and index is not None:
            chosen = [_with_index(kubectl, experiment, chosen, role, index)]
        readable = [pod for pod in chosen if (restarts(pod) if previous else _has_begun(pod))]
        if not readable:
            if previous:
                kept_lines = f"for replaced pods: kubectl rlsrl logs {name} --kept"
                raise UserError(f"no worker has restarted in {_names(chosen)}; {kept_lines}")
            raise UserError(f"no worker has started in {_names(chosen)}; see: kubectl rlsrl why {name}")
        options = ["--container", CONTAINER, "--prefix", "--tail", str(tail), *(["--previous"] if previous else [])]
        if follow:
            _follow(kubectl, readable, options)
        else:
            for pod in readable:
                _print(kubectl, "logs", pod["metadata"]["name"], *options)


def _print_kept(kubectl: Kubectl, experiment: Object, role: str | None, index: int | None, tail: int | None) -> None:
    from rlsrl.api.roles import ROLES
    from rlsrl.cli.on_cluster import kept_logs

    roles = [each.name for each in ROLES]
    if role is not None and role not in roles:
        raise UserError(f"--role {role}: the roles are {', '.join(roles)}{did_you_mean(role, roles)}")
    found = kept_logs(kubectl, experiment, role=role, index=index, tail=tail)
    if not found:
        worker = f" of {role}" if role is not None else ""
        worker += f" {index}" if index is not None else ""
        raise UserError(f"{experiment['metadata']['name']} keeps no log{worker}")
    for log in found:
        for line in printable(log.text.decode(errors="replace")).split("\n") if log.text else ():
            click.echo(f"[{log.role}-{log.index}] {line}")


def _names(pods: Sequence[Object]) -> str:
    names = [pod["metadata"]["name"] for pod in pods]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def _of_role(pods: Sequence[Object], role: str | None, name: str) -> list[Object]:
    by_role: dict[str, list[Object]] = {}
    for pod in sorted(pods, key=lambda pod: (pod["metadata"]["labels"].get(ROLE_LABEL, ""), pod["metadata"]["name"])):
        by_role.setdefault(pod["metadata"]["labels"].get(ROLE_LABEL, ""), []).append(pod)
    if not by_role:
        raise UserError(f"{name} has no pods; see: kubectl rlsrl why {name}")
    if role is None:
        return [pod for found in by_role.values() for pod in found]
    if role not in by_role:
        raise UserError(f"--role {role}: {name} has pods of {', '.join(by_role)}{did_you_mean(role, by_role)}")
    return by_role[role]


def _with_index(kubectl: Kubectl, experiment: Object, pods: Sequence[Object], role: str, index: int) -> Object:
    """Return the pod of a role's worker: by label in a StatefulSet, by the coordinator's leases in a Deployment."""
    if all(INDEX_LABEL in pod["metadata"]["labels"] for pod in pods):
        by_pod = {int(pod["metadata"]["labels"][INDEX_LABEL]): pod for pod in pods}
        hosts = {rank: pod for number, pod in by_pod.items() for rank in _ranks_of(experiment, role, number)}
    else:
        by_name = {pod["metadata"]["name"]: pod for pod in pods}
        hosts = {place: by_name[host] for place, host in _leases(kubectl, experiment, role) if host in by_name}
    if index not in hosts:
        raise UserError(f"--index {index}: role {role} has the indices {', '.join(map(str, sorted(hosts))) or 'none'}")
    return hosts[index]


def _ranks_of(experiment: Object, role: str, pod: int) -> range:
    """Return the indices of a pod's workers: a trainer pod has a rank for each GPU."""
    ranks = experiment["spec"].get("trainers", {}).get("gpusPerPod") if role == TRAINER else None
    return range(pod * (ranks or 1), (pod + 1) * (ranks or 1))


def _leases(kubectl: Kubectl, experiment: Object, role: str) -> list[tuple[int, str]]:
    """Return the role's indices, each with the host of its worker."""
    from rlsrl.cli.on_cluster import coordinator_status

    workers = coordinator_status(kubectl, experiment).get("roles", {}).get(role, [])
    return [(int(worker["index"]), str(worker["host"])) for worker in workers]


def _has_begun(pod: Object) -> bool:
    """Return whether the pod has a log."""
    states = [each.get("state", {}) for each in pod.get("status", {}).get("containerStatuses", ())]
    return bool(restarts(pod)) or any("running" in state or "terminated" in state for state in states)


def _follow(kubectl: Kubectl, pods: Sequence[Object], options: Sequence[str]) -> None:
    """Run one kubectl for each pod until all have ended. A failed one does not end the others.

    Raises:
        UserError: all failed.
    """
    running = [
        subprocess.Popen(
            kubectl.command("logs", pod["metadata"]["name"], "--follow", *options), stderr=subprocess.PIPE, text=True
        )
        for pod in pods
    ]
    try:
        ends = [(pod["metadata"]["name"], process.communicate()[1]) for pod, process in zip(pods, running, strict=True)]
        failed = [
            f"kubectl logs {name}: {complaint(said)}"
            for (name, said), process in zip(ends, running, strict=True)
            if process.returncode
        ]
        if len(failed) == len(pods):
            raise UserError(failed[0])
        for problem in failed:
            click.echo(problem, err=True)
    finally:
        for process in running:
            process.kill()
            process.wait()


def _print(kubectl: Kubectl, *arguments: str) -> None:
    done = subprocess.run(kubectl.command(*arguments), stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise UserError(f"kubectl {' '.join(arguments[:2])}: {complaint(done.stderr)}")
