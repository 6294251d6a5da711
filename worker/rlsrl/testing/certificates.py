"""Real certificates for tests, made with ``openssl``, in folders like a kubelet's mount of a Secret."""

from __future__ import annotations

import subprocess
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rlsrl.rpc.tls import AUTHORITIES, CERTIFICATE, KEY, Tls

PEER_NAME = "tests-coordinator.tests.svc"
"""The DNS name in the workers' certificates."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, kw_only=True)
class Authority:
    """A certificate authority."""

    folder: Path
    certificate: bytes

    @classmethod
    def new(cls, folder: Path) -> Self:
        """Return a new authority with its key in ``folder``."""
        home = folder / f"authority-{uuid.uuid4().hex}"
        home.mkdir(parents=True)
        _openssl(
            "req", "-x509", *_new_key(home / KEY), "-out", home / CERTIFICATE, "-days", "2", "-subj", f"/CN={home.name}"
        )
        return cls(folder=home, certificate=(home / CERTIFICATE).read_bytes())

    def issue(self, name: str = PEER_NAME) -> Pair:
        """Return a certificate with that DNS name, valid for servers and clients."""
        key, certificate = self.folder / "issued.key", self.folder / "issued.crt"
        extensions = (f"subjectAltName=DNS:{name}", "extendedKeyUsage=serverAuth,clientAuth")
        _openssl(
            *("req", "-x509", *_new_key(key), "-out", certificate, "-days", "1", "-subj", "/CN=worker"),
            *("-CA", self.folder / CERTIFICATE, "-CAkey", self.folder / KEY),
            *(part for extension in extensions for part in ("-addext", extension)),
        )
        return Pair(certificate=certificate.read_bytes(), key=key.read_bytes())


class MountedSecret:
    """A folder whose files are replaced atomically, by a link, while others read them."""

    def __init__(self, folder: Path, pair: Pair, *authorities: Authority) -> None:
        """Create the folder with these files."""
        self.folder = folder
        folder.mkdir(parents=True)
        self.put(pair, *authorities)

    def put(self, pair: Pair, *authorities: Authority) -> None:
        """Replace the files by these."""
        contents = {CERTIFICATE: pair.certificate, KEY: pair.key}
        contents[AUTHORITIES] = b"".join(each.certificate for each in authorities)
        data = self.folder / f"..{uuid.uuid4().hex}"
        data.mkdir()
        for name, content in contents.items():
            (data / name).write_bytes(content)
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(Path("..data") / name)
        link = self.folder / "..data_new"
        link.symlink_to(data.name)
        link.rename(self.folder / "..data")

    def tls(self, peer_name: str = PEER_NAME) -> Tls:
        """Return the TLS settings of a worker with this folder."""
        return Tls(folder=self.folder, peer_name=peer_name)


def _new_key(path: Path) -> tuple[str | Path, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
