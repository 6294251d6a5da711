"""A run that could record no video does not begin, and an environment that hangs in the check costs little."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rlsrl.api.load import load_text
from rlsrl.api.placement import local_placement
from rlsrl.api.resolve import resolve
from rlsrl.api.resolved import RoleConfig
from rlsrl.local.rendering_check import CHECK_COMMAND, require_ffmpeg, require_pictures
from rlsrl.runtime.errors import ConfigurationError

ENVIRONMENTS = """
import os
import gymnasium
import numpy as np

class Shown(gymnasium.Wrapper):
    def __init__(self, render_mode, does):
        super().__init__(gymnasium.make("CartPole-v1", render_mode=render_mode))
        self.does = does

    def reset(self, **options):
        print("the simulator says hello")
        if self.does == "no reset":
            raise ConnectionError("no licence")
        return super().reset(**options)

    def render(self):
        if self.does == "raises":
            raise OSError("no display")
        if self.does == "crashes":
            os.abort()
        return np.zeros((4, 4), np.uint8) if self.does == "grey" else super().render()

def shown(render_mode=None, does=""):
    return Shown(render_mode, does)

def plain():
    return gymnasium.make("CartPole-v1")

def broken(render_mode=None):
    raise ConnectionError("no licence")
"""


def evaluators(folder: Path, environment: str, video: str = "video: {}") -> RoleConfig | None:
    (folder / "mine.py").write_text(ENVIRONMENTS)
    text = f"""
apiVersion: rlsrl.dev/v1alpha1
kind: RLExperiment
metadata: {{name: live}}
spec:
  environment: {environment}
  actors: {{environments: 2}}
  algorithm: {{ppo: {{}}}}
  evaluators: {{{video}}}
  stop: {{trainSteps: 1}}
"""
    resolved = resolve(load_text(text.encode(), source="test"), local_placement(run_uid="test", run_folder=folder))
    config = resolved.configs["evaluator"]
    (folder / "evaluator.json").write_text(config.to_json())
    return config


def check(
    folder: Path, config: RoleConfig | None, command: tuple[str, ...] = CHECK_COMMAND, seconds: float = 60.0
) -> None:
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    require_pictures(
        config,
        folder / "evaluator.json",
        folder / "report.txt",
        environment={**os.environ, "PYTHONPATH": path},
        command=command,
        seconds=seconds,
    )


def of(does: str) -> str:
    return f"{{factory: 'mine:shown', kwargs: {{does: {does}}}}}"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (of("raises"), r"render\(\) of the environment raised OSError: no display"),
        (of("crashes"), r"its render\(\) ends the process"),
        (of("grey"), r"render\(\) returned an array of uint8 \(4, 4\)"),
        ("{factory: 'mine:plain'}", r"does not take these kwargs: .*'render_mode'"),
    ],
)
def test_an_environment_without_pictures_is_found_before_the_run(tmp_path: Path, environment: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^evaluators\.video: .*{says}.*; or remove the field$"):
        check(tmp_path, evaluators(tmp_path, environment))


@pytest.mark.parametrize(
    "environment",
    ["{id: CartPole-v1}", of("''"), of("no reset"), "{factory: 'mine:broken'}", "{factory: 'mine:missing'}"],
)
def test_what_renders_passes_and_other_faults_are_for_the_actors_to_report(tmp_path: Path, environment: str) -> None:
    check(tmp_path, evaluators(tmp_path, environment))


def test_without_videos_no_process_starts(tmp_path: Path) -> None:
    check(tmp_path, evaluators(tmp_path, of("raises"), video=""), command=("no-such-command",))
    check(tmp_path, None, command=("no-such-command",))


def test_a_hang_ends_in_time_without_a_result(tmp_path: Path) -> None:
    hangs = (sys.executable, "-c", "import time; time.sleep(3600)")
    check(tmp_path, evaluators(tmp_path, "{id: CartPole-v1}"), command=hangs, seconds=0.2)


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    says = r"^evaluators\.video: videos need one more package: pip install 'rlsrl\[video\]'"
    with pytest.raises(ConfigurationError, match=says):
        require_ffmpeg(evaluators(tmp_path, "{id: CartPole-v1}"))
    require_ffmpeg(evaluators(tmp_path, "{id: CartPole-v1}", video=""))
    require_ffmpeg(None)
