"""The local cluster's image store: a new image keeps the layers that it shares with the replaced one."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("RLSRL_CLUSTER_BACKEND") == "kind", reason="kind has image stores of its own"),
]

REPOSITORY = Path(__file__).parents[2]
NAME = "docker.io/rlsrl/replaced:1"
LOAD = """
set -euo pipefail
. hack/cluster.d/settings.sh
. hack/cluster.d/store.sh
mkdir -p "$CACHE"
ctr() { # garbage is collected at the worst moment: an image has its name, and is not unpacked
  if [[ $* == 'images import -' ]]; then
    cat >"$CACHE/given.tar"
    command ctr images import --no-unpack "$CACHE/given.tar" >/dev/null
    collect_garbage
    command ctr snapshots ls >&3
    command ctr images import "$CACHE/given.tar" >/dev/null
  else
    command ctr "$@"
  fi
}
load_and_look() {
  import "$1"
  echo at last:
  ctr images ls --quiet
  ctr snapshots ls
}
with_store load_and_look "$1" 3>&1
"""


def archive(path: Path, *layers: str) -> tuple[Path, str]:
    """Write a docker-archive of NAME with one file in each layer; return the lowest layer's digest."""
    contents = []
    for text in layers:
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as file:
            entry = tarfile.TarInfo(text)
            entry.size = len(text)
            file.addfile(entry, io.BytesIO(text.encode()))
        contents.append(layer.getvalue())
    digests = [hashlib.sha256(content).hexdigest() for content in contents]
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]}
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    config = {"architecture": machine, "os": "linux", "config": {}, "rootfs": rootfs}
    manifest = [{"Config": "config.json", "RepoTags": [NAME], "Layers": digests}]
    files = dict(zip(digests, contents, strict=True))
    files |= {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(path, "w") as image:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            image.addfile(entry, io.BytesIO(content))
    return path, f"sha256:{digests[0]}"


def load(image: Path, cache: Path) -> tuple[str, str]:
    """Return the snapshots after a garbage collection during the import, and names and snapshots at the end."""
    made = subprocess.run(
        ["bash", "-c", LOAD, "load", str(image)],
        cwd=REPOSITORY,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    during, _, after = made.stdout.partition("at last:\n")
    return during, after


def test_shared_layers_stay_while_an_image_replaces_another(tmp_path: Path) -> None:
    first, common = archive(tmp_path / "first.tar", "common", "one")
    second, _ = archive(tmp_path / "second.tar", "common", "two")
    during, after = load(first, tmp_path)
    assert common not in during
    assert common in after
    during, after = load(second, tmp_path)
    assert common in during
    assert common in after
    assert after.splitlines()[0] == NAME
    assert after.count("Committed") == 2
    assert load(second, tmp_path)[0] == ""
