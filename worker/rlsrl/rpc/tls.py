"""Mutual TLS between workers: where the certificates are, when they are read, and which name they must carry.

Each new connection checks for new certificates, so they are used without a restart. Open connections do not change.
docs/decisions/0018 says why all servers have one name, and why clients are known by the token.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

TLS_FOLDER_VARIABLE = "RLSRL_TLS_FOLDER"
"""Environment variable with the certificates' folder. Without it, connections are not encrypted."""
TLS_NAME_VARIABLE = "RLSRL_TLS_NAME"
"""Environment variable with the name that the workers' certificates must carry."""
CERTIFICATE = "tls.crt"
KEY = "tls.key"
AUTHORITIES = "ca.crt"
FILES = (CERTIFICATE, KEY, AUTHORITIES)
"""File names of a Secret of type kubernetes.io/tls: the worker's chain, its key, and the trusted authorities."""

_MAX_READS = 5
"""Attempts to read the files without a change in between."""
_Signature = tuple[tuple[int, int, int], ...]

_log = structlog.stdlib.get_logger(__name__)


class TlsUnusable(Exception):
    """The certificates cannot be used. The text names the file and the reason; correct the Secret."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class _Certificates:
    """The files of one Secret, in PEM."""

    chain: bytes
    key: bytes
    authorities: bytes

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], root_certificates=self.authorities)


class Tls:
    """Certificates in a folder that a kubelet updates. Any thread may call any method.

    If new files cannot be used, a warning is logged and the previous certificates stay in use.
    """

    def __init__(self, *, folder: Path, peer_name: str) -> None:
        """Read ``FILES`` in ``folder``.

        Args:
            folder: the folder of the PEM files, where a kubelet replaces them.
            peer_name: the DNS name that a server's certificate must carry. Clients connect to pods by addresses, which
                no certificate can contain in advance.

        Raises:
            TlsUnusable: a file is missing or invalid.
        """
        self.peer_name = peer_name
        self._folder = folder
        self._lock = threading.Lock()
        self._seen, self._newest = self._read()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials of a client's channel. The channel keeps them."""
        newest = self.newest()
        return grpc.ssl_channel_credentials(
            root_certificates=newest.authorities, private_key=newest.key, certificate_chain=newest.chain
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for a server that requires client certificates; each connection checks for new files."""
        shown = self.newest()

        def replacement() -> grpc.ServerCertificateConfiguration | None:
            """Return new certificates; None if they did not change. gRPC's threads call this before each handshake."""
            nonlocal shown
            before, shown = shown, self.newest()
            return None if shown is before else shown.for_server()

        return grpc.dynamic_ssl_server_credentials(
            shown.for_server(),
            replacement,  # type: ignore[arg-type]  # the stubs do not know that it may return None
            require_client_authentication=True,
        )

    def newest(self) -> _Certificates:
        """Return the newest usable certificates. The object is the same until the files change."""
        with self._lock:
            try:
                if (signature := self._signature()) != self._seen:
                    self._seen = signature  # unusable files are logged once
                    self._seen, self._newest = self._read()
                    _log.info("certificates_replaced", folder=str(self._folder))
            except TlsUnusable as error:
                _log.warning("certificates_unusable", reason=str(error))
            return self._newest

    def _signature(self) -> _Signature:
        """Return a value that changes when a file is replaced."""
        try:
            found = [(self._folder / name).stat() for name in FILES]
        except OSError as error:
            raise TlsUnusable(f"certificates: {error.filename}: {error.strerror}") from error
        return tuple((each.st_dev, each.st_ino, each.st_mtime_ns) for each in found)

    def _read(self) -> tuple[_Signature, _Certificates]:
        """Return all files of one Secret. A kubelet may replace the files between two reads."""
        for _ in range(_MAX_READS):
            before = self._signature()
            try:
                certificates = self._load()
            except TlsUnusable:
                if self._signature() == before:
                    raise
            else:
                if self._signature() == before:
                    return before, certificates
        raise TlsUnusable(f"certificates: the files in {self._folder} change faster than they can be read")

    def _load(self) -> _Certificates:
        chain, key, authorities = (self._folder / name for name in FILES)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            # A key with a password is unusable. Without the callback, OpenSSL would ask for it at the terminal.
            context.load_cert_chain(chain, key, password=lambda: b"")
        except OSError as error:
            raise TlsUnusable(
                f"certificates: {chain} and {KEY} are not a chain and its key, PEM, without a password: "
                f"{_reason(error)}"
            ) from error
        try:
            context.load_verify_locations(authorities)
            return _Certificates(chain=chain.read_bytes(), key=key.read_bytes(), authorities=authorities.read_bytes())
        except OSError as error:
            raise TlsUnusable(f"certificates: {authorities} holds no certificates, PEM: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error)


def tls_from_environment(environ: Mapping[str, str] = os.environ) -> Tls | None:
    """Return this process's certificates; None if workers connect without TLS.

    Raises:
        TlsUnusable: the folder is set but the name is not, or a file is missing or invalid.
    """
    if not (folder := environ.get(TLS_FOLDER_VARIABLE, "")):
        return None
    if not (name := environ.get(TLS_NAME_VARIABLE, "")):
        raise TlsUnusable(f"certificates: {TLS_FOLDER_VARIABLE} is set and {TLS_NAME_VARIABLE} is not")
    return Tls(folder=Path(folder), peer_name=name)
