"""An environment in a server, as a ``gymnasium.Env``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import gymnasium
from typing_extensions import override

from rlsrl.envs.codec import decode, decode_element, decode_number, decode_space, encode
from rlsrl.envs.http.access import ServerAccess, access_to
from rlsrl.envs.http.options import HttpOptions
from rlsrl.envs.http.protocol import SESSIONS
from rlsrl.envs.place import EnvironmentPlace
from rlsrl.envs.unreachable import EnvironmentUnreachable
from rlsrl.runtime.errors import ConfigurationError


class HttpEnv(gymnasium.Env[Any, Any]):
    """One session of an environment server. Its spaces are those that the server reports.

    A request that fails is sent again with the same key, so that the environment never steps twice. After
    ``EnvironmentUnreachable`` the episode is lost; the next ``reset`` begins a new session.
    """

    def __init__(
        self,
        server: HttpOptions | ServerAccess,
        *,
        kwargs: Mapping[str, Any] | None = None,
        place: EnvironmentPlace | None = None,
    ) -> None:
        """Make an environment in the server.

        Args:
            server: The access to the server. Environments with equal options share one.
            kwargs: Arguments of the environment, beside those of the server.
            place: Passed to the environment.

        Raises:
            EnvironmentUnreachable: the server does not answer.
            RemoteEnvironmentError: the environment's own code raised an error.
            ConfigurationError: the server refuses the arguments, or its answer has no spaces.
        """
        self._server = access_to(server) if isinstance(server, HttpOptions) else server
        self._request = {"kwargs": encode(dict(kwargs or {})), "place": None if place is None else asdict(place)}
        self._path = ""
        """The path of the session's URL; empty without a session."""
        self._key = 0
        self._open()

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if not self._path:
            self._open()
        reply = self._call("reset", {"seed": seed, "options": encode(options)})
        return decode_element(self.observation_space, reply.get("observation")), _info(reply)

    @override
    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        reply = self._call("step", {"action": encode(action)})
        observation = decode_element(self.observation_space, reply.get("observation"))
        reward = decode_number(reply.get("reward"))
        return observation, reward, reply.get("terminated"), reply.get("truncated"), _info(reply)  # type: ignore[return-value]  # the caller judges them, as those of any environment

    @override
    def close(self) -> None:
        """End the session. If the server cannot be reached, the session expires."""
        path, self._path = self._path, ""
        if path:
            self._server.call_once("DELETE", path)

    @override
    def __str__(self) -> str:
        return f"the environment at {self._server.url}"

    def _open(self) -> None:
        self._path, self._key = f"{SESSIONS}/{uuid.uuid4().hex}", 0
        try:
            reply = self._server.call("PUT", self._path, self._request)
        except BaseException:
            self.close()  # the environment may exist: its answer may be late
            raise
        try:
            self.observation_space = decode_space(reply.get("observation_space"))
            self.action_space = decode_space(reply.get("action_space"))
        except ValueError as error:
            self.close()
            raise ConfigurationError(f"the environment server {self._server.url}: {error}") from error

    def _call(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if not self._path:
            raise EnvironmentUnreachable(f"{self} has lost its session: reset it")
        self._key += 1
        try:
            return self._server.call("POST", f"{self._path}/{name}", {"key": self._key, **body})
        except EnvironmentUnreachable:
            with suppress(Exception):
                self.close()
            raise


def _info(reply: Mapping[str, Any]) -> dict[str, Any]:
    info = decode(reply.get("info"))
    return info if isinstance(info, dict) else {}
