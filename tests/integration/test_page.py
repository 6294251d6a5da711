"""The page of ``rlsrl ui`` in a real Chromium, with real runs behind it, and with folders that look like runs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.select import Select

from rlsrl.local.run_folder import LOCK, METRICS, STATUS
from rlsrl.local.run_names import RECORD
from rlsrl.local.run_record import RunRecord
from rlsrl.testing.browser import accessible, chromium, complaints, page, text_of
from rlsrl.testing.live_runs import GATED_EXPERIMENT, Desk
from rlsrl.testing.waiting import until
from rlsrl.ui.folder import RESUME

ROWS = "return [...document.querySelectorAll('tbody tr')].map((row) => row.textContent).join(';')"
"""Text of all tables, also of those that are closed."""
SAID = "return document.getElementById('said').textContent"
"""What screen readers were told last."""
RECORDED = json.loads((Path(__file__).parent / "recorded_statuses.json").read_text())["statuses"]
"""Statuses of a real run, which `hack/recorded_statuses.py` has recorded: at its start, while it trains, with a silent
worker, and with one that is gone."""
TRAINING = RECORDED[1]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["light", "dark"])
def browser(request: pytest.FixtureRequest) -> Iterator[WebDriver]:
    with chromium(request.param) as browser:
        yield browser


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
        assert "1 trainer: 1 " in str(label)
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


def test_a_run_that_a_workers_failure_ended_says_why(browser: WebDriver, tmp_path: Path) -> None:
    desk = Desk(tmp_path, GATED_EXPERIMENT.format(gate=tmp_path / "never"))
    with page(tmp_path) as address, desk.begin("--set", "restarts.budget=0") as run:
        run.until(lambda: run.is_complete() and desk.facts().train_steps() > 0, "training with all workers")
        browser.get(f"{address}#/run/live")
        until(lambda: "training" in text_of(browser, ".facts"), "it trains")
        os.kill(run.workers("actor")[0].pid, signal.SIGKILL)
        assert run.wait() == 1
        until(lambda: "failed" in text_of(browser, ".facts"), "the failure is seen")
        why = text_of(browser, ".problems.failed")
        assert re.match(r"FAILED: actor-\d was killed by SIGKILL: all 0 restarts of this role are spent", why), why
        assert why.endswith(RESUME)
        assert str(browser.execute_script(SAID)).startswith("live: failed. FAILED: actor-")
        assert len(browser.find_elements(By.CSS_SELECTOR, "svg rect.ended")) >= 3, "the actors and the trainer"
        assert browser.find_elements(By.CSS_SELECTOR, "svg rect.alive, svg rect.bad") == []
        assert "actor 0ended" in str(browser.execute_script(ROWS))
    assert [line for line in complaints(browser) if "ERR_CONNECTION_REFUSED" not in line] == []


def test_a_run_shows_its_evaluations_logs_and_metrics(browser: WebDriver, tmp_path: Path) -> None:
    evaluated = GATED_EXPERIMENT + "  evaluators: {{environments: 4}}\n"
    desk = Desk(tmp_path, evaluated.format(gate=tmp_path / "never"))
    count = "return document.querySelectorAll('svg circle.point').length"
    with page(tmp_path) as address, desk.begin() as run:
        run.until(run.is_complete, "all workers run")
        browser.get(f"{address}#/run/live")
        until(lambda: browser.execute_script(count) > 0, "an evaluation is on the curve")
        rows = "[...document.querySelectorAll('tbody tr')].map((row) => row.innerText)"
        best = f"return {rows}.filter((row) => /best/.test(row))"
        until(lambda: browser.execute_script(best), "the best version is listed")
        version, tags, env_steps, _, evaluation, *_ = str(browser.execute_script(best)[0]).split("\t")
        assert (version[:2], tags) == ("1.", "best")
        assert env_steps.replace(",", "").isdigit()
        assert 0 <= float(evaluation) <= 8, "returns of this environment"
        assert "7.5" in text_of(browser), "the goal of the mean return is shown"
        Select(browser.find_element(By.ID, "log")).select_by_visible_text("trainer-0.jsonl")
        until(lambda: "info" in text_of(browser, "pre"), "the trainer's log has lines")
        Select(browser.find_element(By.ID, "metric")).select_by_visible_text("train/entropy")
        label = "return [...document.querySelectorAll('figure svg')].map((svg) => svg.ariaLabel).join()"
        until(lambda: "train/entropy over env steps" in str(browser.execute_script(label)), "the metric is drawn")
        assert browser.execute_script(count) == 0, "evaluations have no entropy"
        until(lambda: "update" in str(browser.execute_script(ROWS)), "the table says what the trainer works on")
        browser.execute_script("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        assert "GatedEnv" in text_of(browser), "the experiment is shown"
        run.send(signal.SIGINT)
        run.wait()
    assert [line for line in complaints(browser) if "ERR_CONNECTION_REFUSED" not in line] == []


def test_a_failure_is_text(browser: WebDriver, tmp_path: Path) -> None:
    failure = "actor-0: <img src='/static/icon.svg' class='made'>\n  File \"a.py\""
    record = RunRecord(run_uid="1", created_at=0.0, package_version="0", failure=failure)
    (tmp_path / "runs" / "odd").mkdir(parents=True)
    (tmp_path / "runs" / "odd" / RECORD).write_text(json.dumps(record.to_json()))
    with page(tmp_path) as address:
        browser.get(f"{address}#/run/odd")
        script = "return document.querySelector('.problems.failed')?.textContent"
        until(lambda: failure in str(browser.execute_script(script)), "the failure is shown as it is")
        assert browser.find_elements(By.CSS_SELECTOR, ".made") == []


def workers_of(number: int, *, silent: Collection[int] = ()) -> list[dict[str, Any]]:
    """Return so many actors, with the reports of the recorded ones in turn."""
    reports = TRAINING["roles"]["actor"]
    return [{**reports[n % len(reports)], "index": n, "stale": n in silent} for n in range(number)]


def replayed(status: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a recorded status as one of a run of so many workers: each recorded worker reports in turn for some."""
    workers = [(role, report) for role, reports in status["roles"].items() for report in reports]
    found = [*workers, *((report["role"], report) for report in status["gone"])]
    copies = [(role, {**report, "index": n}) for n in range(number) for role, report in [found[n % len(found)]]]
    present = [(role, report) for role, report in copies if "state" in report]
    roles = {role: [report for each, report in present if each == role] for role in status["roles"]}
    return {**status, "roles": roles, "gone": [report for _, report in copies if "state" not in report]}


