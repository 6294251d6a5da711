"""The coordinator of an experiment on a cluster, as commands reach it: through a port-forward of kubectl's."""

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


class Reached(NamedTuple):
    """A coordinator, from this machine."""

    address: str
    token: str
    tls: Tls | None


@contextlib.contextmanager
def coordinator(kubectl: Kubectl, experiment: Object) -> Iterator[Reached]:
    """An experiment's coordinator, for as long as its pod is the one that it is.

    Raises:
        UserError: it cannot be reached; with what kubectl said.
    """
    token = _token(kubectl, experiment)
    with (
        _certificates(kubectl, experiment) as tls,
        _forwarded(kubectl, experiment["metadata"]["name"]) as port,
    ):
        yield Reached(f"127.0.0.1:{port}", token, tls)


def coordinator_status(kubectl: Kubectl, experiment: Object) -> Mapping[str, Any]:
    """What an experiment's coordinator says of it.

    Raises:
        UserError: it cannot be reached, or does not answer.
    """
    from rlsrl.runtime.coordination import CoordinatorClient, CoordinatorUnavailable

    with coordinator(kubectl, experiment) as reached, closing(CoordinatorClient(*reached)) as client:
        try:
            return client.status(ANSWER_SECONDS)
        except CoordinatorUnavailable as error:
            raise UserError(f"the coordinator of {experiment['metadata']['name']} does not answer: {error}") from error


@contextlib.contextmanager
def cluster_database(name: str, namespace: str | None) -> Iterator[ParameterDB]:
    """The parameter DB of an experiment on the cluster, through its coordinator.

    ``namespace`` None is the one of kubectl's current context.

    Raises:
        UserError: there is no such experiment, or it cannot be reached; with what kubectl said.
    """
    from rlsrl.parameters.service import ServiceParameterDB

    kubectl = Kubectl(namespace)
    with coordinator(kubectl, kubectl.experiment(name)) as reached:
        yield ServiceParameterDB(reached.address, reached.token, tls=reached.tls)


def _token(kubectl: Kubectl, experiment: Object) -> str:
    for secret in kubectl.objects("secrets", own_labels(experiment)):
        if TOKEN_KEY in secret.get("data", {}):
            return base64.b64decode(secret["data"][TOKEN_KEY]).decode()
    raise UserError(f"{experiment['metadata']['name']} has no token yet: the operator has not made its objects")


@contextlib.contextmanager
def _certificates(kubectl: Kubectl, experiment: Object) -> Iterator[Tls | None]:
    """Those of the experiment's workers, for as long as they are needed; None where it has none."""
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
    """A port of this machine that leads to the coordinator's."""
    command = kubectl.command(
        "port-forward", "--address", "127.0.0.1", f"service/{name}-coordinator", f":{COORDINATOR_PORT}"
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout is not None and forward.stderr is not None  # noqa: S101, PT018 - piped above
            found = _FORWARDING.search(forward.stdout.readline())
            if found is None:
                said = complaint(forward.stderr.read())
                raise UserError(f"the coordinator of {name} cannot be reached: {said}; see kubectl rlsrl why {name}")
            yield int(found[1])
        finally:
            forward.kill()
