"""A buffer worker with a volume of its own: what a pod with the same index finds after another one, or another node."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from structlog.testing import capture_logs

from rlsrl.api.load import load_text
from rlsrl.api.placement import cluster_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import BufferConfig
from rlsrl.api.role_names import BUFFER
from rlsrl.buffers.replay import store_file
from rlsrl.runtime.ledger import LedgerPage, PageRecord, TrainerLedger, read_pages
from rlsrl.testing.contexts import RecordingSession, make_context
from rlsrl.testing.replay import SlotSource
from rlsrl.workers.build.replay_shard import open_shard_store
from rlsrl.workers.build.store_files import discard_stores
from rlsrl.workers.replay_shard import LIFE_ENV_STEPS
from rlsrl.workers.stored_transitions import Settlement, StoredTransitions

EXPERIMENT = """
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {name: shards}
spec:
  environment: {id: CartPole-v1}
  algorithm: {dqn: {replay: {capacity: 240, start: 10}}}
  actors: {replicas: 2, environments: 4, rolloutLength: 5}
  bufferWorkers: {replicas: 2}
  pacing: {trainStepsPerEnvStep: 1}
  stop: {envSteps: 1000}
"""
INDEX = 1


class Nodes:
    """The machines of a cluster, of which the pod is on one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._boot = folder / "boot_id"
        monkeypatch.setattr(store_file, "_BOOT", self._boot)
        self.use("a")

    def use(self, name: str) -> None:
        """Let pods start on that node."""
        self._boot.write_text(name * 36)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(tmp_path, monkeypatch)


class Life(NamedTuple):
    """A life of the buffer worker."""

    page: LedgerPage
    ledger: TrainerLedger
    store: StoredTransitions

    @property
    def counters(self) -> dict[str, int]:
        return {term: count for term, count in self.page.record.counters.items() if count}


class Volume:
    """A buffer worker's volume, its actor, and the coordinator with its copy of the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = SlotSource(num_steps=5, num_lanes=2)
        self.copy = b""
        self.taken = self._lives = 0

    def begin(self, resources: ExitStack, *, run_uid: str = "run", copy: bytes = b"") -> Life:
        """Begin a life. ``resources`` ends it, as a kill does. ``copy``: that of a former life's page."""
        placement = cluster_placement(run_uid, "host", state_folder=str(self.folder))
        config = resolve(load_text(EXPERIMENT), placement).configs[BUFFER]
        assert isinstance(config, BufferConfig)
        assert config.replay is not None
        session, self._lives = RecordingSession(ledger_copy=copy), self._lives + 1
        folder = Path(config.ledger_folder)
        context = make_context(BUFFER, folder, index=INDEX, incarnation=self._lives, join_session=session)
        page = resources.enter_context(context.open_ledger_page())
        ledger = TrainerLedger(page)
        store = open_shard_store(config, config.replay, context, self.source.layout, ledger, resources)
        return Life(page, ledger, store)

    def fill(self, life: Life) -> None:
        """Store a slot."""
        slot = self.source.slot()
        assert slot.producer is not None
        self.taken += slot.num_transitions
        life.ledger.take(slot.producer, slot.sequence, slot.num_transitions, self.taken)
        life.store.insert([slot])


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return Volume(tmp_path / "volume")


def end(life: Life) -> None:
    """End the worker as SIGTERM does, when its pod is deleted."""
    life.store.give_up(run_ended=False)
    life.ledger.end()
    life.store.sync()


@pytest.mark.parametrize(
    ("is_deleted", "node", "is_believed"),
    [
        pytest.param(True, "a", True, id="deleted"),
        pytest.param(True, "b", True, id="deleted and moved"),
        pytest.param(False, "a", True, id="killed"),
        pytest.param(False, "b", False, id="killed and moved: nothing shows what the former node had not written"),
    ],
)
def test_what_the_next_pod_finds_and_counts(
    volume: Volume, nodes: Nodes, is_deleted: bool, node: str, is_believed: bool
) -> None:
    with ExitStack() as resources:
        life = volume.begin(resources)
        for _ in range(3):
            volume.fill(life)
        if is_deleted:
            end(life)
    nodes.use(node)
    with ExitStack() as resources:
        life = volume.begin(resources)
        assert life.store.num_transitions == (volume.taken if is_believed else 0), "nothing was written back"
        assert life.counters == {"in_buffer" if is_believed else "lost.receiver_died": volume.taken}
        volume.fill(life)
        assert sum(life.counters.values()) == volume.taken


def test_a_store_that_came_back_is_checked_on_a_third_node_until_it_is_closed_again(
    volume: Volume, nodes: Nodes
) -> None:
    with ExitStack() as resources:
        life = volume.begin(resources)
        volume.fill(life)
        end(life)
    nodes.use("b")
    with ExitStack() as resources:
        volume.begin(resources)
    nodes.use("a")
    with ExitStack() as resources:
        life = volume.begin(resources)
        assert (life.store.num_transitions, life.counters) == (volume.taken, {"lost.receiver_died": volume.taken})


