"""Environments over HTTP: their protocol, client and server."""
