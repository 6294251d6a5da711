"""Where a worker serves and where it finds others, on one machine and among pods.

A pod learns its own host when it starts, and others learn it from the roster; so a config, which is one for all workers
of a role, names a host of neither. ``:PORT`` is a port of the worker's own host; ``roster:ROLE/INDEX`` is wherever the
member of that role with that index serves at the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from rlsrl.runtime.errors import ConfigurationError

HOST_VARIABLE = "RLSRL_HOST"
"""Environment variable with the host, a name or an IP address, where others reach this worker."""
_LOCAL_RANK_VARIABLE = "LOCAL_RANK"
"""Environment variable by which torchrun numbers the ranks of one host."""
_ROSTER = "roster:"


def own_address(address: str) -> str:
    """``HOST:PORT`` for ``:PORT``; any other address as it is. Ranks that share a host count their ports from PORT on.

    Raises:
        ConfigurationError: the environment does not tell the worker its own host.
    """
    if not address.startswith(":"):
        return address
    host = os.environ.get(HOST_VARIABLE, "")
    first = int(address[1:])
    port = first and first + int(os.environ.get(_LOCAL_RANK_VARIABLE, "0"))
    if not host:
        raise ConfigurationError(
            f"the address {address} is of the worker's own host, and {HOST_VARIABLE} does not name it"
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def forwarded_address(address: str) -> str | None:
    """Where what serves at ``:PORT`` of its own host must listen too for ``kubectl port-forward``, which comes from
    within the pod; None for a worker that is in none."""
    own = own_address(address)
    if own == address or own.startswith("127."):
        return None
    return f"127.0.0.1:{own.rpartition(':')[2]}"


def roster_address(role: str, index: int) -> str:
    """The address of whoever holds that index of a role."""
    return f"{_ROSTER}{role}/{index}"


def followed_roles(addresses: tuple[str, ...]) -> set[str]:
    """The roles whose members have to be known to find these addresses."""
    return {address.removeprefix(_ROSTER).split("/")[0] for address in addresses if address.startswith(_ROSTER)}


class Directory:
    """Finds the address at which to connect, each time anew: a member's successor may be elsewhere."""

    def __init__(self, address_of: Callable[[str, int], str | None]) -> None:
        """``address_of(role, index)`` says where a member is now, for example ``JoinSession.address_of``."""
        self._address_of = address_of

    def find(self, address: str) -> str | None:
        """Where that is now; None while nobody is there. What is no address of the roster is where it says."""
        if not address.startswith(_ROSTER):
            return address
        role, _, index = address.removeprefix(_ROSTER).partition("/")
        return self._address_of(role, int(index))
