"""Access to what an experiment on a cluster keeps: by kubectl's port-forward to its coordinator, or in its bucket."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlsrl.api.load import SpecError, load_text
from rlsrl.api.placement import COORDINATOR_PORT, cluster_placement
from rlsrl.api.pods import ROLE_LABEL, TOKEN_KEY, certified_name
from rlsrl.api.retry import run_uid_of
from rlsrl.api.role_names import COORDINATOR
from rlsrl.api.spec import API_VERSION, KIND, RLExperiment
from rlsrl.api.status import Phase
from rlsrl.cli.errors import UserError
from rlsrl.cli.kubectl import Kubectl, Object, failed_call, own_labels
from rlsrl.cli.status_view import read_status

if TYPE_CHECKING:
    from rlsrl.api.resolved import ParameterStoreConfig
    from rlsrl.parameters.protocols import ParameterDB
    from rlsrl.rpc.tls import Tls
    from rlsrl.runtime.coordination import WorkerLog

ANSWER_SECONDS = 5.0
LOG_SECONDS = 60.0
"""Seconds that all kept logs may take: a megabyte for each worker."""
_UNSERVED: Mapping[Phase, str] = {
    "Suspended": "it is suspended. Its versions and logs are kept: `kubectl patch rlexperiment NAME --type merge "
    """-p '{"spec": {"suspend": false}}'` continues it""",
    "Queued": "its trainers wait in a queue, and its other pods wait for them: see `kubectl rlsrl why NAME`",
    "Succeeded": "its coordinator has no running pod: see `kubectl describe statefulset NAME-coordinator`",
    "Failed": "its coordinator has no running pod: see `kubectl rlsrl why NAME`",
}
"""By phase: why no pod serves an experiment, and what to do. In other phases a coordinator is there or about to be."""
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


class CoordinatorAccess(NamedTuple):
    """What a client needs to call a coordinator from this machine."""

    address: str
    token: str
    tls: Tls | None


@contextlib.contextmanager
def coordinator(kubectl: Kubectl, experiment: Object) -> Iterator[CoordinatorAccess]:
    """Yield access to an experiment's coordinator, valid until its pod is replaced.

    Raises:
        NotPermitted: the user may not read the experiment's token or forward ports.
        UserError: the coordinator cannot be reached; with kubectl's message.
    """
    token = _token(kubectl, experiment)
    if (absence := _absence(kubectl, experiment)) is not None:
        raise UserError(absence)
    with (
        _certificates(kubectl, experiment) as tls,
        _forwarded(kubectl, experiment["metadata"]["name"]) as port,
    ):
        yield CoordinatorAccess(f"127.0.0.1:{port}", token, tls)


def coordinator_status(kubectl: Kubectl, experiment: Object) -> Mapping[str, Any]:
    """Return the status document of an experiment's coordinator.

    Raises:
        UserError: the coordinator cannot be reached, or does not answer.
    """
    from rlsrl.runtime.coordination import CoordinatorClient, CoordinatorUnavailable

    with coordinator(kubectl, experiment) as access, closing(CoordinatorClient(*access)) as client:
        try:
            return client.status(ANSWER_SECONDS)
        except CoordinatorUnavailable as error:
            raise UserError(f"the coordinator of {experiment['metadata']['name']} does not answer: {error}") from error


@contextlib.contextmanager
def cluster_database(name: str, namespace: str | None) -> Iterator[ParameterDB]:
    """Yield the parameter DB of an experiment on the cluster: through its coordinator, or its bucket without one.

    Args:
        name: the experiment.
        namespace: None: the namespace of kubectl's current context.

    Raises:
        UserError: the experiment does not exist or cannot be reached; with kubectl's message.
    """
    from rlsrl.parameters.service import ServiceParameterDB

    kubectl = Kubectl(namespace)
    experiment = kubectl.experiment(name)
    if _has_only_bucket(kubectl, experiment):
        from rlsrl.workers.build.parameters import open_blobs

        yield open_blobs(_bucket_store(kubectl, experiment))
        return
    with coordinator(kubectl, experiment) as access:
        yield ServiceParameterDB(access.address, access.token, tls=access.tls)


def kept_logs(
    kubectl: Kubectl, experiment: Object, *, role: str | None, index: int | None, tail: int | None
) -> list[WorkerLog]:
    """Return the kept logs of an experiment: through its coordinator, or from its bucket without one.

    Args:
        kubectl: for the experiment's namespace.
        experiment: the experiment.
        role: only of this role; None: of every role.
        index: only of this index; None: of every index.
        tail: the last lines of each log; None: all.

    Raises:
        UserError: the logs cannot be reached; with the message of kubectl, the coordinator or the store.
    """
    if _has_only_bucket(kubectl, experiment):
        return _logs_in_bucket(_bucket_store(kubectl, experiment), role=role, index=index, tail=tail)
    from rlsrl.runtime.coordination import CoordinatorClient, CoordinatorUnavailable

    with coordinator(kubectl, experiment) as access, closing(CoordinatorClient(*access)) as client:
        try:
            return client.logs(role, index, tail=tail, timeout=LOG_SECONDS)
        except CoordinatorUnavailable as error:
            raise UserError(f"the coordinator of {experiment['metadata']['name']} does not answer: {error}") from error


def _logs_in_bucket(
    store: ParameterStoreConfig, *, role: str | None, index: int | None, tail: int | None
) -> list[WorkerLog]:
    from rlsrl.workers.build.parameters import open_objects
    from rlsrl.workers.kept_logs import last_lines, read_copies

    assert store.object_store is not None, "the experiment has a bucket"
    try:
        found = list(read_copies(open_objects(store.object_store), role=role, index=index))
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    return [dataclasses.replace(each, text=last_lines(each.text, tail)) for each in found]


def _has_only_bucket(kubectl: Kubectl, experiment: Object) -> bool:
    """Return whether no pod serves what the experiment's bucket has."""
    return _bucket(experiment) is not None and _absence(kubectl, experiment) is not None


def _absence(kubectl: Kubectl, experiment: Object) -> str | None:
    """Return why no pod serves the experiment, or None. `kubectl port-forward` would wait a minute for a pod."""
    name = experiment["metadata"]["name"]
    phase = read_status(experiment).phase
    why = None if phase is None else _UNSERVED.get(phase)
    if why is None:
        return None
    pods = kubectl.objects("pods", {**own_labels(experiment), ROLE_LABEL: COORDINATOR})
    if any(pod.get("status", {}).get("phase") == "Running" for pod in pods):
        return None
    return f"no pod serves {name}: {why.replace('NAME', name)}"


def _bucket(experiment: Object) -> Mapping[str, Any] | None:
    """Return the experiment's object store, or None if its versions are on a volume."""
    bucket: Mapping[str, Any] | None = (
        experiment.get("spec", {}).get("parameters", {}).get("store", {}).get("objectStore")
    )
    return bucket


def _bucket_store(kubectl: Kubectl, experiment: Object) -> ParameterStoreConfig:
    """Return the run's place in the experiment's bucket. The credentials of the experiment's Secret, if any, become
    environment variables.

    Raises:
        UserError: the Secret cannot be read, or the spec is not one of this version of rlsrl.
    """
    secret = (_bucket(experiment) or {}).get("credentialsSecret")
    if secret is not None:
        data = json.loads(kubectl.ask("get", "secret", secret, "--output", "json")).get("data", {})
        os.environ.update({key: base64.b64decode(value).decode() for key, value in data.items()})
    run_uid = run_uid_of(experiment["metadata"]["uid"], read_status(experiment).fresh_attempt)
    placement = cluster_placement(run_uid=run_uid, coordinator_host="")
    return placement.parameter_store(as_experiment(experiment))


def as_experiment(found: Object) -> RLExperiment:
    """Return an experiment of the cluster as this version of rlsrl reads it.

    Raises:
        UserError: its spec is not one of this version.
    """
    name = found["metadata"]["name"]
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": found["spec"]}
    try:
        return load_text(json.dumps(document))
    except SpecError as error:
        raise UserError(f"experiment {name}: {error}") from error


def _token(kubectl: Kubectl, experiment: Object) -> str:
    for secret in kubectl.objects("secrets", own_labels(experiment)):
        if TOKEN_KEY in secret.get("data", {}):
            return base64.b64decode(secret["data"][TOKEN_KEY]).decode()
    raise UserError(f"{experiment['metadata']['name']} has no token yet: the operator has not created its Secret")


@contextlib.contextmanager
def _certificates(kubectl: Kubectl, experiment: Object) -> Iterator[Tls | None]:
    """Yield the certificates of the experiment's workers in a temporary folder; None without TLS."""
    from rlsrl.rpc.tls import FILES, Tls, TlsUnusable

    metadata = experiment["metadata"]
    name = experiment.get("spec", {}).get("security", {}).get("tlsSecret")
    if name is None:
        yield None
        return
    data = json.loads(kubectl.ask("get", "secret", name, "--output", "json")).get("data", {})
    with tempfile.TemporaryDirectory(prefix="rlsrl-tls-") as folder:
        for file in FILES:
            Path(folder, file).write_bytes(base64.b64decode(data.get(file, "")))
        try:
            tls = Tls(folder=Path(folder), peer_name=certified_name(metadata["name"], metadata["namespace"]))
        except TlsUnusable as error:
            raise UserError(f"the certificates in the Secret {name} cannot be used: {error}") from error
        yield tls


@contextlib.contextmanager
def _forwarded(kubectl: Kubectl, name: str) -> Iterator[int]:
    """Yield a local port that forwards to the coordinator."""
    command = kubectl.command(
        "port-forward", "--address", "127.0.0.1", f"service/{name}-coordinator", f":{COORDINATOR_PORT}"
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout is not None and forward.stderr is not None  # noqa: PT018 - piped above
            found = _FORWARDING.search(forward.stdout.readline())
            if found is None:
                hint = f"; see kubectl rlsrl why {name}"
                raise failed_call(f"the coordinator of {name} cannot be reached", forward.stderr.read(), hint=hint)
            yield int(found[1])
        finally:
            forward.kill()
