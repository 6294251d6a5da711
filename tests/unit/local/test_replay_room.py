"""Where replay stores fit on this machine, and what is said before a run starts if they do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsrl.api.load import load_file
from rlsrl.api.role_names import BUFFER, TRAINER
from rlsrl.api.spec import ExperimentSpec
from rlsrl.local import replay_room
from rlsrl.local.replay_room import Room, StoresUnknown, require_room_after_edit, require_room_for_stores, room_in
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import discrete_env_spec
from rlsrl.workers.build.replay_stores import ReplayStores, stores_of

EXAMPLES = Path(__file__).parents[3] / "examples"
ENV_SPEC = discrete_env_spec(num_features=4, num_actions=2)
MIB = 1024**2
PLENTY = 2**40


def spec_of(*overrides: str) -> ExperimentSpec:
    return load_file(EXAMPLES / "cartpole-dqn.yaml", overrides).spec


def stores(*overrides: str) -> ReplayStores:
    found = stores_of(spec_of(*overrides), ENV_SPEC)
    assert found is not None
    return found


def store(folder: Path, num_bytes: int, role: str = TRAINER) -> Path:
    """Make a store's file of that size."""
    file = folder / "replay" / f"{role}-0.store"
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, num_bytes)
    return file


def room(folder: Path, file_system: str = "ext4", role: str = TRAINER, *, free: int = 0, memory: int = 0) -> Room:
    """Return the room for a role's stores in a folder with a file system of that type."""
    device = folder.stat().st_dev
    mounts = folder / "mountinfo"
    mounts.write_text(
        "21 98 0:99 / /sys rw,relatime shared:7 - sysfs sysfs rw\n"
        f"98 1 {os.major(device)}:{os.minor(device)} / / rw,relatime shared:1 - {file_system} /dev/root rw\n"
    )
    return room_in(folder / "replay", role, mounts=mounts, free=lambda _: free, memory=lambda: memory)


def test_a_disk_has_room_whatever_the_memory(tmp_path: Path) -> None:
    found = room(tmp_path, free=7 * MIB, memory=3 * MIB)
    assert (found.num_bytes, found.memory, found.is_memory) == (7 * MIB, 3 * MIB, False)


@pytest.mark.parametrize(("free", "memory"), [(7 * MIB, 3 * MIB), (3 * MIB, 7 * MIB)])
def test_a_folder_in_memory_has_room_for_what_is_free_there_and_in_memory(
    free: int, memory: int, tmp_path: Path
) -> None:
    found = room(tmp_path, "tmpfs", free=free, memory=memory)
    assert (found.num_bytes, found.is_memory) == (3 * MIB, True)
    assert "there is room for 3.0 MiB in memory (tmpfs) at " in str(found.shortage(stores()))
    assert found.warning(stores()) is None


