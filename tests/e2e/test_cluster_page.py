"""The page of the cluster: a Deployment of the chart that may only read."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from selenium.webdriver.common.by import By

from rlsrl.testing.browser import chromium, complaints, text_of
from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import CLUSTER_SECONDS, COMMAND_SECONDS, ClusterExperiment, Namespace, release
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

CHART = Path(__file__).parents[2] / "charts"
UI = "rlsrl-ui"
"""Name of the release's objects for the page."""
ROW_HEADS = "return [...document.querySelectorAll('tbody th')].map((head) => head.textContent).join(';')"
"""The first cells of all rows."""


@pytest.fixture(scope="module")
def ui(system: Namespace) -> Iterator[Namespace]:
    """Add the page to the release, and yield its namespace. Other tests suppose that the operator is alone there."""
    with release(system, CHART, "ui.enabled=true"):
        yield system


@pytest.fixture
def port(ui: Namespace, tmp_path: Path) -> Iterator[int]:
    """Yield a port of this machine that leads to the page."""
    output = tmp_path / "port-forward"
    command = ["kubectl", "port-forward", "--namespace", ui.name, f"service/{UI}", ":80"]
    # kubectl writes a line for each connection. A pipe that no one reads would fill up and block it.
    with output.open("w") as file, subprocess.Popen(command, stdout=file) as process:
        try:
            found = until(lambda: re.search(r"127\.0\.0\.1:(\d+)", output.read_text()), "the port is forwarded")
            yield int(found[1])
        finally:
            process.send_signal(signal.SIGINT)


def answer_of(port: int, path: str, host: str = "localhost") -> tuple[int, bytes]:
    """Return status and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read()


def get(port: int, path: str) -> Any:
    """Return the JSON value of an answer; an empty object while the page cannot read it."""
    status, data = answer_of(port, path)
    assert status in (200, 503), data
    return json.loads(data) if status == 200 else {}


def begun(where: Namespace, document: Object) -> ClusterExperiment:
    """Return an experiment that trains, and goes on."""
    document["spec"]["stop"] = {"wallSeconds": 1200}
    where.apply(document)
    experiment = ClusterExperiment(where, document["metadata"]["name"])
    experiment.await_phase("Running")
    until(lambda: experiment.env_steps() > 0, "the first numbers", timeout=CLUSTER_SECONDS)
    return experiment


def test_the_page_shows_an_experiment(where: Namespace, port: int, cartpole: Object) -> None:
    experiment = begun(where, cartpole)
    name = f"{where.name}:{experiment.name}"
    path = f"/api/runs/{quote(name)}"

    def page() -> Object:
        found: Object = get(port, path)
        return found

    until(lambda: name in [row["name"] for row in get(port, "/api/runs")], "the experiment is listed")
    until(lambda: page().get("ledger", {}).get("trained", 0) > 0, "the ledger counts")
    until(lambda: page().get("problems") == [], "nothing is wrong")
    seen = page()
    assert seen["state"] == "running"
    assert len(seen["roles"]["trainer"]["workers"]) == 2
    assert seen["totals"]["env_steps"] > 0
    assert {each["type"] for each in seen["conditions"]} >= {"Accepted", "Ready", "GangComplete"}
    first = until(lambda: (found := get(port, f"{path}/curve")).get("rows") and found, "the curve has rows")
    onwards = f"{path}/curve?after={first['next']}&file={quote(first['file'])}"
    second = until(lambda: (found := get(port, onwards)).get("rows") and found, "the curve has further rows")
    assert not second["anew"]
    until(lambda: get(port, f"{path}/versions").get("versions"), "a version is stored")
    until(lambda: "trainer-0" in (page().get("logs") or ()), "the trainer's log is kept")
    until(lambda: any("trainer" in line for line in get(port, f"{path}/logs/trainer-0")), "and can be read")
    assert answer_of(port, f"{path}/logs/absent-0")[0] == 404
    assert answer_of(port, f"/api/runs/{quote(where.name)}:absent")[0] == 404
    assert answer_of(port, "/api/runs", host="evil.example")[0] == 400

    where.kubectl("patch", "rlx", experiment.name, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    experiment.await_phase("Suspended")
    until(lambda: page().get("state") == "suspended", "the page shows the suspension")
    seen = page()
    assert (seen["roles"], seen["problems"], seen["logs"]) == ({}, [], None)
    assert seen["envSteps"] > 0, "the last numbers stay"


def test_the_page_may_only_read_experiments(ui: Namespace) -> None:
    account = f"system:serviceaccount:{ui.name}:{UI}"

    def may(*words: str) -> bool:
        command = ["kubectl", "auth", "can-i", *words, "--all-namespaces", f"--as={account}"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        assert answer.stdout.strip() in ("yes", "no"), answer
        return answer.stdout.strip() == "yes"

    for verb in ("get", "list"):
        assert may(verb, "rlexperiments.rlsrl.dev")
    for verb in ("create", "update", "patch", "delete", "watch"):
        assert not may(verb, "rlexperiments.rlsrl.dev")
    for kind in ("secrets", "configmaps", "pods", "services"):
        assert not may("get", kind)
    assert not may("get", "pods", "--subresource=log")
    assert not may("create", "pods", "--subresource=portforward")
    (policy,) = [each for each in ui.list("networkpolicies") if each["metadata"]["name"] == UI]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert not policy["spec"].get("ingress"), "by default the policy admits no pod"
    service = ui.get("service", UI)
    assert service is not None
    assert service["spec"]["type"] == "ClusterIP"


@pytest.mark.full
def test_an_experiment_is_followed_to_its_failure(where: Namespace, port: int, cartpole: Object) -> None:
    """From the list to the experiment, and what the page says once it has failed."""
    cartpole["spec"]["restarts"] = {"budget": 0}
    experiment = begun(where, cartpole)
    with chromium() as browser:
        browser.get(f"http://127.0.0.1:{port}/")
        link = f"{where.name}:{experiment.name}"
        until(lambda: browser.find_elements(By.LINK_TEXT, link), "the experiment is in the list")[0].click()
        until(lambda: browser.find_elements(By.CSS_SELECTOR, "svg path.curve"), "its curve is drawn")
        until(lambda: "2 trainer" in text_of(browser, "figure"), "its workers are drawn")
        until(lambda: "Progressing" in text_of(browser, "section"), "its conditions are shown")
        until(lambda: "trained" in str(browser.execute_script(ROW_HEADS)), "the ledger is shown")
        assert complaints(browser) == []
        where.delete("pod", f"{experiment.name}-trainer-0")
        experiment.await_phase("Failed")
        until(lambda: "FAILED: " in text_of(browser, ".problems.failed"), "the failure is seen")
        assert f"kubectl rlsrl logs {experiment.name}" in text_of(browser, ".problems.failed"), "with its cure"
        until(lambda: browser.find_elements(By.CSS_SELECTOR, "svg rect.ended"), "its workers are drawn as ended")
        until(lambda: "BudgetExhausted" in text_of(browser, "section .trouble"), "and its reason")
        assert f"kubectl rlsrl logs {experiment.name} --role trainer" in text_of(browser, "section"), "and its cure"
        # While the coordinator is away, answers about it have the status 503.
        assert [each for each in complaints(browser) if " 503 " not in each] == []
