#!/usr/bin/env python3
"""archive_names.py ARCHIVE: the images in a docker-archive or an oci-archive, each as `NAME FULL_NAME ID`.

NAME is as the archive has it, FULL_NAME with the registry and the tag that docker and a kubelet take it to have.
Equal IDs are equal images.
"""

import json
import os
import sys
import tarfile


def full_name(name: str) -> str:
    """`worker` is docker.io/library/worker:latest, `rlsrl/worker:dev` is docker.io/rlsrl/worker:dev."""
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif first != "localhost" and "." not in first and ":" not in first:
        name = f"docker.io/{name}"
    return name if ":" in name.rsplit("/", 1)[1] else f"{name}:latest"


def images(archive: tarfile.TarFile) -> list[tuple[str, str]]:
    """Name and ID of each; of an archive that is of both kinds, as containerd does: the OCI part."""
    files = {member.name: member for member in archive}
    index = next((name for name in ("index.json", "manifest.json") if name in files), None)
    file = archive.extractfile(files[index]) if index else None
    if file is None:
        raise ValueError("no index of images")
    content = json.load(file)
    if index == "manifest.json":
        return [(name, image["Config"]) for image in content for name in image["RepoTags"] or []]
    found = []
    for image in content["manifests"]:
        notes = image.get("annotations", {})
        name = notes.get("io.containerd.image.name") or notes.get("org.opencontainers.image.ref.name", "")
        if "/" in name or ":" in name:  # else it is a tag alone
            found.append((name, image["digest"]))
    return found


def main(path: str) -> None:
    """Prints them, or ends with what is wrong with the archive."""
    try:
        with tarfile.open(path) as archive:
            found = images(archive)
    except OSError as error:
        sys.exit(f"cluster: image: {path}: {error.strerror}")
    except (tarfile.TarError, ValueError):
        sys.exit(f"cluster: image: {path}: neither a docker-archive nor an oci-archive")
    if not found:
        sys.exit(f"cluster: image: {path}: has no name; write the archive of a NAME:TAG")
    sys.stdout.writelines(f"{name} {full_name(name)} {os.path.basename(identity)}\n" for name, identity in found)


if __name__ == "__main__":
    main(*sys.argv[1:])
