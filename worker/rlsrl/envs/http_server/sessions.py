"""The sessions of an environment server: each has one environment and one thread, which makes, steps and closes it.

All methods of ``Sessions`` belong to the server's event loop. Only a session's thread touches its environment, so that
environments that wait do not wait for each other.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from rlsrl.envs.codec import CodecError, decode, decode_element, encode, encode_space
from rlsrl.envs.factory import EnvironmentSource, make_environment
from rlsrl.envs.http.protocol import ErrorKind
from rlsrl.envs.interface import EnvironmentInterface
from rlsrl.envs.place import EnvironmentPlace
from rlsrl.runtime.errors import USERS_ERRORS, ConfigurationError
from rlsrl.runtime.tracebacks import users_traceback

if TYPE_CHECKING:
    import gymnasium

_log = structlog.stdlib.get_logger(__name__)


class SessionError(Exception):
    """The answer to a request is an error."""

    def __init__(self, kind: ErrorKind, text: str, *, type_name: str = "", traceback: str = "") -> None:
        super().__init__(text)
        self.kind: ErrorKind = kind
        self.type_name = type_name
        self.traceback = traceback


class StepCounter:
    """Counts the steps that environments have returned from. Any thread may use it.

    With a file, the count survives SIGKILL, and a new server goes on from it. The file is one decimal number.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Count from the number in the file, or from 0.

        Raises:
            ConfigurationError: the file cannot be used.
        """
        self._lock = threading.Lock()
        self._file: int | None = None
        self.num_steps = 0
        """Steps so far."""
        if path is None:
            return
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            text = os.pread(self._file, 64, 0).decode()
            self.num_steps = int(text) if text.strip() else 0
            self._write()
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the file of steps {path} cannot be used: {error}") from error

    def add(self) -> None:
        """Count one step."""
        with self._lock:
            self.num_steps += 1
            self._write()

    def _write(self) -> None:
        if self._file is not None:
            os.pwrite(self._file, b"%020d\n" % self.num_steps, 0)


@dataclass(frozen=True, kw_only=True)
class SessionSpaces:
    """The spaces of a session's environment, as JSON."""

    observation: dict[str, Any]
    action: dict[str, Any]


