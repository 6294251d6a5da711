"""Debian's Chromium for tests, which reaches this machine alone, and the page of ``rlsrl ui`` for it."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from rlsrl.testing.live_runs import rlsrl_command


@contextmanager
def chromium(scheme: Literal["light", "dark"] = "light") -> Iterator[webdriver.Chrome]:
    """Yield a browser without a window, whose user prefers that colour scheme."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        yield driver
    finally:
        driver.quit()


@contextmanager
def page(folder: Path) -> Iterator[str]:
    """Serve the runs in ``folder/runs`` by ``rlsrl ui``; yield the page's address."""
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


def text_of(browser: WebDriver, selector: str = "main") -> str:
    """Return the text of the first element that matches the selector; empty if no element does."""
    try:
        return browser.find_element(By.CSS_SELECTOR, selector).text
    except (NoSuchElementException, StaleElementReferenceException):
        return ""


@dataclass(frozen=True, kw_only=True)
class AccessibleNode:
    """A part of a page as screen readers get it."""

    role: str
    name: str
    text: str
    """The text in it, with a space between its parts."""


def accessible(browser: webdriver.Chrome) -> list[AccessibleNode]:
    """Return the nodes of the page's accessibility tree."""
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    by_id = {node["nodeId"]: node for node in nodes}

    def value(node: dict[str, Any], member: str) -> str:
        return str(node.get(member, {}).get("value", ""))

    def text(node: dict[str, Any]) -> str:
        if value(node, "role") == "StaticText":
            return value(node, "name")
        children = (by_id[child] for child in node.get("childIds", ()) if child in by_id)
        return " ".join(filter(None, map(text, children)))

    return [
        AccessibleNode(role=value(node, "role"), name=value(node, "name"), text=text(node))
        for node in nodes
        if not node["ignored"]
    ]


def complaints(browser: webdriver.Chrome) -> list[str]:
    """Return the new complaints of the browser: failed requests, blocked content, exceptions."""
    entries: list[dict[str, str]] = browser.get_log("browser")  # type: ignore[no-untyped-call]
    return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
