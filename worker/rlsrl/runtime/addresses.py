"""The addresses in configs: where a worker serves and where it finds other workers, on one machine and among pods.

All workers of a role share one config, so a config cannot name a pod's host. ``:PORT`` is a port of the worker's own
host. ``roster:ROLE/INDEX`` is the current address of that worker, which the coordinator sends.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from rlsrl.runtime.errors import ConfigurationError

HOST_VARIABLE = "RLSRL_HOST"
"""Environment variable with the host name or IP address at which others reach this worker."""
_LOCAL_RANK_VARIABLE = "LOCAL_RANK"
"""Environment variable of torchrun with the number of a trainer's process on its host, from 0."""
_ROSTER = "roster:"


def own_address(address: str) -> str:
    """Return ``HOST:PORT`` for ``:PORT``, and any other address unchanged. Trainers on one host use PORT, PORT + 1, ...

    Raises:
        ConfigurationError: the environment does not name the worker's own host.
    """
    if not address.startswith(":"):
        return address
    host = os.environ.get(HOST_VARIABLE, "")
    first = int(address[1:])
    port = first and first + int(os.environ.get(_LOCAL_RANK_VARIABLE, "0"))
    if not host:
        raise ConfigurationError(
            f"the address {address} is a port of this worker's own host: set {HOST_VARIABLE} to that host"
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def forwarded_address(address: str) -> str | None:
    """Return the loopback address at which a pod must listen too, for ``kubectl port-forward``; None outside pods."""
    own = own_address(address)
    if own == address or own.startswith("127."):
        return None
    return f"127.0.0.1:{own.rpartition(':')[2]}"


def followed_roles(addresses: tuple[str, ...]) -> set[str]:
    """Return the roles that these addresses refer to."""
    return {address.removeprefix(_ROSTER).split("/")[0] for address in addresses if address.startswith(_ROSTER)}


class Directory:
    """Finds the current address of a worker. Call ``find`` before each connection: a new pod may be on another host."""

    def __init__(self, address_of: Callable[[str, int], str | None]) -> None:
        """``address_of(role, index)`` returns a worker's current address, for example ``JoinSession.address_of``."""
        self._address_of = address_of

    def find(self, address: str) -> str | None:
        """Return the current address for ``roster:ROLE/INDEX``, or None if the worker is absent.

        Other addresses are returned unchanged.
        """
        if not address.startswith(_ROSTER):
            return address
        role, _, index = address.removeprefix(_ROSTER).partition("/")
        return self._address_of(role, int(index))