class _Session:
    """One environment, its thread, and its last answer."""

    def __init__(self, name: str, source: EnvironmentSource, counter: StepCounter, *, now: float) -> None:
        self.last_request = now
        self._source = source
        self._counter = counter
        self._env: gymnasium.Env[Any, Any] | None = None
        self._key = 0
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        # Daemonic: an environment whose step never returns must not keep the server alive.
        self._thread = threading.Thread(target=self._run, name=f"session-{name}", daemon=True)
        self._thread.start()
        self.made: Future[SessionSpaces] = self._submit(self._make)
        """The spaces, once the environment is made."""
        self._answer: Future[Any] = self.made

    @property
    def is_busy(self) -> bool:
        """Whether its thread is in the environment."""
        return not self._answer.done()

    def call(self, key: int, job: Callable[[gymnasium.Env[Any, Any]], Any]) -> Future[Any]:
        """Return the answer to the request with that key. The job of a repeated key is ignored.

        Raises:
            SessionError: the key is neither the last one nor the next.
        """
        if key == self._key:
            return self._answer
        if key != self._key + 1:
            raise SessionError("wrong_key", f"key is {key}; allowed: {self._key} (a repeat) or {self._key + 1}")
        self._key = key
        self._answer = self._submit(lambda: job(self._opened()))
        return self._answer

    def close(self) -> Future[None]:
        """Close the environment and end the thread. The rest of its jobs come first."""
        closed = self._submit(self._close)
        self._jobs.put(None)
        return closed

    def step(self, action: Any) -> Callable[[gymnasium.Env[Any, Any]], dict[str, Any]]:
        """Return the job of a step."""

        def job(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
            result: Any = env.step(decode_element(env.action_space, action))
            self._counter.add()
            names = ("observation", "reward", "terminated", "truncated", "info")
            if not isinstance(result, tuple) or len(result) != len(names):
                raise TypeError(f"step() returned {type(result).__name__}, not ({', '.join(names)})")
            return dict(zip(names, map(encode, result), strict=True))

        return job

    def _opened(self) -> gymnasium.Env[Any, Any]:
        assert self._env is not None, "an environment that cannot be made has no session"
        return self._env

    def _make(self) -> SessionSpaces:
        env = make_environment(self._source)
        try:
            EnvironmentInterface.of(env)  # raises if a space is not supported
            spaces = SessionSpaces(
                observation=encode_space(env.observation_space), action=encode_space(env.action_space)
            )
        except BaseException:
            env.close()
            raise
        self._env = env
        return spaces

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _submit(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            try:
                future.set_result(job())
            except USERS_ERRORS as error:
                future.set_exception(_as_session_error(error))


class Sessions:
    """The open sessions by name."""

    def __init__(
        self,
        source: EnvironmentSource,
        *,
        counter: StepCounter | None = None,
        max_sessions: int = 1024,
        idle_seconds: float = 300.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make environments of ``source``.

        Args:
            source: The environment; the arguments of a session are added to its own.
            counter: Counts the steps.
            max_sessions: The most sessions at a time.
            idle_seconds: Seconds without a request after which ``expire`` ends a session.
            now: The time in seconds.
        """
        self.source = source
        self.counter = counter or StepCounter()
        self.idle_seconds = idle_seconds
        self._max_sessions = max_sessions
        self._now = now
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, name: str, kwargs: Mapping[str, Any], place: Mapping[str, Any] | None) -> Future[SessionSpaces]:
        """Return the spaces of the session of that name, which is new unless it exists.

        Raises:
            SessionError: an argument is invalid, or there are ``max_sessions`` sessions.
        """
        if (session := self._sessions.get(name)) is not None:
            session.last_request = self._now()
            return session.made
        if len(self._sessions) >= self._max_sessions:
            raise SessionError("full", f"the server has {len(self._sessions)} sessions; allowed: {self._max_sessions}")
        session = self._sessions[name] = _Session(name, self._with(kwargs, place), self.counter, now=self._now())
        return session.made

    def reset(self, name: str, key: int, seed: int | None, options: dict[str, Any] | None) -> Future[dict[str, Any]]:
        """Return the observation and ``info`` of a reset.

        Raises:
            SessionError: there is no such session, or the key is wrong.
        """

        def job(env: gymnasium.Env[Any, Any]) -> dict[str, Any]:
            result: Any = env.reset(seed=seed, options=None if options is None else decode(options))
            if not isinstance(result, tuple) or len(result) != 2:
                raise TypeError(f"reset() returned {type(result).__name__}, not (observation, info)")
            return dict(zip(("observation", "info"), map(encode, result), strict=True))

        return self._session(name).call(key, job)

    def step(self, name: str, key: int, action: Any) -> Future[dict[str, Any]]:
        """Return the five values of a step, by name.

        Raises:
            SessionError: there is no such session, or the key is wrong.
        """
        session = self._session(name)
        return session.call(key, session.step(action))

    def close(self, name: str) -> Future[None] | None:
        """End a session. Return its end, or None if there is no such session."""
        session = self._sessions.pop(name, None)
        return None if session is None else session.close()

    def expire(self) -> None:
        """End the sessions that are idle for too long."""
        oldest = self._now() - self.idle_seconds
        for name, session in list(self._sessions.items()):
            if session.last_request < oldest and not session.is_busy:
                _log.info("session_expired", session=name, idle_seconds=self.idle_seconds)
                self.close(name)

    def close_all(self) -> list[Future[None]]:
        """End all sessions, and return their ends."""
        return [ended for name in list(self._sessions) if (ended := self.close(name)) is not None]

    def _session(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is None:
            raise SessionError(
                "unknown_session",
                f"there is no session {name!r}: it was closed, had no request for {self.idle_seconds:g} s, or belongs "
                "to an earlier life of the server",
            )
        session.last_request = self._now()
        return session

    def _with(self, kwargs: Mapping[str, Any], place: Mapping[str, Any] | None) -> EnvironmentSource:
        try:
            decoded = None if place is None else EnvironmentPlace(**place)
        except TypeError as error:
            raise SessionError("invalid", f"place is {dict(place or {})}: {error}") from error
        return replace(self.source, kwargs={**self.source.kwargs, **decode(kwargs)}, place=decoded)


def _as_session_error(error: BaseException) -> SessionError:
    """Return what the client gets to know of an error in a session's thread."""
    if isinstance(error, ConfigurationError):
        return SessionError("configuration", str(error))
    if isinstance(error, CodecError):
        return SessionError("invalid", str(error))
    text = ""
    with suppress(Exception):
        text = str(error)
    return SessionError("environment", text, type_name=type(error).__name__, traceback=users_traceback(error))
