"""Addresses on which a worker serves and connects."""

from __future__ import annotations

import pytest

from rlsrl.runtime.addresses import HOST_VARIABLE, Directory, followed_roles, forwarded_address, own_address
from rlsrl.runtime.errors import ConfigurationError


@pytest.mark.parametrize(
    ("host", "address", "expected"),
    [
        ("10.1.2.3", ":7000", "10.1.2.3:7000"),
        ("fd00::7", ":7000", "[fd00::7]:7000"),
        ("pod-1.pods", ":0", "pod-1.pods:0"),
        ("10.1.2.3", "127.0.0.1:7000", "127.0.0.1:7000"),
        ("10.1.2.3", "unix-abstract:name", "unix-abstract:name"),
    ],
)
def test_a_port_alone_is_on_the_workers_own_host(
    monkeypatch: pytest.MonkeyPatch, host: str, address: str, expected: str
) -> None:
    monkeypatch.setenv(HOST_VARIABLE, host)
    assert own_address(address) == expected


def test_ranks_on_one_host_have_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "10.1.2.3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_address(":7001") == "10.1.2.3:7004"
    assert own_address(":0") == "10.1.2.3:0"
    assert own_address("127.0.0.1:7001") == "127.0.0.1:7001"


@pytest.mark.parametrize(
    ("host", "address", "expected"),
    [
        ("10.1.2.3", ":7000", "127.0.0.1:7000"),
        ("fd00::7", ":7000", "127.0.0.1:7000"),
        ("127.5.6.7", ":7000", None),
        ("10.1.2.3", "unix-abstract:name", None),
    ],
)
def test_a_pod_also_serves_on_loopback(
    monkeypatch: pytest.MonkeyPatch, host: str, address: str, expected: str | None
) -> None:
    monkeypatch.setenv(HOST_VARIABLE, host)
    assert forwarded_address(address) == expected


@pytest.mark.parametrize("host", [None, ""])
def test_the_error_of_a_missing_host_names_the_variable(monkeypatch: pytest.MonkeyPatch, host: str | None) -> None:
    if host is None:
        monkeypatch.delenv(HOST_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(HOST_VARIABLE, host)
    with pytest.raises(ConfigurationError, match=f"address :7000 .* set {HOST_VARIABLE} to that host"):
        own_address(":7000")
    assert own_address("127.0.0.1:1") == "127.0.0.1:1"


def test_a_peers_address_is_looked_up_each_time() -> None:
    addresses: dict[tuple[str, int], str] = {}
    directory = Directory(lambda role, index: addresses.get((role, index)))
    address = "roster:policy/12"
    assert directory.find(address) is None
    addresses["policy", 12] = "10.0.0.1:7"
    assert directory.find(address) == "10.0.0.1:7"
    addresses["policy", 12] = "10.0.0.2:7"
    assert directory.find(address) == "10.0.0.2:7"
    assert directory.find("127.0.0.1:7") == "127.0.0.1:7"
    assert directory.find("unix-abstract:roster") == "unix-abstract:roster"


def test_the_followed_roles_are_those_with_looked_up_addresses() -> None:
    addresses = ("roster:policy/0", "roster:policy/1", "roster:trainer/0", "127.0.0.1:7")
    assert followed_roles(addresses) == {"policy", "trainer"}
