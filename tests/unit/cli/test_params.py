"""``rlsrl params`` on run folders made here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from click.testing import CliRunner, Result
from safetensors import safe_open

from rlsrl.cli import main
from rlsrl.data.version import Version
from rlsrl.parameters.evaluations import EVALUATION_KEY
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.names import file_stem
from rlsrl.testing.clock import ManualClock
from rlsrl.testing.parameter_dbs import POLICY, make_parameters, make_state, stored


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    config = structlog.get_config()
    yield
    structlog.configure(**config)


NETWORK = {"layer.weight": [60, 49], "layer.bias": [60]}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three versions, in the current folder's runs/."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "cartpole"
    db = FilesystemParameterDB(folder / "parameters", clock=ManualClock(time=1_800_000_000.0))
    for step in (0, 64, 128):
        metadata = {
            "env_steps": step * 2048,
            "return_mean": step / 3,
            "program": {"layers": [step] * 100},
            "network": NETWORK,
        }
        db.push(POLICY, make_parameters(Version(1, step), size=3000, mean=np.zeros(4)), metadata=metadata)
        db.save_state(POLICY, make_state(Version(1, step)))
    db.tag(POLICY, Version(1, 64), "best")
    return folder


def database(run: Path) -> FilesystemParameterDB:
    return FilesystemParameterDB(run / "parameters")


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["params", *map(str, arguments)])


def output(*arguments: str | Path) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str | Path) -> str:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert isinstance(result.exception, SystemExit)
    return result.stderr


def test_list_is_a_table_of_versions(run: Path) -> None:
    header, *rows = output("list", run).splitlines()
    assert header.split() == ["VERSION", "TAGS", "ENV", "STEPS", "RETURN", "EVALUATION", "CREATED", "SIZE", "RESUMABLE"]
    assert [row.split()[:5] for row in rows] == [
        ["1.0", "-", "0", "0", "-"],
        ["1.64", "best", "131,072", "21.3333", "-"],
        ["1.128", "-", "262,144", "42.6667", "-"],
    ]
    assert all("2027-01-15T08:00:00Z" in row and "KiB" in row for row in rows)
    assert rows[2].endswith("yes")
    columns = {row.index("2027-01-15") for row in rows}
    assert columns == {header.index("CREATED")}


def test_list_shows_evaluations(run: Path) -> None:
    database(run).annotate(POLICY, Version(1, 64), {EVALUATION_KEY: {"episodes": 20, "return_mean": 481.25}})
    database(run).annotate(POLICY, Version(1, 128), {EVALUATION_KEY: {"unfinished": "no episode ended"}})

    _, *rows = output("list", run).splitlines()

    assert [row.split()[4] for row in rows] == ["-", "481.25", "unfinished"]


def test_list_as_json(run: Path) -> None:
    versions = json.loads(output("list", run, "--json"))
    assert [version["version"] for version in versions] == ["1.0", "1.64", "1.128"]
    nbytes = [version.pop("nbytes") for version in versions]
    assert all(12_000 < size < 16_000 for size in nbytes)
    assert versions[1] == {
        "policy": "default",
        "version": "1.64",
        "tags": ["best"],
        "created_at": "2027-01-15T08:00:00Z",
        "num_parameters": 3000,
        "has_state": True,
        "metadata": {
            "env_steps": 131072,
            "return_mean": 64 / 3,
            "program": {"layers": [64] * 100},
            "network": NETWORK,
        },
        "damage": None,
    }


@pytest.mark.parametrize("part", ["versions", "states"])
def test_damaged_versions_are_marked(run: Path, part: str) -> None:
    newest = run / "parameters" / POLICY / part / f"{file_stem(Version(1, 128))}.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)

    lines = output("list", run).splitlines()

    assert [line.split()[-1] for line in lines[1:4]] == ["yes", "yes", "damaged"]
    reason = f"{POLICY}/{part}/{newest.name}: the checksum of the arrays does not match"
    assert lines[4:] == [f"1.128 is damaged: {reason}"]
    damage = {each["version"]: each["damage"] for each in json.loads(output("list", run, "--json"))}
    assert damage == {"1.0": None, "1.64": None, "1.128": reason}
    if part == "versions":
        assert reason in refusal("show", run, "1.128")
    else:
        assert f"damage: {reason}" in output("show", run, "1.128").splitlines()
    assert "damage: none" in output("show", run, "1.64").splitlines()


def test_a_version_without_a_readable_header_is_listed(run: Path) -> None:
    for path in (run / "parameters" / POLICY / "versions").glob("*.safetensors"):
        path.write_bytes(b"")
    rows = output("list", run).splitlines()[1:4]
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [
        ("1.0", "damaged"),
        ("1.64", "damaged"),
        ("1.128", "damaged"),
    ]


def test_a_run_is_a_folder_or_a_name_in_runs(run: Path) -> None:
    assert output("list", "cartpole") == output("list", "runs/cartpole") == output("list", run)


@pytest.mark.parametrize("reference", [[], ["latest"], ["1.128"]])
def test_show_tells_all_of_one_version(run: Path, reference: list[str]) -> None:
    lines = output("show", run, *reference).splitlines()
    shown = dict(line.split(": ", 1) for line in lines)
    assert shown["version"] == "1.128"
    assert shown["parameters"] == "3,000"
    assert shown["state"].startswith("yes")
    assert shown["layout"] == "layout-1"
    assert shown["statistics"] == '{"mean": [4]}'
    assert shown["metadata.env_steps"] == "262144"
    assert shown["metadata.program"].endswith("(512 characters: see --json)")


def test_show_as_json_cuts_nothing(run: Path) -> None:
    shown: dict[str, Any] = json.loads(output("show", run, "best", "--json"))
    assert (shown["version"], shown["tags"], shown["statistics"]) == ("1.64", ["best"], {"mean": [4]})
    assert shown["metadata"]["program"] == {"layers": [64] * 100}


def test_tag_names_a_version_for_good(run: Path) -> None:
    assert output("tag", run, "1.0", "first", "keep") == "1.0: first, keep\n"
    assert output("tag", run, "latest", "best") == "1.128: best\n"
    assert {str(info.version): info.tags for info in database(run).versions(POLICY)} == {
        "1.0": ("first", "keep"),
        "1.64": (),
        "1.128": ("best",),
    }


def test_prune_removes_old_versions_without_tags(run: Path) -> None:
    assert output("prune", run, "--keep-last", "5").startswith("removed 0 of 3 versions (0 B of weights)")
    assert output("prune", run, "--keep-last", "1").startswith("removed 1 of 3 versions")
    assert stored(database(run)) == ["1.64", "1.128"]
    output("tag", run, "latest", "best")
    removed = json.loads(output("prune", run, "--keep-last", "0", "--json"))
    assert removed["removed"] == ["1.64"]
    assert removed["nbytes"] > 12_000
    assert stored(database(run)) == ["1.128"]


def test_an_export_contains_everything(run: Path, tmp_path: Path) -> None:
    database(run).annotate(POLICY, Version(1, 64), {"evaluation": {"return_mean": 475.5}})
    target = tmp_path / "best.safetensors"
    assert output("export", run, "best", "-o", target).startswith(f"1.64: {target} (")
    with safe_open(target, framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("layer.weight"), np.full((60, 49), 64, np.float32))
        np.testing.assert_array_equal(file.get_tensor("layer.bias"), np.full(60, 64, np.float32))
        assert file.get_tensor("statistics/mean").shape == (4,)
        assert file.metadata()["version"] == "1.64"
        metadata = json.loads(file.metadata()["metadata"])
    assert (metadata["env_steps"], metadata["evaluation"]) == (131072, {"return_mean": 475.5})


def test_an_export_replaces_a_file_only_with_force(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    target.write_bytes(b"precious")
    assert "--force replaces it" in refusal("export", run, "-o", target)
    assert target.read_bytes() == b"precious"
    output("export", run, "-o", target, "--force")
    with safe_open(target, framework="numpy") as file:
        assert file.metadata()["version"] == "1.128"
    assert "does not exist" in refusal("export", run, "-o", tmp_path / "missing" / "weights.safetensors")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["list", "cartpol"], "did you mean 'cartpole'?"),
        (["list", "."], "is not a run folder"),
        (["list", "cartpole", "--policy", "defualt"], "did you mean 'default'?"),
        (["show", "cartpole", "bset"], "did you mean 'best'?"),
        (["show", "cartpole", "1.65"], "nearest: 1.64"),
        (["tag", "cartpole", "1.65", "final"], "stored: 1.0, 1.64, 1.128"),
        (["tag", "cartpole", "latest", "a/b"], "allowed"),
        (["tag", "cartpole", "latest", "1.64"], "already name versions"),
        (["prune", "cartpole", "--policy", "x", "--keep-last", "1"], "stored policies: default"),
        (["prune", "cartpole", "--keep-last", "-1"], "x>=0"),
    ],
)
def test_errors_name_the_valid_values(run: Path, arguments: list[str], says: str) -> None:
    assert says in refusal(*arguments)
    assert stored(database(run)) == ["1.0", "1.64", "1.128"]
    assert not (run / "parameters" / "x").exists()


def test_damage_is_reported_on_stderr(run: Path) -> None:
    versions = run / "parameters" / POLICY / "versions"
    header = versions / f"{file_stem(Version(1, 64))}.safetensors"
    header.write_bytes(header.read_bytes().replace(b"layout-1", b"layout-2"))
    arrays = versions / f"{file_stem(Version(1, 128))}.safetensors"
    arrays.write_bytes(arrays.read_bytes()[:-1] + b"!")
    result = call("list", run, "--json")
    damaged = {version["version"] for version in json.loads(result.stdout) if version["damage"] is not None}
    assert damaged == {"1.64", "1.128"}
    assert "parameters_corrupt" in result.stderr
    assert "000128" in refusal("show", run, "1.128")
    assert json.loads(output("show", run, "--json"))["version"] == "1.0"


def test_the_command_needs_neither_torch_nor_gymnasium(run: Path) -> None:
    code = (
        "import sys; from rlsrl.cli import main; main(['params', 'list', 'cartpole'], standalone_mode=False);"
        "sys.exit(','.join({'torch', 'gymnasium', 'grpc'} & set(sys.modules)) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
