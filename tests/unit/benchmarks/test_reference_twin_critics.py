"""Short runs of the single file that shares no code with rlsrl, also where all episodes end at once."""

from __future__ import annotations

import json

import pytest
import reference_twin_critics


@pytest.mark.parametrize("algorithm", ["sac", "td3"])
def test_it_trains_beyond_the_step_in_which_all_episodes_begin(
    algorithm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "env-id": "Pendulum-v1",
        "total-steps": 1000,
        "num-envs": 4,
        "hidden-size": 8,
        "start": 780,
        "minibatch-size": 16,
        "evaluate-every": 900,
        "evaluation-episodes": 1,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["single.py", "--algorithm", algorithm, "--report", *words])
    reference_twin_critics.main()
    *reports, told = capsys.readouterr().out.splitlines()
    lines = [json.loads(report) for report in reports]
    # An episode has 200 steps in each of 4 environments: the 201st only begins the next ones.
    assert [line["env_steps"] for line in lines][-4:] == [924, 956, 988, 1020]
    assert [line["env_steps"] for line in lines if "greedy_return" in line] == [924]
    assert told.startswith("1,020 env steps, 240 updates")