def states_of(status: Mapping[str, Any]) -> dict[str, Counter[str]]:
    """Return how many workers of each role the page is to show in each state, in the order of the status."""
    return {
        role: Counter(["silent" if report["stale"] else report["state"] for report in reports])
        + Counter(["gone" for report in status["gone"] if report["role"] == role])
        for role, reports in status["roles"].items()
    }


def shows(browser: WebDriver, states: Mapping[str, Counter[str]]) -> bool:
    """Return whether the picture's text for screen readers has the number of workers of each role in each state."""
    labels = browser.execute_script("return [...document.querySelectorAll('figure svg')].map((svg) => svg.ariaLabel)")
    parts = [
        f"{found.total() - found['gone']} {role}: {', '.join(f'{number} {state}' for state, number in found.items())}"
        for role, found in states.items()
    ]
    return bool(labels) and all(part in labels[0] for part in parts)


def rows_of(steps: Collection[int], *, note: str = "") -> str:
    """Return rows of a learning curve. The page does not read ``note``."""
    rows = [
        {"step": step, "role": "trainer", "scalars": {"env_steps": 100 * step, "return_mean": step}, "note": note}
        for step in steps
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_status(
    folder: Path, roles: Mapping[str, Any], *, stall: Mapping[str, Any] | None = None, **totals: Any
) -> None:
    write_document(folder, {"phase": "training", "totals": totals, "roles": roles, "stall": stall})


def write_document(folder: Path, status: Mapping[str, Any]) -> None:
    new = folder / "status.new"
    new.write_text(json.dumps(status))
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


def test_the_page_of_a_recorded_run_with_five_hundred_workers_stays_usable(
    browser: WebDriver, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    with page(tmp_path) as address, training(tmp_path / "runs" / "fleet", {}) as folder:
        browser.get(f"{address}#/run/fleet")
        for status in (replayed(each, 500) for each in RECORDED):
            write_document(folder, status)
            states = states_of(status)
            until(partial(shows, browser, states), "the picture has the workers' states")
            assert len(browser.find_elements(By.CSS_SELECTOR, "svg rect.alive, svg rect.bad")) == 500
            num_bad = sum(found["silent"] + found["gone"] for found in states.values())
            assert len(browser.find_elements(By.CSS_SELECTOR, "svg rect.bad")) == num_bad
        browser.find_element(By.CSS_SELECTOR, "summary").send_keys(Keys.ENTER)
        until(lambda: text_of(browser, "details").count("gone") == len(status["gone"]), "all are listed")
        assert len(browser.find_elements(By.CSS_SELECTOR, "details[open] tbody tr")) == 500
        write_document(folder, {**status, "totals": {**status["totals"], "env_steps": 54321}})
        until(lambda: "54,321" in text_of(browser, ".facts"), "the page goes on with the table open")
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
        assert "/s" not in text_of(browser, "figure"), "no role follows"


def test_screen_readers_get_the_state_of_each_worker(browser: webdriver.Chrome, tmp_path: Path) -> None:
    silent = RECORDED[2]
    with page(tmp_path) as address, training(tmp_path / "runs" / "fleet", {}) as folder:
        write_document(folder, silent)
        browser.get(f"{address}#/run/fleet")
        until(partial(shows, browser, states_of(silent)), "all are drawn")
        browser.find_element(By.CSS_SELECTOR, "summary").send_keys(Keys.ENTER)
        until(lambda: "silent" in text_of(browser, "details"), "the table is open")
        nodes = accessible(browser)
    rows = [node.text for node in nodes if node.role == "row"]
    for report in silent["roles"]["actor"]:
        state = "silent" if report["stale"] else "running"
        assert any(text.startswith(f"actor {report['index']} {state}") for text in rows), rows
    roles = [node.role for node in nodes]
    assert roles.count("status") == 2
    assert "alert" not in roles, "news are read when nothing else is"
    named = {(node.role, node.name) for node in nodes}
    assert {("figure", "workers"), ("table", "Workers"), ("table", "Versions"), ("combobox", "Metric")} <= named
    need_names = {"image", "img", "figure", "table", "combobox", "region", "link"}
    assert [role for role, name in named if role in need_names and not name] == []


def test_news_are_read_once(browser: WebDriver, tmp_path: Path) -> None:
    count = """
        window.news = 0;
        new MutationObserver(() => (window.news += 1)).observe(document.getElementById("said"), {childList: true});
    """

    def stall(seconds: float) -> dict[str, Any]:
        return {"seconds": seconds, "reasons": [f"actor-0 has waited for {seconds} s"]}

    with page(tmp_path) as address, training(tmp_path / "runs" / "fleet", {"actor": workers_of(2)}) as folder:
        browser.get(f"{address}#/run/fleet")
        until(lambda: browser.execute_script(SAID) == "fleet: training", "the state is read")
        browser.execute_script(count)
        for env_steps in (4321, 5432):
            write_status(folder, {"actor": workers_of(2)}, stall=stall(env_steps / 100), env_steps=env_steps)
            until(lambda: f"{env_steps:,}" in text_of(browser, ".facts"), "the page has the new status")
            assert browser.execute_script(SAID) == ("fleet: training. NO STEP for 43 s: actor-0 has waited for 43.21 s")
        assert browser.execute_script("return window.news") == 1


def test_the_keyboard_reaches_all_that_can_be_operated_or_scrolled(browser: WebDriver, tmp_path: Path) -> None:
    find = """
        window.waiting = new Set([...document.querySelectorAll("a, select, summary, [tabindex='0']")]
          .filter((each) => each.checkVisibility()));
        return window.waiting.size;
    """
    reach = """
        const reached = document.activeElement, {outlineStyle, outlineWidth} = getComputedStyle(reached);
        const isVisible = outlineStyle === "solid" && outlineWidth === "3px";
        return window.waiting.delete(reached) && !isVisible ? reached.outerHTML.slice(0, 80) : "";
    """
    with page(tmp_path) as address, training(tmp_path / "runs" / "fleet", {}) as folder:
        (folder / "logs").mkdir()
        (folder / "logs" / "a.log").write_text("a line")
        write_document(folder, TRAINING)
        browser.get("about:blank")
        browser.get(f"{address}#/run/fleet")
        until(lambda: "a line" in text_of(browser), "the page is whole")
        browser.execute_script("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        number = browser.execute_script(find)
        assert number > 10
        for _ in range(2 * number):  # browsers may stop at further elements
            ActionChains(browser).send_keys(Keys.TAB).perform()
            assert browser.execute_script(reach) == "", "its focus is visible"
        left = "return [...window.waiting].map((each) => each.outerHTML.slice(0, 80))"
        assert browser.execute_script(left) == []


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
