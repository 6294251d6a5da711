"""The page of ``rlsrl ui`` in a real Chromium, with real runs behind it, and with folders that look like runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.select import Select

from rlsrl.local.run_folder import LOCK, METRICS, STATUS
from rlsrl.local.run_names import RECORD
from rlsrl.testing.browser import chromium, complaints, text_of
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk, rlsrl_command
from rlsrl.testing.waiting import until

ROWS = "return [...document.querySelectorAll('tbody tr')].map((row) => row.textContent).join(';')"
"""Text of all tables, also of those that are closed."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request: pytest.FixtureRequest) -> Iterator[WebDriver]:
    with chromium(request.param) as browser:
        yield browser


@contextlib.contextmanager
def page(folder: Path) -> Iterator[str]:
    """Serve the runs of a folder; yield the page's address."""
    (folder / "runs").mkdir(exist_ok=True)
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


def workers_of(number: int, *, silent: Collection[int] = ()) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "state": "running",
            "stale": index in silent,
            "activity": {"working: environment": 0.9, "credit": 0.1},
            "stats": {"samples_per_second": 100.0},
        }
        for index in range(number)
    ]


def rows_of(steps: Collection[int], *, note: str = "") -> str:
    """Return rows of a learning curve. The page does not read ``note``."""
    rows = [
        {"step": step, "role": "trainer", "scalars": {"env_steps": 100 * step, "return_mean": step}, "note": note}
        for step in steps
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_status(folder: Path, roles: Mapping[str, Any], **totals: Any) -> None:
    new = folder / "status.new"
    new.write_text(json.dumps({"phase": "training", "totals": totals, "roles": roles}))
    new.replace(folder / STATUS)


@contextlib.contextmanager
def training(folder: Path, roles: Mapping[str, Any]) -> Iterator[Path]:
    """Make the folder look like that of a run that trains."""
    folder.mkdir(parents=True)
    (folder / RECORD).write_text("{}")
    (folder / METRICS).write_text("")
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_status(folder, roles)
        yield folder


def test_five_hundred_workers_fit_the_page(browser: WebDriver, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    workers = workers_of(500, silent=range(0, 500, 50))
    roles = {"actor": workers, "buffer": workers[:4], "trainer": workers[:2], "coordinator": workers[:1]}
    with page(tmp_path) as address, training(tmp_path / "runs" / "fleet", roles):
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


def test_of_many_workers_those_that_do_not_run_are_drawn(browser: WebDriver, tmp_path: Path) -> None:
    roles = {"actor": workers_of(600, silent=(598, 599))}
    with page(tmp_path) as address, training(tmp_path / "runs" / "fleet", roles):
        browser.get(f"{address}#/run/fleet")
        until(lambda: "600 actor, 512 shown" in text_of(browser, "figure"), "as many as there is room for")
        assert len(browser.find_elements(By.CSS_SELECTOR, "svg rect.bad")) == 2
        assert "60,000/s" not in text_of(browser, "figure"), "no role follows"


def test_what_does_not_change_keeps_its_selection_and_focus(browser: WebDriver, tmp_path: Path) -> None:
    select = """
        const cells = [...document.querySelectorAll("tbody th")];
        const cell = cells.find((each) => each.textContent.trim() === arguments[0]);
        cell.closest("details").open = true;
        getSelection().selectAllChildren(cell);
        document.querySelector("details summary").focus();
    """
    selected = "return [getSelection().toString(), document.activeElement.tagName]"
    with page(tmp_path) as address, training(tmp_path / "runs" / "fleet", {"actor": workers_of(2)}) as folder:
        browser.get(f"{address}#/run/fleet")
        until(lambda: "actor 1" in str(browser.execute_script(ROWS)), "the workers are listed")
        browser.execute_script(select, "actor 1")
        assert browser.execute_script(selected) == ["actor 1", "SUMMARY"]
        write_status(folder, {"actor": workers_of(2, silent=(1,))}, env_steps=4321)
        until(lambda: "4,321" in text_of(browser, ".facts"), "the page has the new status")
        until(lambda: "silent" in str(browser.execute_script(ROWS)), "so has the table")
        assert browser.execute_script(selected) == ["actor 1", "SUMMARY"]
        browser.get(f"{address}#/")
        until(lambda: browser.find_elements(By.LINK_TEXT, "fleet"), "the list is shown")
        browser.execute_script("arguments[0].focus()", browser.find_element(By.LINK_TEXT, "fleet"))
        with training(tmp_path / "runs" / "newer", {}):
            os.utime(folder / STATUS, (1e9, 1e9))  # it moves to the second place
            os.utime(folder / METRICS, (1e9, 1e9))
            os.utime(folder / RECORD, (1e9, 1e9))
            until(lambda: str(browser.execute_script(ROWS)).startswith("newer"), "the other run is listed first")
            assert browser.switch_to.active_element.text == "fleet"
            write_status(folder, {})
            until(lambda: str(browser.execute_script(ROWS)).startswith("fleet"), "it moves to the first place again")
            assert browser.switch_to.active_element.text == "fleet"


def test_an_older_answer_about_logs_does_not_replace_a_newer_one(browser: WebDriver, tmp_path: Path) -> None:
    hold = """
        const real = window.fetch, held = [];
        window.release = () => held.splice(0).forEach((go) => go());
        window.fetch = async (path) => {
          const answer = await real(path);
          if (path.endsWith("/logs/a.log")) await new Promise((go) => held.push(go));
          return answer;
        };
        window.isHeld = () => held.length > 0;
    """
    with page(tmp_path) as address, training(tmp_path / "runs" / "fleet", {}) as folder:
        (folder / "logs").mkdir()
        for name in ("a.log", "b.log"):
            (folder / "logs" / name).write_text(f"line of {name}")
        browser.get(f"{address}#/run/fleet")
        until(lambda: "line of a.log" in text_of(browser), "the first log is shown")
        (folder / "logs" / "a.log").write_text("late line of a.log")
        browser.execute_script(hold)
        until(lambda: browser.execute_script("return isHeld()"), "an answer is on its way")
        Select(browser.find_element(By.ID, "log")).select_by_value("b.log")
        until(lambda: "line of b.log" in text_of(browser), "the chosen log is shown")
        browser.execute_script("release()")
        browser.execute_async_script("setTimeout(arguments[0])")  # the page has done what waited
        assert "a.log" not in text_of(browser, "pre")
        assert "line of b.log" in text_of(browser, "pre")


@pytest.mark.parametrize("part", ["%", "%ff", "%E0%A4%A"])
def test_a_malformed_address_shows_the_list(browser: WebDriver, tmp_path: Path, part: str) -> None:
    with page(tmp_path) as address, training(tmp_path / "runs" / "fleet", {}):
        damaged = os.fsencode(tmp_path) + b"/runs/\xff"
        os.mkdir(damaged)
        Path(os.fsdecode(damaged), RECORD).write_text("{}")
        browser.get("about:blank")
        browser.get(f"{address}#/run/{part}")
        script = "return document.querySelector('main').textContent.toWellFormed()"
        until(lambda: "fleet" in browser.execute_script(script), "runs are listed, also beside a name that is no text")
        assert f"The address #/run/{part} names no run." in browser.execute_script(script)
        assert [line for line in complaints(browser) if "ERR_CONNECTION_REFUSED" not in line] == []


def test_the_curve_of_a_fresh_run_replaces_that_of_the_old_one(browser: WebDriver, tmp_path: Path) -> None:
    with page(tmp_path) as address, training(tmp_path / "runs" / "fleet", {}) as folder:
        (folder / METRICS).write_text(rows_of(range(1, 4)))
        browser.get(f"{address}#/run/fleet")
        until(lambda: curve_label(browser).endswith("3 points"), "its curve is drawn")
        new = folder / "metrics.new"
        new.write_text(rows_of(range(11, 19), note="longer than all rows of the old curve" * 10))
        new.replace(folder / METRICS)
        until(lambda: curve_label(browser).endswith("8 points"), "the new curve is drawn, and no point of the old one")


def curve_label(browser: WebDriver) -> str:
    found = browser.find_elements(By.CSS_SELECTOR, "svg:has(path.curve)")
    return str(found[0].get_attribute("aria-label")) if found else ""
