"""The newest version of each policy, in memory, on its way from a trainer to whoever shares no memory with it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from rlsrl.data.version import Version
from rlsrl.parameters.names import check_policy
from rlsrl.parameters.protocols import ParameterError, StaleAttempt
from rlsrl.parameters.service.failures import TransferRefused
from rlsrl.parameters.service.live import check_version
from rlsrl.parameters.service.messages import version_to_proto
from rlsrl.parameters.service.transfers import Assembly, next_message, open_message, parse_header
from rlsrl.rpc.v1 import parameters_pb2 as pb

MAX_POLICIES = 64
"""Policies that are kept at once; a publisher of one more is refused."""

Context = aio.ServicerContext[Any, Any]
Messages = tuple[bytes, ...]
"""A transfer as it came, which is how it goes on."""


@dataclass
class Newest:
    """The newest version of one policy."""

    version: Version
    messages: Messages
    description: Messages
    """What its publisher says of itself."""


@dataclass
class Policy:
    """One policy's newest version, and how to hear of the next."""

    newest: Newest | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, with each new version."""


def is_news(version: Version, newest: Version | None) -> bool:
    """Whether a version takes the place of the newest; False for the same one sent again.

    Raises:
        StaleAttempt: its trainer gang has been succeeded.
        ParameterError: the version is older: it would move readers back.
    """
    if newest is None or version >= newest:
        return version != newest
    if version.attempt < newest.attempt:
        raise StaleAttempt(f"version {version} comes from an attempt that was succeeded by attempt {newest.attempt}")
    raise ParameterError(f"version {version} comes after {newest}, which is newer")


class LiveWeights:
    """Takes versions from publishers and hands the newest to watchers. Belongs to one event loop.

    A watcher that is slow holds up nobody: what it has not begun to read by the time a newer version is there it never
    gets.
    """

    def __init__(self, *, max_transfer_bytes: int) -> None:
        self._max_nbytes = max_transfer_bytes
        self._policies: dict[str, Policy] = {}

    async def take(self, context: Context) -> None:
        """Serve one publisher until it hangs up: confirm each version once it is handed out.

        Raises:
            TransferRefused, Corrupt: what came is no transfer.
            StaleAttempt, ParameterError: see ``is_news``.
            ValueError: the policy's name cannot be one.
        """
        policy: Policy | None = None
        description: Messages = ()
        while (received := await self._receive(context)) is not None:
            header, assembly, messages = received
            if header.WhichOneof("kind") == "description":
                policy, description = self._open(header.description.policy), messages
                _check_description(assembly)
            elif header.WhichOneof("kind") == "version" and policy is not None:
                version = await asyncio.to_thread(check_version, header.version, assembly)
                if is_news(version, None if policy.newest is None else policy.newest.version):
                    policy.newest = Newest(version=version, messages=messages, description=description)
                    changed, policy.changed = policy.changed, asyncio.Event()
                    changed.set()
                await context.write(pb.Published(version=version_to_proto(version)))
            else:
                raise TransferRefused("a publisher sends its description, then versions")

    async def serve(self, policy_name: str, newer_than: Version | None, context: Context) -> None:
        """Send a watcher the newest version whenever it is newer than what it has, until it hangs up.

        Raises:
            ParameterError, ValueError: there cannot be such a policy.
        """
        policy = self._open(policy_name)
        described: Messages | None = None
        while True:
            changed, newest = policy.changed, policy.newest
            if newest is None or (newer_than is not None and newest.version <= newer_than):
                await changed.wait()
                continue
            if newest.description is not described:
                described = newest.description
                await _send(context, described)
            await _send(context, newest.messages)
            newer_than = newest.version

    async def _receive(self, context: Context) -> tuple[pb.Live, Assembly, Messages] | None:
        """One transfer; None at the stream's end."""
        if (message := await next_message(context)) is None:
            return None
        head, chunk = open_message(message)
        header, messages = parse_header(pb.Live, head), [message]
        assembly = Assembly(header.nbytes, chunk, max_nbytes=self._max_nbytes)
        while not assembly.complete:
            if (message := await next_message(context)) is None:
                raise TransferRefused("the stream ended within a transfer")
            assembly.add_message(message)
            messages.append(message)
        return header, assembly, tuple(messages)

    def _open(self, name: str) -> Policy:
        if name not in self._policies and len(self._policies) == MAX_POLICIES:
            raise ParameterError(f"{MAX_POLICIES} policies are live already; {name!r} would be one more")
        return self._policies.setdefault(check_policy(name), Policy())


def _check_description(received: Assembly) -> None:
    try:
        is_object = isinstance(json.loads(received.content()), dict)
    except (ValueError, RecursionError) as error:
        raise TransferRefused("a description is JSON") from error
    if not is_object:
        raise TransferRefused("a description is a JSON object")


async def _send(context: Context, messages: Messages) -> None:
    for message in messages:
        await context.write(message)
