"""The archive of a user's image: modules on top of a worker's image, as the Dockerfile of the documents makes one.

No engine is needed, so the archive is the same with docker and with buildah.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = "opt/project"
"""The folder of the modules, without the root's slash. It is on ``PYTHONPATH``."""
_INDICES = frozenset({"manifest.json", "repositories", "index.json", "oci-layout"})
"""Files of an archive that list its images. The new archive has the first one alone."""


def write_user_image(archive: Path, *, base: Path, name: str, modules: Mapping[str, str]) -> None:
    """Write the docker-archive of an image.

    Args:
        archive: The file to write.
        base: The docker-archive of the image below, one image alone.
        name: ``NAME:TAG`` of the new image.
        modules: The modules' texts, by the names of their files.
    """
    layer = _layer(modules)
    digest = hashlib.sha256(layer).hexdigest()
    with tarfile.open(base) as old, tarfile.open(archive, "w") as new:
        (image,) = json.loads(_content(old, "manifest.json"))
        config: dict[str, Any] = json.loads(_content(old, image["Config"]))
        config["config"]["Env"].append(f"PYTHONPATH=/{FOLDER}")
        config["rootfs"]["diff_ids"].append(f"sha256:{digest}")
        config["history"] += [{"created_by": "COPY modules"}, {"created_by": "ENV PYTHONPATH", "empty_layer": True}]
        described = json.dumps(config).encode()
        config_name, layer_name = f"{hashlib.sha256(described).hexdigest()}.json", f"{digest}.tar"
        for member in old:
            if member.name not in _INDICES:
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
        listed = {"Config": config_name, "RepoTags": [name], "Layers": [*image["Layers"], layer_name]}
        _add(new, layer_name, layer)
        _add(new, config_name, described)
        _add(new, "manifest.json", json.dumps([listed]).encode())


def _layer(modules: Mapping[str, str]) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as layer:
        folder = tarfile.TarInfo(FOLDER)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        layer.addfile(folder)
        for name, text in modules.items():
            _add(layer, f"{FOLDER}/{name}", text.encode())
    return found.getvalue()


def _content(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, name
    return file.read()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))
