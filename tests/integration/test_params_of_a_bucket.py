"""``kubectl rlsrl params`` reads the bucket of an experiment that no pod serves."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsrl.api.resolved import ObjectStoreConfig, ParameterStoreConfig
from rlsrl.api.role_configs import POLICY_NAME
from rlsrl.cli import main
from rlsrl.data.version import Version
from rlsrl.testing.cluster_objects import NAME, UID, bucket_secret, suspended_with_bucket
from rlsrl.testing.kubectl_standin import KubectlStandIn
from rlsrl.testing.parameter_dbs import make_parameters
from rlsrl.testing.s3_server import CREDENTIALS, REGION, S3Server
from rlsrl.workers.build.parameters import open_blobs


@pytest.mark.parametrize("fresh_attempt", [None, 3])
def test_a_suspended_experiment_shows_the_versions_of_its_present_run(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, fresh_attempt: int | None
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = f"suspended-{uuid.uuid4().hex}"
    s3_server.create_bucket(bucket)
    place = {"url": f"s3://{bucket}/runs", "endpoint": s3_server.endpoint, "region": REGION}
    for run, step in ((f"{NAME}-{UID}", 64), (f"{NAME}-{UID}-3", 65)):
        stored = ObjectStoreConfig.model_validate({**place, "url": f"{place['url']}/{run}", "answer_seconds": 10.0})
        open_blobs(ParameterStoreConfig(object_store=stored)).push(POLICY_NAME, make_parameters(Version(1, step)))
    for name in CREDENTIALS:  # from now on only the Secret has them
        monkeypatch.setenv(name, "wrong")

    (tmp_path / "kubectl").mkdir()
    cluster = KubectlStandIn(tmp_path / "kubectl")
    cluster.show(suspended_with_bucket(place, fresh_attempt), bucket_secret(CREDENTIALS))
    monkeypatch.setenv("PATH", f"{cluster.folder}{os.pathsep}{os.environ['PATH']}")
    listed = CliRunner().invoke(main, ["params", "list", NAME, "-n", "research", "--json"])
    assert listed.exit_code == 0, listed.output
    assert [version["version"] for version in json.loads(listed.stdout)] == [
        "1.64" if fresh_attempt is None else "1.65"
    ]
