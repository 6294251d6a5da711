"""Environments over HTTP: protocol and client. The server is ``rlsrl.envs.http_server``."""
