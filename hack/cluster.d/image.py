#!/usr/bin/env python3
"""image.py OUT.tar NAME:TAG PROGRAM: a docker-archive of one static program at the root, made without an engine."""

import hashlib
import io
import json
import os
import sys
import tarfile


def add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    """Adds a file owned by root with no date, so that equal content is an equal archive."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))


def main(out: str, name: str, program: str) -> None:
    """Writes the archive `out` of an image `name` whose entry point is `program`."""
    path = os.path.basename(program)
    layer = io.BytesIO()
    with open(program, "rb") as file, tarfile.open(fileobj=layer, mode="w") as archive:
        add(archive, path, file.read(), 0o755)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    config = json.dumps(
        {
            "architecture": machine,
            "os": "linux",
            "config": {"Entrypoint": [f"/{path}"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(out, "w") as archive:
        add(archive, f"{digest}/layer.tar", layer.getvalue())
        add(archive, config_name, config)
        add(archive, "manifest.json", json.dumps(manifest).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
