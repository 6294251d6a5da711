"""Videos of stored policies show what the environment renders, frame by frame."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
from click.testing import CliRunner, Result

import rlsrl
from rlsrl.cli import main
from rlsrl.envs.factory import EnvironmentSource, environment_interface
from rlsrl.runs.video import NoVideo
from rlsrl.testing.stored_runs import BALANCES, CARTPOLE, LETS_FALL, LINEAR, make_run, push

OF_CARTPOLE = environment_interface(EnvironmentSource(id="CartPole-v1"))


def frames(path: Path) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """Return what the file says of itself, and its frames, [n, height, width, 3]."""
    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    return about, np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


@pytest.fixture
def balance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "balance", CARTPOLE)
    push(run, 10, LETS_FALL, exported=LINEAR, interface=OF_CARTPOLE, tag="first")
    return run


def shades(folder: Path, kwargs: str = "{}") -> Path:
    reference = "rlsrl.testing.environments:ShadesEnv"
    experiment = CARTPOLE.replace("id: CartPole-v1", f"factory: '{reference}', kwargs: {kwargs}")
    run = make_run(folder / "shades", experiment)
    interface = environment_interface(EnvironmentSource(factory=reference))
    push(run, 1, BALANCES, exported=LINEAR, interface=interface)
    return run


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["video", *map(str, arguments)])


def test_each_frame_is_what_the_environment_rendered(tmp_path: Path) -> None:
    path, policy = tmp_path / "shades.mp4", rlsrl.load(shades(tmp_path))
    for _ in range(2):  # the second one replaces the file
        played = policy.record(path, episodes=2)
    assert [(each.episode_return, each.num_steps, each.is_cut) for each in played] == [(9.0, 6, False)] * 2
    about, pictures = frames(path)
    assert about["fps"] == 4
    assert pictures.shape[0] == 14
    expected = [20 + 30 * step for step in range(7)] * 2
    np.testing.assert_allclose(pictures.mean(axis=(1, 2, 3)), expected, atol=4)
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix == ".mp4"] == ["shades.mp4"]


def test_the_command_records_a_version(balance: Path) -> None:
    result = call(balance, "--tag", "first", "--seed", 3)
    assert result.exit_code == 0, result.output
    first, last = result.output.splitlines()
    steps = int(first.removeprefix("seed 3: return ").split(",")[0])
    assert first == f"seed 3: return {steps}, {steps} steps"
    recorded = balance / "balance-1.10.mp4"
    assert last.startswith(f"1.10: {recorded} (")
    _, pictures = frames(recorded)
    assert len(pictures) == steps + 1
    assert (pictures[0] != pictures[-1]).any(), "the pole falls"
    again = call(balance)
    assert again.exit_code == 2
    assert f"{recorded} exists; --force replaces it" in again.output
    assert call(balance, "--force", "--stochastic").exit_code == 0


def test_a_machine_without_a_display_prints_no_error(
    balance: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_RUNTIME_DIR", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    assert call(balance).exit_code == 0
    assert "XDG_RUNTIME_DIR" not in capfd.readouterr().err, "libwayland prints there"
    assert "XDG_RUNTIME_DIR" not in os.environ


def test_exported_weights_are_recorded_with_their_experiment(balance: Path) -> None:
    Path("balance.yaml").write_text(CARTPOLE)
    exported = CliRunner().invoke(main, ["params", "export", str(balance), "-o", "weights.safetensors"])
    assert exported.exit_code == 0, exported.output
    of_file = call("weights.safetensors", "--experiment", "balance.yaml", "--seed", 3)
    assert of_file.exit_code == 0, of_file.output
    played, last = of_file.output.splitlines()
    assert last.startswith("1.10: weights-1.10.mp4 (")
    assert played == call(balance, "--seed", 3).output.splitlines()[0]
    for arguments, says in (([], "is a file: name the experiment file"), (["--experiment", "gone.yaml"], "gone.yaml")):
        result = call("weights.safetensors", *arguments)
        assert result.exit_code == 2
        assert says in result.output


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ("{hides: true}", "has render_mode None although it was made with 'rgb_array'"),
        ("{size: 0}", "step() of the environment raised ValueError: the arm is stuck"),
        ("{siez: 3}", "siez"),
    ],
)
def test_an_environment_without_pictures_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kwargs: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(shades(tmp_path, kwargs))
    assert result.exit_code in (1, 2)
    assert says in result.output
    assert not list(tmp_path.rglob("*.mp4"))


def test_what_is_missing_is_said(balance: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = rlsrl.load(balance)
    with pytest.raises(NoVideo, match=r"has the suffix '\.gif'; allowed: \.mp4"):
        policy.record("balance.gif")
    with pytest.raises(OSError, match="no/where"):
        policy.record("no/where/balance.mp4")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(NoVideo, match=r"pip install 'rlsrl\[video\]'"):
        policy.record("balance.mp4")
