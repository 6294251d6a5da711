"""Experiments on a cluster, as commands reach them: by kubectl, which knows the cluster and who the user is."""

from __future__ import annotations

import base64
import contextlib
import re
import subprocess
from collections.abc import Iterator

from rlsrl.api.placement import COORDINATOR_PORT
from rlsrl.cli.errors import UserError
from rlsrl.parameters.protocols import ParameterDB
from rlsrl.runtime.errors import did_you_mean

ANSWER_SECONDS = 30.0
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


@contextlib.contextmanager
def cluster_database(name: str, namespace: str | None) -> Iterator[ParameterDB]:
    """The parameter DB of an experiment on the cluster, through its coordinator and a port-forward.

    ``namespace`` None is the one of kubectl's current context.

    Raises:
        UserError: there is no such experiment, or it cannot be reached; with what kubectl said.
    """
    from rlsrl.parameters.service import ServiceParameterDB

    kubectl = ["kubectl", *(["--namespace", namespace] if namespace else [])]
    token = _token(kubectl, name)
    with _forwarded(kubectl, name) as port:
        yield ServiceParameterDB(f"127.0.0.1:{port}", token)


def _token(kubectl: list[str], name: str) -> str:
    uids = _ask(
        kubectl,
        "get",
        "rlexperiments.rlsrl.dev",
        "-o",
        "jsonpath={range .items[*]}{.metadata.name} {.metadata.uid}\n{end}",
    )
    known = dict(line.split() for line in uids.splitlines())
    if name not in known:
        raise UserError(f"there is no experiment {name} in this namespace{did_you_mean(name, known)}")
    selector = f"rlsrl.dev/uid={known[name]}"
    encoded = _ask(kubectl, "get", "secrets", "--selector", selector, "-o", "jsonpath={.items[0].data.token}")
    return base64.b64decode(encoded).decode()


@contextlib.contextmanager
def _forwarded(kubectl: list[str], name: str) -> Iterator[int]:
    """A port of this machine that leads to the coordinator's."""
    command = [
        *kubectl,
        "port-forward",
        "--address",
        "127.0.0.1",
        f"service/{name}-coordinator",
        f":{COORDINATOR_PORT}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as forward:
        try:
            assert forward.stdout is not None and forward.stderr is not None  # noqa: S101, PT018 - piped above
            found = _FORWARDING.search(forward.stdout.readline())
            if found is None:
                raise UserError(f"the coordinator of {name} cannot be reached: {forward.stderr.read().strip()}")
            yield int(found[1])
        finally:
            forward.kill()


def _ask(kubectl: list[str], *arguments: str) -> str:
    try:
        answer = subprocess.run(
            [*kubectl, *arguments], capture_output=True, text=True, timeout=ANSWER_SECONDS, check=True
        )
    except FileNotFoundError as error:
        raise UserError("no kubectl on the PATH: experiments on a cluster are reached by it") from error
    except subprocess.CalledProcessError as error:
        raise UserError(f"kubectl {' '.join(arguments[:2])}: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise UserError(f"kubectl {' '.join(arguments[:2])}: no answer within {ANSWER_SECONDS:.0f} seconds") from error
    return answer.stdout
