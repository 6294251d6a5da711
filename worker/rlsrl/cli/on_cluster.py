"""Access to the coordinator of an experiment on a cluster, through kubectl's port-forward."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlsrl.api.placement import COORDINATOR_PORT
from rlsrl.api.pods import TOKEN_KEY, certified_name
from rlsrl.cli.errors import UserError
from rlsrl.cli.kubectl import Kubectl, Object, complaint, own_labels

if TYPE_CHECKING:
    from rlsrl.parameters.protocols import ParameterDB
    from rlsrl.rpc.tls import Tls

ANSWER_SECONDS = 5.0
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
        UserError: the coordinator cannot be reached; with kubectl's message.
    """
    token = _token(kubectl, experiment)
    with (
        _certificates(kubectl, experiment) as tls,
        _forwarded(kubectl, experiment["metadata"]["name"]) as port,
    ):
        yield CoordinatorAccess(f"127.0.0.1:{port}", token, tls)


def coordinator_status(kubectl: Kubectl, experiment: Object) -> Mapping[str, Any]:
    """Return the status page of an experiment's coordinator.

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
    """Yield the parameter DB of an experiment on the cluster, through its coordinator.

    Args:
        name: the experiment.
        namespace: None: the namespace of kubectl's current context.

    Raises:
        UserError: the experiment does not exist or cannot be reached; with kubectl's message.
    """
    from rlsrl.parameters.service import ServiceParameterDB

    kubectl = Kubectl(namespace)
    with coordinator(kubectl, kubectl.experiment(name)) as access:
        yield ServiceParameterDB(access.address, access.token, tls=access.tls)


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
                said = complaint(forward.stderr.read())
                raise UserError(f"the coordinator of {name} cannot be reached: {said}; see kubectl rlsrl why {name}")
            yield int(found[1])
        finally:
            forward.kill()
