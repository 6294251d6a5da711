"""The tokens in a process's environment."""

from __future__ import annotations

from pathlib import Path

from rlsrl.api.tokens import reading_token, viewing_token
from rlsrl.rpc.auth import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, viewing_token_from_environment


def test_the_viewing_token_is_beside_the_token(tmp_path: Path) -> None:
    environ = {TOKEN_FILE_VARIABLE: str(tmp_path / "token")}
    assert viewing_token_from_environment(environ) == "", "an earlier operator gave none"
    (tmp_path / "viewing-token").write_text("look\n")
    assert viewing_token_from_environment(environ) == "look"
    assert viewing_token_from_environment({TOKEN_VARIABLE: "the-token"}) == ""


def test_tokens_that_allow_less_differ_by_key_and_experiment() -> None:
    tokens = [viewing_token("key", "uid"), viewing_token("key", "other"), viewing_token("another", "uid")]
    assert len({*tokens, reading_token("key"), "key"}) == 5
    assert viewing_token("key", "uid") == tokens[0]
