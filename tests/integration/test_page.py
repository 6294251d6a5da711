"""The page of ``rlsrl ui`` in a real Chromium, with real runs behind it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver

from rlsrl.local.run_folder import LOCK, METRICS, RECORD, STATUS
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, rlsrl_command
from rlsrl.testing.waiting import until

ROWS = "return [...document.querySelectorAll('tbody tr')].map((row) => row.textContent).join(';')"
"""Text of all tables, also of those that are closed."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request: pytest.FixtureRequest) -> Iterator[WebDriver]:
    """Debian's Chromium, which reaches this machine alone."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    features = [{"name": "prefers-color-scheme", "value": request.param}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        yield driver
    finally:
        driver.quit()


@contextlib.contextmanager
def page(folder: Path) -> Iterator[str]:
    """Serve the runs of a folder; yield the page's address."""
    process = subprocess.Popen(
        [rlsrl_command(), "ui", "--port", "0"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert found, line
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def text_of(browser: WebDriver, selector: str = "main") -> str:
    return browser.find_element(By.CSS_SELECTOR, selector).text


def complaints(browser: WebDriver) -> list[str]:
    """Return what the browser complains about: failed requests, blocked content, exceptions."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_a_run_is_followed_from_the_list_to_its_death(browser: WebDriver, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=gate))
    with page(tmp_path) as address, desk.begin("--set", "stop={wallSeconds: 600}") as run:
        browser.get(address)
        until(lambda: "live" in text_of(browser), "the run is in the list")
        until(lambda: "training" in text_of(browser), "it trains")
        for _ in range(3):  # by the keyboard alone: skip link, home, the run
            browser.switch_to.active_element.send_keys(Keys.TAB)
        active = browser.switch_to.active_element
        assert active.text == "live"
        active.send_keys(Keys.ENTER)
        until(lambda: browser.find_elements(By.CSS_SELECTOR, "svg path.curve"), "its curve is drawn")
        until(lambda: "1 trainer" in text_of(browser, "figure"), "its workers are drawn")
        assert browser.switch_to.active_element.get_attribute("id") == "main", "screen readers go on at the content"
        label = browser.find_element(By.CSS_SELECTOR, "figure svg").get_attribute("aria-label")
        assert "1 trainer" in str(label)
        until(lambda: "produced" in text_of(browser), "the ledger is shown")
        until(lambda: browser.find_elements(By.CSS_SELECTOR, "#log option"), "logs are listed")
        until(lambda: "trainer 0" in str(browser.execute_script(ROWS)), "the workers' table has a row for each")
        run.send(signal.SIGKILL)
        until(lambda: run.has_ended, "it is dead")
        until(lambda: "not finished" in text_of(browser, ".facts"), "the death is seen")
        until(lambda: "running" not in str(browser.execute_script(ROWS)), "no worker is said to run")
    until(lambda: "not up to date" in text_of(browser, "#age"), "the page says that the server is gone")
    assert [
        line for line in complaints(browser) if "ERR_CONNECTION_REFUSED" not in line and "favicon" not in line
    ] == []


def test_five_hundred_workers_fit_the_page(browser: WebDriver, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = tmp_path / "runs" / "fleet"
    folder.mkdir(parents=True)
    (folder / RECORD).write_text("{}")
    workers = [
        {
            "index": index,
            "state": "running",
            "stale": index % 50 == 0,
            "activity": {"working: environment": 0.9, "credit": 0.1},
            "stats": {"samples_per_second": 100.0},
        }
        for index in range(500)
    ]
    roles = {"actor": workers, "buffer": workers[:4], "trainer": workers[:2], "coordinator": workers[:1]}
    (folder / STATUS).write_text(json.dumps({"phase": "training", "totals": {}, "roles": roles}))
    (folder / METRICS).write_text("")
    with page(tmp_path) as address, (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a run that trains
        browser.get(f"{address}#/run/fleet")
        until(lambda: len(browser.find_elements(By.CSS_SELECTOR, "svg rect.worker, svg rect.bad")) == 507, "all drawn")
        assert len(browser.find_elements(By.CSS_SELECTOR, "svg rect.bad")) == 10 + 1 + 1 + 1, "the silent ones"
        assert "50,000/s" in text_of(browser, "figure")
        width = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        assert width <= 0, "nothing is cut at the side"
        script = "const {color, backgroundColor} = getComputedStyle(document.body); return [color, backgroundColor]"
        colours = browser.execute_script(script)
        text, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert (paper < text) == (request.node.callspec.params["browser"] == "dark")
    assert [line for line in complaints(browser) if "ERR_CONNECTION_REFUSED" not in line] == []
