"""The messages between an environment server and its clients, version 1 (``docs/environments-over-http.md``).

Requests of a session have keys: 1, 2, 3, ... A repeated key gets the recorded answer, and the environment is not called
again. Any other key is an error.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL = 1
"""The version in every path."""
PREFIX = f"/v{PROTOCOL}"
STATE = f"{PREFIX}/state"
SPACES = f"{PREFIX}/spaces"
SESSIONS = f"{PREFIX}/sessions"

ErrorKind = Literal["environment", "configuration", "unknown_session", "wrong_key", "invalid", "unauthorized", "full"]
"""``environment``: the environment raised an error (500). ``configuration``: it cannot be made as asked for (422).
``unknown_session``: the session has expired, was closed, or belongs to an earlier life of the server (404).
``wrong_key``: neither the last key nor the next one (409). ``invalid``: the request is malformed (422).
``unauthorized``: the token is missing or wrong (401). ``full``: the server has its largest number of sessions (503)."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerState(_Message):
    """The answer to ``GET /v1/state``."""

    protocol: int = PROTOCOL
    environment: str = Field(description="What each session makes: a Gymnasium id or a factory.")
    num_sessions: int = Field(description="Open sessions.")
    num_steps: int = Field(description="Steps of all sessions that the environments have returned from.")


class Spaces(_Message):
    """The answer to ``GET /v1/spaces``: the spaces of an environment with the server's own arguments."""

    observation_space: dict[str, Any]
    action_space: dict[str, Any]


class SessionRequest(_Message):
    """The body of ``PUT /v1/sessions/{session}``."""

    kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments beside those of the server.")
    place: dict[str, Any] | None = Field(
        default=None, description="The place of the environment in its experiment; null: not passed on."
    )


class SessionReply(_Message):
    """The answer to ``PUT /v1/sessions/{session}``: the session exists."""

    observation_space: dict[str, Any]
    action_space: dict[str, Any]
    idle_seconds: float = Field(description="Seconds without a request after which the session ends.")


class ResetRequest(_Message):
    """The body of ``POST /v1/sessions/{session}/reset``."""

    key: int = Field(ge=1)
    seed: int | None = None
    options: dict[str, Any] | None = None


class ResetReply(_Message):
    """The answer to a reset."""

    observation: Any
    info: Any = None


class StepRequest(_Message):
    """The body of ``POST /v1/sessions/{session}/step``."""

    key: int = Field(ge=1)
    action: Any


class StepReply(_Message):
    """The answer to a step."""

    observation: Any
    reward: Any = Field(description='A number, or {"$float": "NaN"}.')
    terminated: Any
    truncated: Any
    info: Any = None


class ErrorReply(_Message):
    """The body of each answer that is an error."""

    error: ErrorKind
    message: str
    type: str = Field(default="", description="The type of the environment's error.")
    traceback: str = Field(default="", description="The environment's traceback.")