def test_stores_that_are_there_already_do_not_need_their_room_again(tmp_path: Path) -> None:
    store(tmp_path, 5 * MIB)
    assert room(tmp_path, free=7 * MIB).num_bytes == pytest.approx(12 * MIB, abs=MIB // 16)
    assert room(tmp_path, role=BUFFER, free=7 * MIB).num_bytes == 7 * MIB, "the trainers' ones may stay meanwhile"


def test_stores_beyond_the_memory_are_a_warning_with_the_arithmetic(tmp_path: Path) -> None:
    found = stores()
    enough, too_little = (room(tmp_path, free=PLENTY, memory=found.num_bytes - lacking) for lacking in (0, 1))
    assert enough.warning(found) is None
    assert str(found) in str(too_little.warning(found))
    assert "of memory are available: draws wait for the disk at " in str(too_little.warning(found))


class Machine:
    """A machine with so many bytes free on its disk and in its memory, which makes environments."""

    def __init__(self) -> None:
        self.free = PLENTY
        self.memory = PLENTY
        self.num_made = 0

    def find_stores(self, spec: ExperimentSpec, *, modules: Path) -> ReplayStores | None:
        self.num_made += 1
        return stores_of(spec, ENV_SPEC)

    def room_in(self, folder: Path, role: str) -> Room:
        return room(folder.parent, role=role, free=self.free, memory=self.memory)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(replay_room, "find_stores", found.find_stores)
    monkeypatch.setattr(replay_room, "room_in", found.room_in)
    return found


def test_stores_without_room_are_refused(machine: Machine, tmp_path: Path) -> None:
    assert require_room_for_stores(spec_of(), tmp_path, modules=tmp_path) == []
    machine.free = MIB
    with pytest.raises(ConfigurationError) as raised:
        require_room_for_stores(spec_of(), tmp_path, modules=tmp_path)
    assert str(raised.value) == stores().shortage(MIB, f"on the disk at {tmp_path / 'replay'}")


def test_stores_beyond_the_memory_are_no_reason_to_refuse(machine: Machine, tmp_path: Path) -> None:
    machine.memory = MIB
    (warning,) = require_room_for_stores(spec_of(), tmp_path, modules=tmp_path)
    assert "1.0 MiB of memory are available" in warning


def test_a_run_whose_stores_exist_needs_no_room(machine: Machine, tmp_path: Path) -> None:
    """With another number of trainers the stores are made anew, in the room of the former ones."""
    machine.free = 0
    file = store(tmp_path, stores().num_bytes + MIB)
    assert require_room_for_stores(spec_of(), tmp_path, modules=tmp_path) == []
    assert machine.num_made == 0, "nothing has to be known"
    two = spec_of("trainers.replicas=2", "actors.replicas=2")
    assert require_room_for_stores(two, tmp_path, modules=tmp_path) == []
    assert machine.num_made == 1
    file.write_bytes(b"")
    with pytest.raises(ConfigurationError):
        require_room_for_stores(spec_of(), tmp_path, modules=tmp_path)


TWO_TRAINERS = ("trainers.replicas=2", "actors.replicas=2")
BUFFER_WORKERS = ("bufferWorkers.replicas=1",)
FOUR_BUFFER_WORKERS = ("bufferWorkers.replicas=4", "actors.replicas=4")
SHORT_ROLLOUTS = ("actors.rolloutLength=1",)


@pytest.mark.parametrize(
    ("before", "after", "role", "frees"),
    [
        pytest.param((), SHORT_ROLLOUTS, TRAINER, True, id="more frames"),
        pytest.param((), TWO_TRAINERS, TRAINER, True, id="one file more"),
        pytest.param((), BUFFER_WORKERS, TRAINER, False, id="to another role"),
        pytest.param(BUFFER_WORKERS, (), BUFFER, False, id="back"),
        pytest.param(BUFFER_WORKERS, FOUR_BUFFER_WORKERS, BUFFER, True, id="more buffer workers"),
    ],
)
def test_an_edit_of_the_stores_is_refused_without_room_for_the_new_ones(
    before: tuple[str, ...], after: tuple[str, ...], role: str, frees: bool, machine: Machine, tmp_path: Path
) -> None:
    """Also where files exist for all of them. ``frees``: whether those of ``role`` from before the edit make room."""
    old, new = stores(*before), stores(*after)
    taken = store(tmp_path, old.num_bytes, role).stat().st_blocks * 512
    machine.free = new.num_bytes - taken * frees - 1
    with pytest.raises(ConfigurationError) as raised:
        require_room_after_edit(spec_of(*before), spec_of(*after), tmp_path, modules=tmp_path)
    assert str(raised.value) == new.shortage(new.num_bytes - 1, f"on the disk at {tmp_path / 'replay'}")
    machine.free += 1
    assert require_room_after_edit(spec_of(*before), spec_of(*after), tmp_path, modules=tmp_path) == []


def test_another_edit_needs_no_room(machine: Machine, tmp_path: Path) -> None:
    machine.free = 0
    after = spec_of("stop.envSteps=7", "actors.replicas=2")
    assert require_room_after_edit(spec_of(), after, tmp_path, modules=tmp_path) == []
    assert machine.num_made == 0


def test_an_environment_that_cannot_be_made_is_left_to_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> ReplayStores:
        raise StoresUnknown("no such thing")

    monkeypatch.setattr(replay_room, "find_stores", fail)
    (warning,) = require_room_for_stores(spec_of(), tmp_path, modules=tmp_path)
    assert warning.endswith("whether the replay stores fit: no such thing")
