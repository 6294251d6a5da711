"""The committed stubs match protos/, and the required packages can import them."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = Path("rlsrl/rpc/v1")


def test_generating_again_changes_nothing(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "hack" / "protos", tmp_path],
        check=True,
        env={**os.environ, "PYTHON_BIN": str(Path(sys.executable).parent)},
    )
    generated = {path.name: path.read_text() for path in (tmp_path / PACKAGE).iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "worker" / PACKAGE).iterdir() if path.is_file()}
    committed.pop("__init__.py")
    assert set(generated) == set(committed), "run hack/protos and commit the changed files"
    assert [name for name in generated if generated[name] != committed[name]] == [], "run hack/protos"


def test_the_required_versions_are_at_least_those_of_the_stubs() -> None:
    stubs = ROOT / "worker" / PACKAGE
    protobuf = re.search(r"Protobuf Python Version: ([\d.]+)", (stubs / "coordinator_pb2.py").read_text())
    grpcio = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (stubs / "coordinator_pb2_grpc.py").read_text())
    assert protobuf is not None
    assert grpcio is not None
    project = (ROOT / "pyproject.toml").read_text()
    for name, found in (("protobuf", protobuf[1]), ("grpcio", grpcio[1])):
        required = re.search(rf'"{name}>=([\d.]+)', project)
        assert required is not None
        assert _parts(required[1]) >= _parts(found), f"{name}>={required[1]} cannot import stubs made by {found}"


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
