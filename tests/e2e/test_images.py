"""The images from their archives, run like a pod under Pod Security `restricted`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlsrl.api.failures import CONFIGURATION_ERROR
from rlsrl.api.load import load_file
from rlsrl.testing.kubectl import TAG

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
NAMES = {
    "worker-actor": f"rlsrl/worker:{TAG}-actor",
    "worker-learner": f"rlsrl/worker:{TAG}-learner",
    "operator": f"rlsrl/operator:{TAG}",
}
TOP_FILES = (".dockerignore", "LICENSE", "README.md", "constraints.txt", "pyproject.toml")
SIZE_LIMITS = {"worker-actor": 800, "worker-learner": 2600, "operator": 420}
"""Size limits of the uncompressed archives, in megabytes."""
CUDA_MEGABYTES = 4000
"""Additional size of PyTorch's CUDA build."""
USER = 10001
RUN_SECONDS = 120.0
WHITEOUT = ".wh."
"""A layer's mark of a removed file."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image in its archive, with its unpacked file system."""

    kind: str
    archive: Path
    name: str
    config: dict[str, Any]
    """``Entrypoint``, ``Cmd``, ``Env``, ``User``, ``Labels``."""
    root: Path

    def holds(self, path: str) -> bool:
        """Return whether the file system has a path that matches the pattern."""
        return next(self.root.glob(path), None) is not None


@pytest.fixture(scope="session", autouse=True)
def kubeconfig() -> None:
    """Replace the cluster's fixture: these tests need no cluster."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the current sources, so that edits during the tests have no effect."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("operator", "worker", "hack"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*REPOSITORY.glob("Dockerfile.*"), *map(REPOSITORY.joinpath, TOP_FILES)):
        shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def archives(tree: Path) -> dict[str, Path]:
    """Build changed images with `hack/images` and return the archives."""
    printed = subprocess.run([tree / "hack" / "images"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {path.stem.rpartition("-")[0]: path for path in map(Path, printed.splitlines())}


@pytest.fixture(scope="module")
def images(archives: dict[str, Path]) -> Iterator[dict[str, Image]]:
    """Unpack all images."""
    with tempfile.TemporaryDirectory(prefix="rlsrl-images-") as folder:
        yield {kind: _unpack(kind, archive, Path(folder, kind)) for kind, archive in archives.items()}


@pytest.fixture(params=NAMES)
def image(request: pytest.FixtureRequest, images: dict[str, Image]) -> Image:
    """One image for each parameter."""
    return images[request.param]


def _unpack(kind: str, archive: Path, root: Path) -> Image:
    root.mkdir()
    with tarfile.open(archive) as tar:

        def stored(name: str) -> Any:
            file = tar.extractfile(name)
            assert file is not None, name
            return file

        entry = json.load(stored("manifest.json"))[0]
        for layer in entry["Layers"]:
            with tarfile.open(fileobj=stored(layer)) as contents:
                _take_away(root, contents.getnames())
            unpack = ["tar", "-C", str(root), "--exclude", f"{WHITEOUT}*", "-x"]
            with subprocess.Popen(unpack, stdin=subprocess.PIPE) as unpacking:
                assert unpacking.stdin is not None
                shutil.copyfileobj(stored(layer), unpacking.stdin, 1 << 20)
            assert unpacking.returncode == 0
        config = json.load(stored(entry["Config"]))["config"]
    (name,) = entry["RepoTags"]
    return Image(kind=kind, archive=archive, name=name, config=config, root=root)


def _take_away(root: Path, names: Sequence[str]) -> None:
    """Apply a layer's marks of removed files."""
    for path in (root / name for name in names):
        if path.name == f"{WHITEOUT}{WHITEOUT}.opq":
            gone = list(path.parent.iterdir())
        elif path.name.startswith(WHITEOUT):
            gone = [path.with_name(path.name.removeprefix(WHITEOUT))]
        else:
            continue
        for each in gone:
            shutil.rmtree(each) if each.is_dir() and not each.is_symlink() else each.unlink()


