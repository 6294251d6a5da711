"""The server of environments over HTTP: its sessions, and its interface."""
