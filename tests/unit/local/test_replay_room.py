"""Where replay stores fit on this machine, and what is said before a run starts if they do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlsrl.api.load import load_file
from rlsrl.api.spec import ExperimentSpec
from rlsrl.local import replay_room
from rlsrl.local.replay_room import Room, StoresUnknown, require_room_for_stores, room_in
from rlsrl.runtime.errors import ConfigurationError
from rlsrl.testing.rollouts import discrete_env_spec
from rlsrl.workers.build.replay_stores import ReplayStores, stores_of

EXAMPLES = Path(__file__).parents[3] / "examples"
ENV_SPEC = discrete_env_spec(num_features=4, num_actions=2)
MIB = 1024**2
PLENTY = 2**40


def spec_of(*overrides: str) -> ExperimentSpec:
    return load_file(EXAMPLES / "cartpole-dqn.yaml", overrides).spec


def stores() -> ReplayStores:
    found = stores_of(spec_of(), ENV_SPEC)
    assert found is not None
    return found


def store(folder: Path, num_bytes: int) -> Path:
    """Make a store's file of that size."""
    file = folder / "replay" / "trainer-0.store"
    file.parent.mkdir()
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, num_bytes)
    return file


def room(folder: Path, file_system: str = "ext4", *, free: int = 0, memory: int = 0) -> Room:
    """Return the room in a folder with a file system of that type."""
    device = folder.stat().st_dev
    mounts = folder / "mountinfo"
    mounts.write_text(
        "21 98 0:99 / /sys rw,relatime shared:7 - sysfs sysfs rw\n"
        f"98 1 {os.major(device)}:{os.minor(device)} / / rw,relatime shared:1 - {file_system} /dev/root rw\n"
    )
    return room_in(folder / "replay", mounts=mounts, free=lambda _: free, memory=lambda: memory)


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

    def room_in(self, folder: Path) -> Room:
        return room(folder.parent, free=self.free, memory=self.memory)


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


def test_an_environment_that_cannot_be_made_is_left_to_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> ReplayStores:
        raise StoresUnknown("no such thing")

    monkeypatch.setattr(replay_room, "find_stores", fail)
    (warning,) = require_room_for_stores(spec_of(), tmp_path, modules=tmp_path)
    assert warning.endswith("whether the replay stores fit: no such thing")
