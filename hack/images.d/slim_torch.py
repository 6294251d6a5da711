"""Makes a wheel of PyTorch for the processor alone out of the CUDA one: ``slim_torch.py WHEEL FOLDER``.

For tests on machines that have neither a GPU nor a place with PyTorch's own CPU wheels; never for an image that is
published. The CUDA wheel needs 2 GB of NVIDIA's libraries and Triton only to be loaded. Here its requirements of them
go, and beside libtorch come empty stand-ins for the libraries, whose every function answers "no device". The version
gets the local label ``+cpu``. Takes gcc and readelf.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, ZipInfo

LIBRARY = re.compile(r"torch/lib/[^/]+\.so[.0-9]*")
NVIDIA = re.compile(r"lib(cu|nv|nccl)[^/]*\.so\.")
DRIVER = "libcuda.so.1"
"""Comes with the driver, not with a wheel: what needs it looks for it at run time."""
NVIDIA_FUNCTION = re.compile(r"_?_?(cu|nv|nccl|nvshmem)")
NVIDIA_REQUIREMENT = re.compile(r"Requires-Dist: (cuda|nvidia|triton)", re.IGNORECASE)
LEFT_OUT = re.compile(r"torch/bin/protoc|torch/test/|torch/lib/libtorch_cuda_linalg\.so$")
NO_DEVICE = 100
"""cudaErrorNoDevice."""

Functions = dict[str, dict[str, set[str]]]
"""Library -> version node, "" for none -> the functions asked of it."""


def main() -> None:
    """Write the new wheel."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    with ZipFile(source) as wheel, tempfile.TemporaryDirectory(dir=folder) as scratch:
        stand_ins = {
            f"torch/lib/{library}": _stand_in(library, nodes, Path(scratch))
            for library, nodes in _asked(wheel, Path(scratch)).items()
        }
        _write(wheel, source.name, folder, stand_ins)


def _asked(wheel: ZipFile, scratch: Path) -> Functions:
    """What the wheel's own libraries ask of NVIDIA's."""
    needed: set[str] = set()
    library_of_version: dict[str, str] = {}
    undefined: set[tuple[str, str]] = set()
    defined: set[str] = set()
    for name in filter(LIBRARY.fullmatch, wheel.namelist()):
        path = Path(wheel.extract(name, scratch))
        needed.update(re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf("--dynamic", path)))
        library_of_version.update(_version_owners(_readelf("--version-info", path)))
        for symbol, version, is_defined in _symbols(_readelf("--dyn-syms", path)):
            defined.add(symbol) if is_defined else undefined.add((symbol, version))
        path.unlink()
    asked: Functions = {library: {} for library in sorted(needed) if NVIDIA.match(library) and library != DRIVER}
    # What bears no version could be anyone's; whoever answers, answers the same.
    anyone = next(library for library in asked if library.startswith("libcudart."))
    for symbol, version in sorted(undefined):
        if symbol in defined:
            continue
        if (owner := library_of_version.get(version)) in asked:
            asked[owner].setdefault(version, set()).add(symbol)
        elif not version and NVIDIA_FUNCTION.match(symbol):
            asked[anyone].setdefault("", set()).add(symbol)
    return asked


def _readelf(what: str, path: Path) -> str:
    return subprocess.run(["readelf", what, "--wide", path], check=True, capture_output=True, text=True).stdout


def _version_owners(text: str) -> Iterator[tuple[str, str]]:
    """Version node, and the library it is asked of."""
    library = ""
    for file, version in re.findall(r"File: (\S+)|Name: (\S+)", text):
        library = file or library
        if version and library:
            yield version, library


def _symbols(text: str) -> Iterator[tuple[str, str, bool]]:
    """Name, version node, and whether the library has it itself; weak symbols that nobody need have are left out."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].endswith(":"):
            continue
        binding, section = fields[4], fields[6]
        name, _, version = fields[7].partition("@")
        if section != "UND" or binding == "GLOBAL":
            yield name, version.lstrip("@"), section != "UND"


def _stand_in(library: str, nodes: dict[str, set[str]], scratch: Path) -> bytes:
    """A library with these functions, each of which answers that there is no device."""
    source, versions, built = scratch / f"{library}.c", scratch / f"{library}.map", scratch / library
    source.write_text("".join(_function(name) for names in nodes.values() for name in sorted(names)))
    script = [f"{node} {{ global: {'; '.join(sorted(names))}; }};\n" for node, names in nodes.items() if node]
    versions.write_text("".join(script))
    command: list[str | Path] = [
        "gcc",
        "-w",
        "-fno-builtin",
        "-shared",
        "-fPIC",
        "-s",
        "-o",
        built,
        source,
        f"-Wl,-soname,{library}",
    ]
    subprocess.run([*command, *([f"-Wl,--version-script,{versions}"] if script else [])], check=True)
    return built.read_bytes()


def _function(name: str) -> str:
    if "String" in name or "Name" in name:
        return f'const char *{name}(void) {{ return "no CUDA here"; }}\n'
    return f"long {name}(void) {{ return {NO_DEVICE}; }}\n"


def _write(wheel: ZipFile, name: str, folder: Path, stand_ins: dict[str, bytes]) -> None:
    """The wheel anew; stored, not compressed, since it is read once from this machine's disk."""
    _, old_version, tags = name.removesuffix(".whl").split("-", 2)
    version = old_version.partition("+")[0] + "+cpu"
    old_info, info = f"torch-{old_version}.dist-info/", f"torch-{version}.dist-info/"
    record: list[str] = []

    def put(entry: str, data: bytes, attributes: int) -> None:
        header = ZipInfo(entry, (2026, 1, 1, 0, 0, 0))
        header.external_attr = attributes
        target.writestr(header, data)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{entry},sha256={digest},{len(data)}\n")

    with ZipFile(folder / f"torch-{version}-{tags}.whl", "w", ZIP_STORED) as target:
        for old in wheel.infolist():
            if old.filename == f"{old_info}RECORD" or LEFT_OUT.match(old.filename):
                continue
            entry = old.filename.replace(old_info, info, 1)
            data = wheel.read(old)
            put(entry, _metadata(data, version) if entry == f"{info}METADATA" else data, old.external_attr)
        for entry, data in stand_ins.items():
            put(entry, data, 0o755 << 16)
        target.writestr(f"{info}RECORD", "".join([*record, f"{info}RECORD,,\n"]))


def _metadata(data: bytes, version: str) -> bytes:
    lines = (line for line in data.decode().splitlines(keepends=True) if not NVIDIA_REQUIREMENT.match(line))
    return re.sub(r"(?m)^Version: .*$", f"Version: {version}", "".join(lines), count=1).encode()


if __name__ == "__main__":
    main()
