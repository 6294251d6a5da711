"""A worker's session with the coordinator, over the Join stream: it holds the lease of the worker's index.

The worker continues while the coordinator is away: newer reports replace older ones, learning-curve rows wait, and the
session claims the same lease again when a coordinator is back.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from prometheus_client import CollectorRegistry

from rlsrl.data.version import Version
from rlsrl.rpc.channels import is_final, token_metadata
from rlsrl.rpc.reconnect import ReconnectingCall
from rlsrl.rpc.settings import validate_address
from rlsrl.rpc.tls import Tls
from rlsrl.rpc.v1 import coordinator_pb2 as pb
from rlsrl.rpc.v1.coordinator_pb2_grpc import CoordinatorStub
from rlsrl.runtime.activity import Stage
from rlsrl.runtime.coordination import WorkerState, describe
from rlsrl.runtime.heartbeat_queue import HeartbeatQueue, JoinMessages
from rlsrl.runtime.identity import own_process
from rlsrl.runtime.ledger import LedgerPage
from rlsrl.runtime.printed_text import PrintedText

LEAVE_TIMEOUT_SECONDS = 5.0
"""Seconds that ``JoinSession.leave`` waits by default for a coordinator that is away."""


class JoinError(Exception):
    """The worker has no lease."""


class JoinRefused(JoinError):
    """The coordinator refused the worker, at first or when it rejoined; the text is the reason."""


class JoinTimeout(JoinError, TimeoutError):
    """No coordinator gave this worker a lease in time; the text says what happened last."""


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """What a worker needs to join the experiment."""

    address: str
    """``unix-abstract:NAME`` or ``HOST:PORT`` of the coordinator."""
    token: str
    """The experiment's token."""
    tls: Tls | None = None
    """Certificates, if the coordinator needs them."""
    role: str
    """The worker's role."""
    index: int | None = None
    """The index this worker must have (a trainer's rank); None takes the lowest free one."""
    attempt: int = 0
    """The trainer gang's attempt; 0 for other roles."""
    endpoints: Mapping[str, str] = field(default_factory=dict)
    """This worker's addresses, for example ``{"metrics": "127.0.0.1:4711"}``. Other workers get the one named
    ``STREAMS``."""
    follows: Collection[str] = ()
    """The roles whose addresses ``JoinSession.address_of`` returns."""

    def hello(self) -> pb.Hello:
        """Return the first message of this process, under a new instance UUID."""
        return pb.Hello(
            role=self.role,
            instance=str(uuid.uuid4()),
            index=self.index,
            attempt=self.attempt,
            pid=os.getpid(),
            host=socket.gethostname(),
            process=own_process(),
            endpoints=self.endpoints,
            follows=sorted(self.follows),
        )


