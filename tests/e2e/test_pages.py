"""The blocks of pages that need a cluster run on one, as a reader runs them.

Each page has a kubeconfig of its own, so that the namespace of its context is its own, too. The pages come before other
tests: a page installs a release, or has one installed for it, and nothing of it is left.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from page_blocks import PAGES, blocks_of
from page_session import PageSession

from rlsrl.testing.kubectl import CLUSTER_SECONDS, KubectlFailed, namespace, run

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1800)]

CHART = Path(__file__).parents[2] / "charts"
SYSTEM, RELEASE, DEFINITION = "rlsrl-system", "rlsrl", "rlexperiments.rlsrl.dev"
STATEMENT_SECONDS = 660.0
"""Deadline of a statement. The longest is a `kubectl wait` of ten minutes."""
INSTALLING = ("README.md", "charts/README.md", "docs/kubernetes/install.md")
"""Pages that install the operator themselves. The others suppose one."""
USING = tuple(
    page
    for page in PAGES
    if page not in INSTALLING and any(block.needs_cluster and not block.not_run for block in blocks_of(page))
)
MADE = (SYSTEM, "research", "team-a", "team-b")
"""Namespaces that pages make."""


@pytest.fixture(autouse=True)
def _clean(environment: Mapping[str, str]) -> Iterator[None]:
    """Remove what a page leaves: experiments, releases, the definition, namespaces.

    A release is removed before the namespace in which it is: Helm would not find its cluster-wide objects any more.
    """
    assert environment
    if releases():
        pytest.fail("a release is installed already: these tests come first", pytrace=False)
    yield
    if DEFINITION in run("kubectl", "get", "crd", "-o", "name"):
        command = ("kubectl", "delete", "rlexperiments", "--all", "--all-namespaces", "--wait=true")
        run(*command, seconds=CLUSTER_SECONDS)
    for place in releases():
        run("helm", "uninstall", RELEASE, "--namespace", place, "--wait")
    run("kubectl", "delete", "crd", DEFINITION, "--ignore-not-found")
    run("kubectl", "delete", "namespace", *MADE, "--ignore-not-found", "--wait=true", seconds=CLUSTER_SECONDS)


def releases() -> list[str]:
    """Return the namespaces with a release of the chart."""
    listed = json.loads(run("helm", "list", "--all-namespaces", "--all", "--output", "json"))
    return [each["namespace"] for each in listed if each["name"] == RELEASE]


@pytest.fixture
def environment(kubeconfig: str, tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """Yield the variables of a page: a copy of the kubeconfig, in whose context is a namespace of the page."""
    own = shutil.copy(kubeconfig, tmp_path / "kubeconfig")
    with namespace(f"page-{uuid.uuid4().hex[:8]}") as made:
        run("kubectl", "--kubeconfig", str(own), "config", "set-context", "--current", "--namespace", made.name)
        yield {"KUBECONFIG": str(own)}


@pytest.fixture
def operator(environment: Mapping[str, str]) -> None:
    """Install the operator as `install.md` does."""
    assert environment
    place = ("--namespace", SYSTEM, "--create-namespace")
    run("helm", "install", RELEASE, str(CHART), *place, "--wait", "--timeout", "2m")


def read(page: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Run all blocks of a page."""
    with PageSession(folder / "reader", environment=environment, seconds=STATEMENT_SECONDS) as session:
        try:
            for block in blocks_of(page):
                session.run(block)
            session.finish()
        except AssertionError as error:
            error.add_note(_state())
            raise


def _state() -> str:
    """Return all experiments and pods, for error messages."""
    try:
        return run("kubectl", "get", "rlexperiments,pods", "--all-namespaces", "-o", "wide")
    except KubectlFailed as error:
        return str(error)


@pytest.mark.parametrize("page", INSTALLING)
def test_a_page_that_installs_the_operator(page: str, environment: Mapping[str, str], tmp_path: Path) -> None:
    read(page, tmp_path, environment)


@pytest.mark.parametrize("page", USING)
def test_a_page_that_uses_the_operator(
    page: str, operator: None, environment: Mapping[str, str], tmp_path: Path
) -> None:
    assert operator is None
    read(page, tmp_path, environment)