def run(
    image: Image, *arguments: str, entrypoint: Sequence[str] | None = None, user: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a container of the image: a read-only root, an empty /tmp, no capabilities, no network.

    The user is the image's, unless another is given.
    """
    own, group = map(int, image.config["User"].split(":"))
    command = [*(image.config["Entrypoint"] if entrypoint is None else entrypoint), *arguments]
    with tempfile.TemporaryDirectory(prefix="rlsrl-container-") as bundle:
        subprocess.run(["runc", "spec", "--bundle", bundle], check=True)
        path = Path(bundle, "config.json")
        spec = json.loads(path.read_text())
        spec["root"] = {"path": str(image.root), "readonly": True}
        spec["mounts"].append({"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"})
        spec["process"] |= {
            "terminal": False,
            "user": {"uid": own if user is None else user, "gid": group},
            "args": command,
            "env": image.config["Env"],
            "capabilities": {},
        }
        path.write_text(json.dumps(spec))
        return subprocess.run(
            ["runc", "--root", f"{bundle}/state", "run", "--bundle", bundle, f"rlsrl-{uuid.uuid4()}"],
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )


def python(image: Image, program: str, *arguments: str) -> str:
    """Return the output of a program in a container of the image.

    Raises:
        AssertionError: the program failed.
    """
    done = run(image, "-c", program, *arguments, entrypoint=["python"])
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("kind", "arguments", "shown"),
    [
        ("worker-actor", ["rlsrl.workers", "--help"], "--role {coordinator,trainer,buffer,policy,actor,evaluator}"),
        ("worker-learner", ["rlsrl.workers", "--help"], "--role {coordinator,trainer,buffer,policy,actor,evaluator}"),
        ("worker-learner", ["rlsrl.workers.gang_launcher", "--help"], "--ranks RANKS"),
        ("operator", ["--help"], "--settings SETTINGS"),
    ],
)
def test_the_entry_point_starts(images: dict[str, Image], kind: str, arguments: list[str], shown: str) -> None:
    done = run(images[kind], *arguments)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_an_unknown_user_id_has_a_name(image: Image) -> None:
    """kopf and torch need a user name."""
    done = run(image, "-c", "import getpass; print(getpass.getuser())", entrypoint=["python"], user=1_000_680_000)
    assert (done.stdout, done.stderr) == ("rlsrl\n", "")


@pytest.mark.parametrize("role", ["coordinator", "actor", "buffer", "evaluator"])
def test_a_role_starts_in_the_actor_image(images: dict[str, Image], role: str) -> None:
    done = run(images["worker-actor"], "rlsrl.workers", "--role", role, "--config", "/nowhere")
    assert (done.returncode, done.stderr) == (
        CONFIGURATION_ERROR,
        "rlsrl: cannot read /nowhere: No such file or directory\n",
    )


def test_ranks_start_in_the_learner_image(images: dict[str, Image]) -> None:
    launcher = ["rlsrl.workers.gang_launcher", "--ranks", "2"]
    done = run(images["worker-learner"], *launcher, "--role", "trainer", "--config", "/nowhere")
    assert done.returncode == CONFIGURATION_ERROR, done.stderr
    assert "rlsrl: cannot read /nowhere: No such file or directory\n" in done.stderr


@pytest.mark.parametrize(
    ("kind", "module"),
    [("worker-actor", "torch"), ("operator", "torch"), ("operator", "numpy"), ("operator", "grpc")],
)
def test_unneeded_files_are_not_in_an_image(images: dict[str, Image], kind: str, module: str) -> None:
    done = run(images[kind], "-c", f"import {module}", entrypoint=["python"])
    assert done.returncode == 1
    assert f"ModuleNotFoundError: No module named '{module}'" in done.stderr


@pytest.mark.parametrize(
    "module",
    ["coordinator", "buffer", "actor", "policy", "evaluator"],
)
def test_a_worker_of_the_actor_image_imports_no_torch(images: dict[str, Image], module: str) -> None:
    python(images["worker-actor"], f"import rlsrl.workers.{module}")


def test_torch_computes_in_the_learner_image(images: dict[str, Image]) -> None:
    """Its libraries load and work, including the stubs of a slim PyTorch."""
    program = """
import torch
network = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 1))
loss = network(torch.ones(2, 1, 4, 4)).square().mean()
loss.backward()
torch.optim.Adam(network.parameters()).step()
print(bool(torch.linalg.svd(torch.eye(3)).S.sum() == 3), torch.cuda.is_available())
"""
    assert python(images["worker-learner"], program) == "True False\n"


def test_a_network_that_is_not_exported_needs_torch(images: dict[str, Image]) -> None:
    """The actor image must not be chosen for it."""
    program = """