class JoinSession:
    """A worker's lease of an index, which one thread keeps alive until ``leave``. Thread-safe.

    The thread waits for messages and never polls, so it takes next to no time from a training thread.
    """

    def __init__(
        self,
        request: JoinRequest,
        *,
        on_settings: Callable[[], None],
        printed: PrintedText | None,
        registry: CollectorRegistry | None,
    ) -> None:
        """Use ``JoinSession.join``."""
        hello = request.hello()
        self._address = validate_address(request.address)
        self._metadata = token_metadata(request.token)
        self._instance = hello.instance
        self._queue = HeartbeatQueue(hello, printed=printed, registry=registry)
        self._on_settings = on_settings
        self._changed = self._queue.changed
        # Guarded by _changed:
        self._welcome: pb.Welcome | None = None
        self._last_problem = "no coordinator answered"
        self._delivered = False
        self._addresses: dict[str, Mapping[int, str]] = {}
        self._settings: Mapping[str, Any] = {}
        self._is_paused = False
        self._calls = ReconnectingCall(
            self._address, tls=request.tls, name="join-session", changed=self._changed, converse=self._converse
        )

    @classmethod
    def join(
        cls,
        request: JoinRequest,
        *,
        timeout: float,
        on_settings: Callable[[], None] = lambda: None,
        printed: PrintedText | None = None,
        registry: CollectorRegistry | None = None,
    ) -> Self:
        """Join the experiment. Waits for a free index, and for a coordinator that is not up yet.

        Args:
            request: how to reach the coordinator, and what to ask for.
            timeout: seconds to wait at most.
            on_settings: called from the join session thread when ``settings`` or ``is_paused`` changed; must not block
                or raise.
            printed: what this process prints, if the coordinator keeps it.
            registry: this process's metrics, which heartbeats carry as often as the coordinator asks for them.

        Raises:
            JoinRefused: the coordinator refused: the token or the index is wrong, or a newer attempt exists.
            JoinTimeout: no lease within ``timeout`` seconds.
            ValueError: the coordinator's address has neither form.
        """
        session = cls(request, on_settings=on_settings, printed=printed, registry=registry)
        session._begin(timeout)
        return session

    @property
    def index(self) -> int:
        """The leased index."""
        assert self._welcome is not None, "join waits for it"
        return self._welcome.index

    @property
    def incarnation(self) -> int:
        """How often the index was leased before."""
        assert self._welcome is not None, "join waits for it"
        return self._welcome.incarnation

    @property
    def ledger_copy(self) -> bytes:
        """The coordinator's copy of the ledger page of the index; empty if there is none."""
        assert self._welcome is not None, "join waits for it"
        return self._welcome.ledger_page

    @property
    def instance(self) -> str:
        """UUID of this process, new with each life."""
        return self._instance

    @property
    def channel(self) -> grpc.Channel | None:
        """The open connection to the coordinator; None while there is none. Each reconnect closes it."""
        return self._calls.channel

    @property
    def unacknowledged(self) -> int:
        """Number of rows that the coordinator has not acknowledged."""
        return self._queue.unacknowledged

    def address_of(self, role: str, index: int) -> str | None:
        """Return where the worker at an index of a followed role serves its streams, or None if no worker has it.

        While the coordinator is away this is the last known address.
        """
        with self._changed:
            return self._addresses.get(role, {}).get(index)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The newest values of the role's live settings."""
        with self._changed:
            return self._settings

    @property
    def is_paused(self) -> bool:
        """Whether the worker is to be paused."""
        with self._changed:
            return self._is_paused

    def report(
        self,
        *,
        state: WorkerState | None = None,
        stats: Mapping[str, float] | None = None,
        version: Version | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Set parts of the next heartbeat. Cheap: call it whenever something changes.

        None leaves a part unchanged. ``stats`` and ``texts`` replace the values of their keys; an empty one is removed.
        """
        self._queue.report(state=state, stats=stats, version=version, texts=texts)

    def turn_to(self, doing: str) -> None:
        """Report the reason for which the worker waits from now on, or ``rlsrl.runtime.activity.WORKING``."""
        self._queue.turn_to(doing)

    def spent(self, seconds: Mapping[Stage, float]) -> None:
        """Attribute seconds of the work until now to its stages."""
        self._queue.spent(seconds)

    def send_ledger_page(self, page: LedgerPage) -> None:
        """Send a copy of the worker's ledger page with each heartbeat, in case the page is lost."""
        self._queue.send_ledger_page(page.encode)

    def record(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a row to the learning curve. It is sent again until the coordinator acknowledges it.

        Never waits. Beyond ``MAX_RECORDS`` (``rlsrl.runtime.heartbeat_queue``) unacknowledged rows the oldest is
        dropped; heartbeats report how many.
        """
        self._queue.record(step, scalars)

    @property
    def has_room_for_video(self) -> bool:
        """Whether ``send_video`` would take a video now."""
        return self._queue.has_room_for_video

    def send_video(self, version: Version, *, is_fixed: bool, mp4: bytes, gif: bytes) -> bool:
        """Send a video of a version that was played. It is sent again until the coordinator acknowledges it.

        Never waits. Return False, without the video, if several wait because the coordinator is away.

        Args:
            version: the version.
            is_fixed: whether it is that of ``evaluators.parameters``.
            mp4: the file, at most ``MAX_MP4_BYTES`` (``rlsrl.runtime.heartbeat_queue``).
            gif: a small animated GIF, at most ``MAX_GIF_BYTES``; empty for none.
        """
        named = pb.Version(attempt=version.attempt, step=version.step)
        return self._queue.send_video(pb.Video(version=named, is_fixed=is_fixed, mp4=mp4, gif=gif))

    def check(self) -> None:
        """Raise the error that ended the session. Call it periodically: nothing else reports it.

        Raises:
            JoinRefused: another process got the index while this one was away, or a newer attempt exists. The worker
                must exit.
            JoinError: the join session thread failed; the cause says how.
        """
        with self._changed:
            failure = self._calls.failure
        if isinstance(failure, JoinError):
            raise failure
        if failure is not None:
            raise JoinError("the join session thread failed") from failure

    def leave(self, reason: str, *, done: bool = False, timeout: float = LEAVE_TIMEOUT_SECONDS) -> bool:
        """Send the waiting rows and the goodbye, and release the index. Idempotent.

        Args:
            reason: why, in a few words.
            done: the worker's work is complete, so that it needs no successor.
            timeout: seconds to wait at most, also for a coordinator that is away.

        Returns:
            Whether the coordinator received everything. If not, the index stays leased until the lease expires.
        """
        self._queue.say_goodbye(pb.Goodbye(reason=reason, done=done))
        self._calls.close(grace=timeout)
        return self._delivered

    def _begin(self, timeout: float) -> None:
        self._calls.start()
        with self._changed:
            answered = self._changed.wait_for(lambda: self._welcome or self._calls.failure, timeout)
            problem = self._last_problem
        if self._welcome is not None:
            return
        self._calls.close()
        if answered:
            self.check()
        raise JoinTimeout(f"no lease from the coordinator at {self._address} within {timeout} s: {problem}")

    def _converse(self, channel: grpc.Channel) -> bool:
        """Hold the Join stream over one connection until it ends; return whether there was a welcome.

        Raises:
            JoinRefused: the end is final.
        """
        stream = JoinMessages(self._queue)
        call = CoordinatorStub(channel).Join(stream, metadata=self._metadata)
        with self._calls.reading(call):
            try:
                for message in call:
                    self._receive(message, stream)
                if stream.said_goodbye:
                    self._delivered = True
                    self._calls.finish()
            except grpc.RpcError as error:
                self._last_problem = describe(error)
                if is_final(error):
                    raise JoinRefused(self._last_problem) from error
            finally:
                stream.close()
        return stream.welcomed

    def _receive(self, message: pb.CoordinatorMessage, stream: JoinMessages) -> None:
        kind = message.WhichOneof("kind")
        if kind == "welcome":
            self._be_welcomed(message.welcome, stream)
        elif kind == "records_ack":
            self._queue.acknowledge(message.records_ack.sequence)
        elif kind == "log_ack":
            self._queue.printed.acknowledge(message.log_ack.sequence)
        elif kind == "video_ack":
            self._queue.acknowledge_video(message.video_ack.sequence)
        elif kind == "peers":
            with self._changed:
                self._addresses[message.peers.role] = dict(message.peers.addresses)
        elif kind == "settings":
            self._take_settings(message.settings)
        elif kind == "refused":
            raise JoinRefused(message.refused.reason)

    def _take_settings(self, message: pb.Settings) -> None:
        settings = json.loads(message.json) if message.json else {}
        with self._changed:
            if (settings, message.paused) == (self._settings, self._is_paused):
                return
            self._settings, self._is_paused = settings, message.paused
        self._on_settings()

    def _be_welcomed(self, welcome: pb.Welcome, stream: JoinMessages) -> None:
        self._take_settings(welcome.settings)
        self._queue.metrics.repeat(welcome.metrics_seconds)
        with self._changed:
            self._welcome = self._welcome or welcome
            self._queue.claim(welcome.index, welcome.incarnation)
            stream.welcome(welcome.heartbeat_seconds)
