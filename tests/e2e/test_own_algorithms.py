"""Algorithms of users train as pods, from an image with the user's modules: on rollouts, and from a replay store."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from page_blocks import blocks_of
from user_image import write_user_image

from rlsrl.cli.init import write_project
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.faults import role_of
from rlsrl.testing.kubectl import ClusterExperiment, Namespace, run
from rlsrl.testing.replayed_runs import check_ratio
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1500)]

HACK = Path(__file__).parents[2] / "hack"
PAGE = "docs/your-own-algorithm.md"
NAME = "own-algorithm"
IMAGE = "localhost/own-algorithm:1-learner"
BUILD_SECONDS = 1800.0
"""Deadline of the images, which are built already unless the sources have changed."""
TRAINING_SECONDS = 400.0


def on_page(file: str) -> str:
    """Return the block of the page that is the content of a file."""
    (text,) = (block.text for block in blocks_of(PAGE) if block.file == file)
    return text


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that ``rlsrl init --algorithm`` writes, with the page's algorithm that replays."""
    folder = tmp_path_factory.mktemp("project")
    write_project(folder, NAME, has_algorithm=True)
    (folder / "my_q_learning.py").write_text(on_page("my_q_learning.py"))
    return folder


@pytest.fixture(scope="module")
def image(project: Path, system: Namespace) -> str:
    """Return the name of an image with the project's modules. The nodes have it."""
    assert system.name
    archives = map(Path, run(str(HACK / "images"), seconds=BUILD_SECONDS).splitlines())
    (base,) = (archive for archive in archives if archive.name.startswith("worker-learner-"))
    modules = {path.name: path.read_text() for path in project.glob("my_*.py")}
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "image.tar")
        write_user_image(archive, base=base, name=IMAGE, modules=modules)
        run(str(HACK / "cluster"), "load", str(archive), seconds=BUILD_SECONDS)
    return IMAGE


@pytest.fixture
def train(project: Path, image: str, where: Namespace) -> Callable[..., ClusterExperiment]:
    """Return a function that trains the project's experiment to its end, with other sections of the spec."""

    def trained(**spec: Object) -> ClusterExperiment:
        document: Object = yaml.safe_load((project / "experiment.yaml").read_text())
        sections = document["spec"] | spec
        # All of these make an environment, whose module is the user's, too.
        template = {"spec": {"containers": [{"name": "worker", "image": image}]}}
        for role in {"actors", "bufferWorkers", "trainers"} & sections.keys():
            sections[role] = {**sections[role], "podTemplate": template}
        where.apply(document | {"spec": sections})
        experiment = ClusterExperiment(where, NAME)
        experiment.await_phase("Succeeded", seconds=TRAINING_SECONDS)
        until(lambda: [role_of(pod) for pod in experiment.pods()] == ["coordinator"], "only the coordinator remains")
        until(lambda: experiment.ledger()["unsettled"] == 0, "the ledger is settled")
        ledger = experiment.ledger()
        assert ledger["balanced"], ledger
        assert ledger["in_buffer"] == 0, ledger
        not_trained = sum(ledger["dropped"].values()) + sum(ledger["lost"].values())
        assert ledger["produced"] == ledger["trained"] + not_trained > not_trained, ledger
        assert experiment.status["restarts"] == 0
        return experiment

    return trained


def test_an_algorithm_of_ones_own_reaches_its_goal_with_two_ranks(train: Callable[..., ClusterExperiment]) -> None:
    goal = 0.5
    experiment = train(
        actors={"replicas": 2, "environments": 8, "rolloutLength": 128},
        trainers={"replicas": 2},
        stop={"returnMean": goal, "envSteps": 300_000},
    )
    assert float(experiment.status["training"]["returnMean"]) >= goal


def test_an_algorithm_of_ones_own_replays_from_two_buffer_workers(train: Callable[..., ClusterExperiment]) -> None:
    num_steps = 8000
    experiment = train(
        **yaml.safe_load(on_page("q-learning.yaml"))["spec"],
        actors={"replicas": 2, "environments": 8, "rolloutLength": 32},
        bufferWorkers={"replicas": 2, "volume": {"size": "64Mi"}},
        trainers={"replicas": 1},
        stop={"envSteps": num_steps},
    )
    assert int(experiment.status["training"]["envSteps"]) >= num_steps
    assert not any(experiment.ledger()["lost"].values()), "nothing is gathered in vain before an end by env steps"
    check_ratio(experiment)
