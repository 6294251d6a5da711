from __future__ import annotations

from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.parameters.filesystem import FilesystemParameterDB
from rlsrl.parameters.object_store import ObjectStoreParameterDB
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.parameter_dbs import push_steps
from rlsrl.testing.s3_server import CREDENTIALS
from rlsrl.workers.build.run_database import RESOLVED, open_run_database

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: one}
spec:
  environment: {id: CartPole-v1}
  actors: {environments: 8}
  stop: {returnMean: 475}
"""
IN_A_BUCKET = "parameters.store={objectStore: {url: 's3://bucket/team', endpoint: 'http://127.0.0.1:1'}}"


def make_run(folder: Path, *overrides: str) -> Path:
    placement = local_placement(run_uid="0f3a", run_folder=folder.absolute())
    resolved = resolve(load_text(EXPERIMENT, overrides=overrides), placement)
    folder.mkdir()
    (folder / RESOLVED).write_text(resolved.to_json())
    return folder


def test_a_folder_that_was_moved_keeps_its_versions(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    push_steps(FilesystemParameterDB(run / "parameters"), 1, 2)
    moved = run.rename(tmp_path / "elsewhere")
    assert [info.version.step for info in open_run_database(moved).versions(POLICY_NAME)] == [1, 2]


def test_a_folder_without_a_started_run_has_no_versions(tmp_path: Path) -> None:
    assert open_run_database(tmp_path).policies() == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_a_bucket_is_found_with_credentials_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", IN_A_BUCKET)
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="no credentials for s3://bucket/team/one-0f3a"):
        open_run_database(run)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    assert isinstance(open_run_database(run), ObjectStoreParameterDB)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"coordinator": {"parameter_store": {}}}'])
def test_the_error_names_a_file_that_rlsrl_did_not_write(tmp_path: Path, content: str) -> None:
    (tmp_path / RESOLVED).write_text(content)
    with pytest.raises(ConfigurationError, match=r"resolved\.json is not a file of this version of rlsrl"):
        open_run_database(tmp_path)
