"""The addresses of the API server, as the operator finds them when it starts."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from kubernetes.aio.client.exceptions import ApiException
from operator_world import ApiServer
from structlog.testing import capture_logs

from rlsrl_operator.api_server import with_api_server
from rlsrl_operator.cluster import Cluster
from rlsrl_operator.settings import Environments, OperatorSettings
from rlsrl_operator.testing import SETTINGS

SLICE: dict[str, Any] = {
    "apiVersion": "discovery.k8s.io/v1",
    "kind": "EndpointSlice",
    "metadata": {"name": "kubernetes", "namespace": "default"},
    "addressType": "IPv4",
    "endpoints": [{"addresses": ["172.18.0.2"]}, {"addresses": ["172.18.0.3"]}],
}
IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def allowing(*egress: dict[str, Any]) -> OperatorSettings:
    environments = Environments.model_validate({"egress": list(egress)})
    return SETTINGS.model_copy(update={"environments": environments})


RANGES = allowing({"cidr": "0.0.0.0/0"})


def found(server: ApiServer, settings: OperatorSettings, environ: dict[str, str]) -> tuple[str, ...] | None:
    cluster = Cluster(cast("Any", server), on_write=lambda kind, verb: None)
    return asyncio.run(with_api_server(settings, cluster, environ)).environments.api_server


@pytest.fixture
def server() -> ApiServer:
    made = ApiServer()
    made.put(SLICE)
    return made


def test_endpoints_and_service_are_found(server: ApiServer) -> None:
    assert found(server, RANGES, IN_A_POD) == ("172.18.0.2/32", "172.18.0.3/32", "10.96.0.1/32")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("fd00::1", ("172.18.0.2/32", "172.18.0.3/32", "fd00::1/128")),
        ("api.example.com", ("172.18.0.2/32", "172.18.0.3/32")),
        ("172.18.0.3", ("172.18.0.2/32", "172.18.0.3/32")),
        (None, ("172.18.0.2/32", "172.18.0.3/32")),
    ],
)
def test_the_service_may_have_another_form(server: ApiServer, host: str | None, expected: tuple[str, ...]) -> None:
    assert found(server, RANGES, {} if host is None else {"KUBERNETES_SERVICE_HOST": host}) == expected


@pytest.mark.parametrize("settings", [SETTINGS, allowing({"podSelector": {}})], ids=["nothing", "selectors"])
def test_nothing_is_read_if_no_range_is_allowed(server: ApiServer, settings: OperatorSettings) -> None:
    assert found(server, settings, IN_A_POD) is None
    assert server.reads == []


@pytest.mark.parametrize("contents", [None, {}, {"endpoints": None}, {"endpoints": []}], ids=str)
def test_without_addresses_they_stay_unknown(contents: dict[str, Any] | None) -> None:
    server = ApiServer()
    if contents is not None:
        server.put({**{name: SLICE[name] for name in ("apiVersion", "kind", "metadata")}, **contents})
    with capture_logs() as logs:
        assert found(server, RANGES, IN_A_POD) is None
    assert [line["error"] for line in logs] == ["the EndpointSlice default/kubernetes has no addresses"]


def test_without_permission_they_stay_unknown() -> None:
    def forbid(kind: str) -> None:
        raise ApiException(status=403, reason="Forbidden")

    server = ApiServer()
    server.meanwhile = forbid
    with capture_logs() as logs:
        assert found(server, RANGES, IN_A_POD) is None
    (line,) = logs
    assert "403 Forbidden" in line["error"]


def test_another_error_is_raised() -> None:
    """kopf then starts the operator again."""

    def fail(kind: str) -> None:
        raise ApiException(status=500)

    server = ApiServer()
    server.meanwhile = fail
    with pytest.raises(ApiException):
        found(server, RANGES, IN_A_POD)
