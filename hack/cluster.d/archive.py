#!/usr/bin/env python3
"""Reads image archives of docker and buildah: a docker-archive or an oci-archive.

archive.py names ARCHIVE: print a line `NAME DIGEST` for each image, with the full name that a kubelet requests.
archive.py stream ARCHIVE: write an oci-archive to standard output, without the blobs whose digests are on standard
  input, one a line. containerd has those blobs; a changed image has few new ones.
"""

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Mapping
from typing import Any

OCI = "application/vnd.oci.image"
NAME = "io.containerd.image.name"
REFERENCE = "org.opencontainers.image.ref.name"


def full_name(name: str) -> str:
    """Return the full name: `worker` is docker.io/library/worker:latest, `a/b:dev` is docker.io/a/b:dev."""
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif first != "localhost" and "." not in first and ":" not in first:
        name = f"docker.io/{name}"
    return name if ":" in name.rsplit("/", 1)[1] else f"{name}:latest"


def described(kind: str, content: bytes) -> tuple[str, dict[str, Any]]:
    """Return digest and descriptor of a blob."""
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return digest, {"mediaType": f"{OCI}.{kind}", "digest": digest, "size": len(content)}


class Archive:
    """An archive: its `images` as descriptors with full names, and their `blobs` by digest."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self.archive = archive
        self.files = {member.name: member for member in archive}
        self.blobs: dict[str, tarfile.TarInfo | bytes] = {}
        self.images: list[dict[str, Any]] = []
        if "index.json" in self.files:  # an archive of both kinds is read as containerd reads it
            self._read_oci()
        elif "manifest.json" in self.files:
            self._read_docker()
        else:
            raise ValueError("no index of images")

    def _content(self, name: str) -> bytes:
        file = self.archive.extractfile(self.files[name])
        return file.read() if file else b""

    def _read_oci(self) -> None:
        self.blobs.update(
            (f"sha256:{os.path.basename(name)}", self.files[name]) for name in self.files if "/sha256/" in name
        )
        for image in json.loads(self._content("index.json"))["manifests"]:
            notes = image.get("annotations", {})
            name = notes.get(NAME) or notes.get(REFERENCE, "")
            if "/" in name or ":" in name:  # else the name is only a tag
                self.images.append({**image, "annotations": {NAME: full_name(name)}})

    def _read_docker(self) -> None:
        """Read a docker-archive. Its layers are not compressed, so their digests are those in the configuration."""
        for image in json.loads(self._content("manifest.json")):
            content = self._content(image["Config"])
            digest, config = described("config.v1+json", content)
            self.blobs[digest] = content
            layers = []
            for digest, name in zip(json.loads(content)["rootfs"]["diff_ids"], image["Layers"], strict=True):
                file = self._followed(name)
                self.blobs[digest] = file
                layers.append({"mediaType": f"{OCI}.layer.v1.tar", "digest": digest, "size": file.size})
            content = json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode()
            digest, manifest = described("manifest.v1+json", content)
            self.blobs[digest] = content
            self.images += ({**manifest, "annotations": {NAME: full_name(name)}} for name in image["RepoTags"] or ())

    def _followed(self, name: str) -> tarfile.TarInfo:
        """Return a file of the archive and follow links: a layer of several images is stored once."""
        while (file := self.files[name]).issym():
            name = os.path.normpath(os.path.join(os.path.dirname(name), file.linkname))
        return file

    def stream(self, present: set[str]) -> None:
        """Write the oci-archive."""
        index = {"schemaVersion": 2, "manifests": self.images}
        head: Mapping[str, bytes] = {
            "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
            "index.json": json.dumps(index).encode(),
        }
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as out:
            for name, content in head.items():
                add(out, name, content)
            for digest in self.blobs.keys() - present:
                blob, name = self.blobs[digest], f"blobs/{digest.replace(':', '/')}"
                if isinstance(blob, bytes):
                    add(out, name, blob)
                else:
                    entry = tarfile.TarInfo(name)
                    entry.size = blob.size
                    out.addfile(entry, self.archive.extractfile(blob))


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file."""
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def main(command: str, path: str) -> None:
    """Run the command, or exit with a message if the archive is invalid."""
    try:
        with tarfile.open(path) as file:
            archive = Archive(file)
            if command == "stream":
                archive.stream(set(sys.stdin.read().split()))
                return
    except OSError as error:
        sys.exit(f"cluster: image: {path}: {error.strerror}")
    except (tarfile.TarError, ValueError, KeyError):
        sys.exit(f"cluster: image: {path}: neither a docker-archive nor an oci-archive")
    if not archive.images:
        sys.exit(f"cluster: image: {path}: has no name; write the archive of a NAME:TAG")
    sys.stdout.writelines(f"{image['annotations'][NAME]} {image['digest']}\n" for image in archive.images)


if __name__ == "__main__":
    main(*sys.argv[1:])