from rlsrl.api.spec import Network, WorkerEnvironment
from rlsrl.envs.factory import environment_spec
from rlsrl.workers.build.common import environment_source, torch_policy
spec = environment_spec(environment_source(WorkerEnvironment(id="CartPole-v1")))
print(torch_policy(Network(mlp={}), spec, outputs="policyAndValue", seed=0).layout.num_parameters > 0)
"""
    done = run(images["worker-actor"], "-c", program, entrypoint=["python"])
    assert "No module named 'torch'" in done.stderr
    assert python(images["worker-learner"], program) == "True\n"


@pytest.mark.parametrize("example", sorted(path.name for path in (REPOSITORY / "examples").glob("*.yaml")))
def test_the_environments_of_the_examples_are_in_the_image(images: dict[str, Image], example: str) -> None:
    environment = load_file(REPOSITORY / "examples" / example).spec.worker_environment
    program = """
import sys
from rlsrl.api.spec import WorkerEnvironment
from rlsrl.envs.factory import make_environment
from rlsrl.workers.build.common import environment_source
env = make_environment(environment_source(WorkerEnvironment.model_validate_json(sys.argv[1])))
env.reset(seed=0)
env.step(env.action_space.sample())
print("stepped")
"""
    assert python(images["worker-actor"], program, environment.model_dump_json()).endswith("stepped\n")


def test_it_runs_as_a_non_root_user(image: Image) -> None:
    """The user is a number, so that Kubernetes knows that it is not root, and has a name."""
    assert image.config["User"] == f"{USER}:{USER}"
    program = "import getpass, os; print(os.getuid(), os.getgid(), getpass.getuser(), os.environ['HOME'])"
    assert python(image, program) == f"{USER} {USER} rlsrl /tmp\n"


def test_no_file_belongs_to_its_user(image: Image) -> None:
    """It can write only to /tmp, even if the root is not read-only."""
    own = [path for path in image.root.rglob("*") if not path.is_symlink() and path.stat().st_uid == USER]
    assert own == []


def test_only_trainers_have_a_compiler(image: Image) -> None:
    names = ("gcc", "g++", "cc", "c++", "cpp", "clang", "ld", "as", "make", "cargo", "go")
    found = {name for name in names if image.holds(f"usr/bin/{name}") or image.holds(f"usr/local/bin/{name}")}
    assert found == ({"gcc", "g++", "cc", "c++", "cpp", "ld", "as"} if image.kind == "worker-learner" else set())


def test_it_is_as_small_as_promised(image: Image) -> None:
    cuda = CUDA_MEGABYTES if image.holds("usr/local/lib/python3*/site-packages/nvidia") else 0
    assert image.archive.stat().st_size / 1e6 < SIZE_LIMITS[image.kind] + cuda


def test_its_labels_describe_it(image: Image) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    labels = {name.removeprefix("org.opencontainers.image."): text for name, text in image.config["Labels"].items()}
    assert labels["version"] == project["version"]
    assert labels["licenses"] == project["license"]
    assert labels["title"].startswith("rlsrl ")
    assert labels["base.name"]
    assert image.name.removeprefix("docker.io/") == NAMES[image.kind]


def test_its_versions_are_the_pinned_ones(image: Image) -> None:
    pins = dict(line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line)
    program = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"
    installed = dict(line.split("==") for line in python(image, program).splitlines())
    foreign = {"rlsrl", "pip", "setuptools", "wheel"}
    assert installed.keys() >= {"rlsrl", "pydantic"}
    normal = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    found = {name.lower().replace("_", "-"): version for name, version in installed.items() if name not in foreign}
    assert {name: version.removesuffix("+cpu") for name, version in found.items()} == {
        name: normal.get(name) for name in found
    }


def test_unchanged_inputs_build_nothing(tree: Path, archives: dict[str, Path]) -> None:
    before = {path: path.stat().st_ino for path in archives.values()}
    done = subprocess.run([tree / "hack" / "images"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert {path: path.stat().st_ino for path in map(Path, done.stdout.splitlines())} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-images"], "images: argument: --base-images; allowed: --base-image --build-arg --help\n"),
        (
            ["--build-arg", "EXTRA=env"],
            "images: --build-arg: EXTRA=env; allowed: BASE_IMAGE= COMPILER= EXTRAS= TORCH_VERSION= PIP_FIND_LINKS=\n",
        ),
    ],
)
def test_a_wrong_argument_gets_one_clear_error(arguments: list[str], message: str) -> None:
    done = subprocess.run([REPOSITORY / "hack" / "images", *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message)


def test_an_unknown_extra_is_refused_with_those_there_are() -> None:
    command = [sys.executable, str(REPOSITORY / "hack" / "images.d" / "requirements.py"), "env,atarii"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("requirements: extra: atarii; allowed: atari box2d build cluster-ui dev docs env ")
