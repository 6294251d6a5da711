"""The page of the cluster: a Deployment of the chart that may only read."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from rlsrl.testing.cluster_api import Object
from rlsrl.testing.kubectl import CLUSTER_SECONDS, ClusterExperiment, Namespace, run
from rlsrl.testing.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

UI = "rlsrl-ui"
"""Name of the release's objects for the page. All tests' release has them."""


@contextlib.contextmanager
def forwarded(system: Namespace) -> Iterator[int]:
    """Yield a port of this machine that leads to the page."""
    command = ["kubectl", "port-forward", "--namespace", system.name, f"service/{UI}", ":80"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
            assert found is not None
            yield int(found[1])
        finally:
            process.send_signal(signal.SIGINT)


def get(port: int, path: str, host: str = "localhost") -> Any:
    """Return the JSON value of an answer, or its status if it is an error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        data = answer.read()
        return json.loads(data) if answer.status == 200 else answer.status


def begun(where: Namespace, document: Object) -> ClusterExperiment:
    """Return an experiment that trains, and goes on."""
    document["spec"]["stop"] = {"wallSeconds": 1200}
    where.apply(document)
    experiment = ClusterExperiment(where, document["metadata"]["name"])
    experiment.await_phase("Running")
    until(lambda: experiment.env_steps() > 0, "the first numbers", timeout=CLUSTER_SECONDS)
    return experiment


def test_the_page_shows_an_experiment(where: Namespace, system: Namespace, cartpole: Object) -> None:
    experiment = begun(where, cartpole)
    name = f"{where.name}:{experiment.name}"
    path = f"/api/runs/{quote(name)}"
    with forwarded(system) as port:
        assert name in [row["name"] for row in get(port, "/api/runs")]
        page = get(port, path)
        assert (page["state"], page["problems"]) == ("running", [])
        assert len(page["roles"]["trainer"]["workers"]) == 2
        assert page["totals"]["env_steps"] > 0
        assert page["ledger"]["trained"] > 0
        assert {each["type"] for each in page["conditions"]} >= {"Accepted", "Ready", "Progressing"}
        until(lambda: get(port, f"{path}/curve")["rows"], "the curve has rows")
        first = get(port, f"{path}/curve")
        until(
            lambda: get(port, f"{path}/curve?after={first['next']}&file={quote(first['file'])}")["rows"],
            "the curve has further rows",
        )
        until(lambda: get(port, f"{path}/versions")["versions"], "a version is stored")
        until(lambda: "trainer-0" in get(port, path)["logs"], "the trainer's log is kept")
        assert any("trainer" in line for line in get(port, f"{path}/logs/trainer-0"))
        assert get(port, f"{path}/logs/..%2Fstatus") == 404
        assert get(port, f"/api/runs/{quote(where.name)}:absent") == 404
        assert get(port, "/api/runs", host="evil.example") == 400

        where.kubectl("patch", "rlx", experiment.name, "--type=merge", "-p", '{"spec": {"suspend": true}}')
        experiment.await_phase("Suspended")
        until(lambda: get(port, path)["state"] == "suspended", "the page shows the suspension")
        page = get(port, path)
        assert (page["roles"], page["problems"]) == ({}, [])
        assert page["envSteps"] > 0, "the last numbers stay"


def test_the_page_may_only_read_experiments(system: Namespace) -> None:
    account = f"system:serviceaccount:{system.name}:{UI}"

    def may(*words: str) -> bool:
        command = ["kubectl", "auth", "can-i", *words, "--all-namespaces", f"--as={account}"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    assert may("list", "rlexperiments.rlsrl.dev")
    for verb in ("create", "update", "patch", "delete", "watch"):
        assert not may(verb, "rlexperiments.rlsrl.dev")
    for kind in ("secrets", "configmaps", "pods", "services"):
        assert not may("get", kind)
    assert not may("get", "pods", "--subresource=log")
    assert not may("create", "pods", "--subresource=portforward")
    (policy,) = [each for each in system.list("networkpolicies") if each["metadata"]["name"] == UI]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert not policy["spec"].get("ingress"), "nobody is let in by default"
    service = json.loads(run("kubectl", "get", "service", UI, "--namespace", system.name, "--output", "json"))
    assert service["spec"]["type"] == "ClusterIP"


@pytest.fixture
def browser() -> Iterator[WebDriver]:
    """Debian's Chromium, which reaches this machine alone."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1400"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.mark.full
def test_an_experiment_is_followed_to_its_failure(
    browser: WebDriver, where: Namespace, system: Namespace, cartpole: Object
) -> None:
    """From the list to the experiment, and what the page says once its spec cannot be carried out."""

    def text(selector: str = "main") -> str:
        return browser.find_element(By.CSS_SELECTOR, selector).text

    cartpole["spec"]["restarts"] = {"budget": 0}
    experiment = begun(where, cartpole)
    with forwarded(system) as port:
        browser.get(f"http://127.0.0.1:{port}/")
        until(lambda: f"{where.name}:{experiment.name}" in text(), "the experiment is in the list")
        browser.find_element(By.LINK_TEXT, f"{where.name}:{experiment.name}").click()
        until(lambda: browser.find_elements(By.CSS_SELECTOR, "svg path.curve"), "its curve is drawn")
        until(lambda: "2 trainer" in text("figure"), "its workers are drawn")
        until(lambda: "Progressing" in text("section"), "its conditions are shown")
        until(lambda: "trained" in text(), "the ledger is shown")
        where.delete("pod", f"{experiment.name}-trainer-0")
        experiment.await_phase("Failed")
        until(lambda: "FAILED: " in text(".problems"), "the failure is seen")
        until(lambda: "BudgetExhausted" in text("section"), "and its reason")
        assert f"kubectl rlsrl logs {experiment.name} --role trainer" in text("section"), "and its cure"
        assert browser.find_element(By.CSS_SELECTOR, ".trouble").text == "BudgetExhausted"
        complaints = [each for each in browser.get_log("browser") if each["level"] in ("SEVERE", "WARNING")]
    # While the coordinator is away, answers about it have the status 503.
    assert [each["message"] for each in complaints if " 503 " not in each["message"]] == []
