"""The next coordinator reads the documents that the previous one wrote, from each kind of store."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import Placement, cluster_placement, local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import CoordinatorConfig
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.runtime.ledger import Mark, PageRecord, Posted, PostedCount
from rlsrl.testing.s3_server import CREDENTIALS, REGION, S3Server
from rlsrl.workers.coordinator_state import read_leases, read_ledger_copies
from rlsrl.workers.documents import COORDINATORS, LEDGER_COPIES, ROSTER, open_document
from rlsrl.workers.leadership import MAX_NAMES, FencedDocument, Leadership, Superseded
from rlsrl.workers.leases import Claim, Lease

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: roster}
spec:
  environment: {id: CartPole-v1}
  actors: {environments: 8}
  stop: {envSteps: 1000}
"""


@pytest.fixture(params=["folder", "bucket"])
def config(
    request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> CoordinatorConfig:
    """Return the config of a coordinator with a folder, and of one with only a bucket."""
    if request.param == "folder":
        placement: Placement = local_placement(run_uid=uuid.uuid4().hex, run_folder=tmp_path)
        return resolve(load_text(EXPERIMENT), placement).coordinator
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = f"roster-{uuid.uuid4().hex}"
    s3_server.create_bucket(bucket)
    store = f"{{url: 's3://{bucket}/runs', endpoint: '{s3_server.endpoint}', region: {REGION}}}"
    placement = cluster_placement(run_uid=uuid.uuid4().hex, coordinator_host="coordinator")
    config_of_bucket = resolve(
        load_text(EXPERIMENT, overrides=[f"parameters.store={{objectStore: {store}}}"]), placement
    ).coordinator
    assert config_of_bucket.roster_path is None
    return config_of_bucket


def test_incarnations_go_on_where_the_last_coordinator_left_them(config: CoordinatorConfig) -> None:
    for life in range(3):
        record = open_document(config, ROSTER)
        roster = read_leases(config, record, now=0.0)
        lease = roster.lease(Claim(role="actor", instance=f"instance-{life}"), 0.0)
        assert isinstance(lease, Lease)
        assert (lease.index, lease.incarnation) == (0, life)
        roster.release(lease.instance)
        record.write(json.dumps(roster.to_json()).encode())


def test_what_is_no_roster_is_refused_by_its_place(config: CoordinatorConfig) -> None:
    record = open_document(config, ROSTER)
    record.write(b"[]")
    with pytest.raises(ConfigurationError, match=r"roster\.json is not a roster"):
        read_leases(config, record, now=0.0)


PAGE = PageRecord(
    role="trainer",
    index=0,
    lives=2,
    incarnation=1,
    marks={7: Mark(1, 2, 3)},
    posted_counts={0: PostedCount(4, 5)},
    unacknowledged=(Posted(1, 2, 3, 0),),
).count(trained=2**40)


def test_copies_of_pages_are_there_for_the_next_coordinator(config: CoordinatorConfig) -> None:
    capacity = {"actor": 1, "trainer": 1, "policy": 3}
    for life in range(3):
        record = open_document(config, LEDGER_COPIES)
        pages = read_ledger_copies(capacity, record)
        expected = replace(PAGE, incarnation=life) if life else None
        assert (pages.get("trainer", 0), pages.get("actor", 0), pages.get("policy", 0)) == (expected, None, None)
        pages.put(replace(PAGE, incarnation=life + 1))
        pages.put(PAGE if life else replace(PAGE, incarnation=0))  # of a life before: passed over
        record.write(json.dumps(pages.to_json()).encode())


@pytest.mark.parametrize(
    "document", [b"[]", b"{", b'{"pages": {"actor": {"0": "AAAA"}}}', b'{"pages": {"actor": {"x": ""}}}']
)
def test_what_is_no_copy_is_refused_by_its_place(config: CoordinatorConfig, document: bytes) -> None:
    record = open_document(config, LEDGER_COPIES)
    record.write(document)
    with pytest.raises(ConfigurationError, match=r"ledger\.json does not hold ledger pages"):
        read_ledger_copies({"actor": 1}, record)


def test_the_coordinator_that_came_last_is_the_present_one(config: CoordinatorConfig) -> None:
    def leadership(process: str) -> Leadership:
        return Leadership(open_document(config, COORDINATORS), process)

    first, second = leadership("first"), leadership("second")
    record = FencedDocument(open_document(config, ROSTER), first)
    first.acquire()
    first.acquire()  # in the same pod
    record.write(b"by the first")
    second.acquire()
    with pytest.raises(Superseded, match="second has taken over from first"):
        record.write(b"by the first, late")
    assert record.read() == b"by the first"
    with pytest.raises(Superseded, match="second has taken over from first"):
        leadership("first").acquire()
    for number in range(MAX_NAMES):
        leadership(str(number)).acquire()
    leadership(str(MAX_NAMES - 1)).check()


@pytest.mark.parametrize("document", [b"{", b"{}", b"[1]"])
def test_what_is_no_list_of_coordinators_is_refused_by_its_place(config: CoordinatorConfig, document: bytes) -> None:
    open_document(config, COORDINATORS).write(document)
    with pytest.raises(ConfigurationError, match=r"coordinators\.json is not a list of coordinators"):
        Leadership(open_document(config, COORDINATORS), "anybody").acquire()