@pytest.mark.parametrize("has_old_page", [False, True], ids=["with its page", "with an older page"])
def test_of_a_lost_nodes_store_what_is_whole_is_drawn_again_and_counts_as_nothing_new(
    volume: Volume, nodes: Nodes, has_old_page: bool
) -> None:
    page, store = (volume.folder / "run" / name / f"buffer-{INDEX}" for name in ("ledger", "replay"))
    page, store = page.with_suffix(".page"), store.with_suffix(".store")
    with ExitStack() as resources:
        life = volume.begin(resources)
        volume.fill(life)
        old = page.read_bytes()
        for _ in range(3):
            volume.fill(life)
        life.store.settle(Settlement(step=1, keys=np.arange(3), trained_rows=None, errors=None))
        assert life.counters["trained"] == 3
        life.store.segments.seal()
        arrays = life.store.segments.arrays
        torn = int(np.count_nonzero(arrays["mask"][2]))
        arrays["observation"][2] = 0
        copy, counters = life.page.encode(), life.counters
    if has_old_page:
        page.write_bytes(old)
    nodes.use("b")
    expected = {"trained": 3, "lost.receiver_died": counters["in_buffer"]}
    with ExitStack() as resources, capture_logs() as logs:
        life = volume.begin(resources, copy=copy)
        (logged,) = [each for each in logs if each["event"] == "replay_store_in_part"]
        assert (logged["transitions"], logged["of"]) == (volume.taken - torn, volume.taken)
        assert life.store.num_transitions == volume.taken - torn
        assert life.counters == expected
        assert life.store.env_steps == 2 * LIFE_ENV_STEPS, "a new life: the rank counts none of its env steps again"
        drawn = life.store.draw_rows(50, np.random.default_rng(0))
        assert drawn.arrays["observation"].any(axis=1).all()
        assert 0 <= drawn.mean_age < volume.taken
        assert life.store.settle(Settlement(step=2, keys=drawn.keys, trained_rows=None, errors=None)) == 0
        assert life.counters == expected
        volume.fill(life)
        new = volume.taken - sum(expected.values())
        assert life.counters == {**expected, "in_buffer": new}
    with ExitStack() as resources:  # a kill on the same node
        life = volume.begin(resources)
        assert life.counters == {**expected, "in_buffer": new}
        assert life.store.num_transitions == volume.taken - torn
        for _ in range(40):
            volume.fill(life)
        assert sum(life.counters.values()) == volume.taken
        assert life.counters["in_buffer"] == life.store.num_transitions, "what was found again is replaced by now"


def test_a_volume_that_lost_updates_is_not_believed_even_on_the_same_node(volume: Volume, nodes: Nodes) -> None:
    """As after an error of the disk, or when a volume was taken from a node that still wrote to it."""
    path = volume.folder / "run" / "ledger" / f"buffer-{INDEX}.page"
    with ExitStack() as resources:
        life = volume.begin(resources)
        volume.fill(life)
        old = path.read_bytes()
        volume.fill(life)
        copy, taken = life.page.encode(), volume.taken
    path.write_bytes(old)
    with ExitStack() as resources:
        life = volume.begin(resources, copy=copy)
        assert life.page.record.restored, "the actor's count says what else is missing"
        assert (life.store.num_transitions, life.counters) == (0, {"lost.receiver_died": taken})
    with ExitStack() as resources:
        volume.fill(volume.begin(resources, copy=copy))
    with ExitStack() as resources:
        life = volume.begin(resources, copy=copy)
        assert life.store.num_transitions == volume.taken - taken, "later lives trust the page again"


def test_a_lost_volume_is_counted_by_the_coordinators_copy(volume: Volume, nodes: Nodes, tmp_path: Path) -> None:
    with ExitStack() as resources:
        life = volume.begin(resources)
        volume.fill(life)
        end(life)
        copy = life.page.encode()
    volume.folder = tmp_path / "another volume"
    with ExitStack() as resources:
        life = volume.begin(resources, copy=copy)
        assert PageRecord.decode(copy, role=BUFFER, index=INDEX).counters["in_buffer"] == volume.taken
        assert (life.store.num_transitions, life.counters) == (0, {"lost.receiver_died": volume.taken})


def test_a_run_that_ended_has_no_store_of_a_worker_that_did_not_hear_of_it(volume: Volume, nodes: Nodes) -> None:
    with ExitStack() as resources:
        life = volume.begin(resources)
        volume.fill(life)
        end(life)
    run = volume.folder / "run"
    for _ in range(2):
        discard_stores(run / "replay", run / "ledger")
        (record,) = read_pages(run / "ledger")
        assert {term: count for term, count in record.counters.items() if count} == {"dropped.end_of_run": volume.taken}
        assert not [*(run / "replay").iterdir()]


def test_another_run_on_the_volume_begins_with_nothing_and_gives_the_room_back(volume: Volume, nodes: Nodes) -> None:
    with ExitStack() as resources:
        life = volume.begin(resources)
        volume.fill(life)
        end(life)
    with ExitStack() as resources:
        life = volume.begin(resources, run_uid="run-7")
        assert (life.store.num_transitions, life.counters) == (0, {})
        assert [each.name for each in volume.folder.iterdir()] == ["run-7"]
