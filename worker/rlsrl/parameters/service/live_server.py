"""The coordinator's part of live weights: the newest version of each policy, in memory, between trainer and actors."""

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
from rlsrl.parameters.service.messages import check_live_version, version_to_proto
from rlsrl.parameters.service.transfers import Transfer, receive_on_server
from rlsrl.rpc.v1 import parameters_pb2 as pb

MAX_POLICIES = 64
"""Policies that are kept at once; a publisher of one more is refused."""

Context = aio.ServicerContext[Any, Any]
Messages = tuple[bytes, ...]
"""A transfer as it arrived. The coordinator forwards it unchanged."""


@dataclass(frozen=True, kw_only=True)
class LiveVersion:
    """The newest version of one policy."""

    version: Version
    messages: Messages
    description: Messages
    """The description that the version's publisher sent."""


@dataclass
class LivePolicy:
    """One policy's newest version, and the event that announces the next one."""

    newest: LiveVersion | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a new event, with each new version."""


def replaces(version: Version, newest: Version | None) -> bool:
    """Return whether a version replaces the newest; False if it is the newest, sent again.

    Raises:
        StaleAttempt: the version comes from a trainer gang that a newer attempt has replaced.
        ParameterError: the version is older: it would move readers back.
    """
    if newest is None or version >= newest:
        return version != newest
    if version.attempt < newest.attempt:
        raise StaleAttempt(f"version {version} comes from an attempt that was succeeded by attempt {newest.attempt}")
    raise ParameterError(f"version {version} comes after {newest}, which is newer")


class LiveWeights:
    """Takes versions from publishers and hands the newest to watchers. For one event loop.

    A slow watcher delays nobody: it skips the versions that were replaced before it began to read them.
    """

    def __init__(self, *, max_transfer_bytes: int) -> None:
        self._max_nbytes = max_transfer_bytes
        self._policies: dict[str, LivePolicy] = {}

    async def receive_versions(self, context: Context) -> None:
        """Serve one publisher until it disconnects: confirm each version once watchers can get it.

        Raises:
            TransferRefused, Corrupt: the messages are not a transfer, or not what the publisher sent.
            StaleAttempt, ParameterError: see ``replaces``.
            ValueError: the policy's name is invalid.
        """
        policy: LivePolicy | None = None
        description: Messages = ()
        async for transfer in receive_on_server(context, pb.Live, max_nbytes=self._max_nbytes):
            kind = transfer.header.WhichOneof("kind")
            if kind == "description":
                policy = self._open(transfer.header.description.policy)
                description = transfer.messages
                _check_description(transfer)
            elif kind == "version" and policy is not None:
                version = await asyncio.to_thread(check_live_version, transfer)
                if replaces(version, None if policy.newest is None else policy.newest.version):
                    policy.newest = LiveVersion(version=version, messages=transfer.messages, description=description)
                    changed, policy.changed = policy.changed, asyncio.Event()
                    changed.set()
                await context.write(pb.Published(version=version_to_proto(version)))
            else:
                raise TransferRefused("a publisher sends its description, then versions")

    async def send_versions(self, policy_name: str, newer_than: Version | None, context: Context) -> None:
        """Serve one watcher until it disconnects: send each version that is newer than what it has.

        Raises:
            ValueError: the policy's name is invalid.
            ParameterError: ``MAX_POLICIES`` other policies are live.
        """
        policy = self._open(policy_name)
        sent_description: Messages | None = None
        while True:
            changed, newest = policy.changed, policy.newest
            if newest is None or (newer_than is not None and newest.version <= newer_than):
                await changed.wait()
                continue
            if newest.description is not sent_description:
                sent_description = newest.description
                await _send(context, sent_description)
            await _send(context, newest.messages)
            newer_than = newest.version

    def _open(self, name: str) -> LivePolicy:
        if name not in self._policies and len(self._policies) == MAX_POLICIES:
            raise ParameterError(f"{MAX_POLICIES} policies are live already; {name!r} would be one more")
        return self._policies.setdefault(check_policy(name), LivePolicy())


def _check_description(transfer: Transfer[pb.Live]) -> None:
    try:
        is_object = isinstance(json.loads(transfer.content()), dict)
    except (ValueError, RecursionError) as error:
        raise TransferRefused("a description is JSON") from error
    if not is_object:
        raise TransferRefused("a description is a JSON object")


async def _send(context: Context, messages: Messages) -> None:
    for message in messages:
        await context.write(message)
