"""Mutual TLS between workers: where the certificates are, when they are read, and whom they have to name.

New certificates are looked for at each connection, so that they are used without a restart; connections that stand are
not touched. docs/decisions/0018 says why a server is known by one name, and a client by the token.
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
"""Environment variable with the folder of the certificates. Without it nothing is encrypted."""
TLS_NAME_VARIABLE = "RLSRL_TLS_NAME"
"""Environment variable with the name that the workers' certificates have to carry."""
CERTIFICATE = "tls.crt"
KEY = "tls.key"
AUTHORITIES = "ca.crt"
FILES = (CERTIFICATE, KEY, AUTHORITIES)
"""As a Secret of the type kubernetes.io/tls has them: this worker's chain, its key, and the authorities it trusts."""

_MAX_READS = 5
"""Tries to read files that do not change meanwhile."""
_Signature = tuple[tuple[int, int, int], ...]

_log = structlog.stdlib.get_logger(__name__)


class TlsUnusable(Exception):
    """The certificates cannot be used; the text says which file, and why. Mending the Secret mends it."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class _Certificates:
    """PEM, of one and the same Secret."""

    chain: bytes
    key: bytes
    authorities: bytes

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], root_certificates=self.authorities)


class Tls:
    """Certificates that a kubelet keeps up to date in a folder. Any thread may call anything.

    Files that cannot be used are told in the log, and those before them are kept.
    """

    def __init__(self, *, folder: Path, peer_name: str) -> None:
        """Read ``FILES`` in ``folder``.

        Args:
            folder: where they are, PEM, and where others will be in their place.
            peer_name: the DNS name that a server's certificate has to carry; pods are dialled by addresses, which no
                certificate can name beforehand.

        Raises:
            TlsUnusable: the files are not what they should be.
        """
        self.peer_name = peer_name
        self._folder = folder
        self._lock = threading.Lock()
        self._seen, self._newest = self._read()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """A client's; a channel keeps those that it was made with."""
        newest = self.newest()
        return grpc.ssl_channel_credentials(
            root_certificates=newest.authorities, private_key=newest.key, certificate_chain=newest.chain
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """A server's, which asks each client for a certificate and looks for new files at each connection."""
        shown = self.newest()

        def look() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC's threads before each handshake; None keeps what there is."""
            nonlocal shown
            before, shown = shown, self.newest()
            return None if shown is before else shown.for_server()

        return grpc.dynamic_ssl_server_credentials(
            shown.for_server(),
            look,  # type: ignore[arg-type]  # the stubs do not know that it may return None
            require_client_authentication=True,
        )

    def newest(self) -> _Certificates:
        """The same object until the files are others."""
        with self._lock:
            try:
                if (signature := self._signature()) != self._seen:
                    self._seen = signature  # and if they are no good, that is told once
                    self._seen, self._newest = self._read()
                    _log.info("certificates_replaced", folder=str(self._folder))
            except TlsUnusable as error:
                _log.warning("certificates_unusable", reason=str(error))
            return self._newest

    def _signature(self) -> _Signature:
        """What differs once a file has been replaced."""
        try:
            found = [(self._folder / name).stat() for name in FILES]
        except OSError as error:
            raise TlsUnusable(f"certificates: {error.filename}: {error.strerror}") from error
        return tuple((each.st_dev, each.st_ino, each.st_mtime_ns) for each in found)

    def _read(self) -> tuple[_Signature, _Certificates]:
        """All files of one Secret: a kubelet replaces them together, but perhaps between two of our reads."""
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
            # A key that wants a password is none of ours; without the callback a terminal would be asked for it.
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
    """What this process was started with; None where workers talk without TLS.

    Raises:
        TlsUnusable: a folder is named and no name, or files are missing or wrong.
    """
    if not (folder := environ.get(TLS_FOLDER_VARIABLE, "")):
        return None
    if not (name := environ.get(TLS_NAME_VARIABLE, "")):
        raise TlsUnusable(f"certificates: {TLS_FOLDER_VARIABLE} is set and {TLS_NAME_VARIABLE} is not")
    return Tls(folder=Path(folder), peer_name=name)
