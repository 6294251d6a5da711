"""Make the pictures of docs/ui.md from a real run in Chromium: ``python hack/screenshots.py``.

It writes docs/images/ui.png and docs/images/ui-dark.png: the page of one run, in both colour schemes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal

from selenium.webdriver.common.by import By

from rlsrl.parameters.evaluations import evaluation_of
from rlsrl.testing.browser import chromium, page, text_of
from rlsrl.testing.live_runs import Desk, RunFolderFacts
from rlsrl.testing.waiting import until

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "cartpole-evaluated.yaml"
PICTURES: dict[Literal["light", "dark"], Path] = {
    "light": ROOT / "docs" / "images" / "ui.png",
    "dark": ROOT / "docs" / "images" / "ui-dark.png",
}
WIDTH, HEIGHT = 820, 980
"""Size of a picture in pixels."""
MIN_EVALUATIONS = 4
GOOD_RETURN = 400.0


def main() -> None:
    """Train, and take both pictures of the same run."""
    text = EXAMPLE.read_text().replace("name: cartpole-evaluated", "name: live")
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder), text)
        with (
            page(desk.folder) as address,
            desk.begin("--set", "stop={envSteps: 1000000}", "--set", "actors.replicas=4") as run,
        ):
            run.until(lambda: _has_learned(desk.facts()), "some evaluations, and a good return")
            for scheme, path in PICTURES.items():
                path.write_bytes(_picture(f"{address}#/run/live", scheme))


def _has_learned(facts: RunFolderFacts) -> bool:
    status = facts.status()
    learned = status is not None and (status["totals"]["return_mean"] or 0.0) >= GOOD_RETURN
    return learned and sum(evaluation_of(info) is not None for info in facts.versions()) >= MIN_EVALUATIONS


def _picture(address: str, scheme: Literal["light", "dark"]) -> bytes:
    """Return a PNG of the page."""
    with chromium(scheme) as browser:
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        browser.get(address)
        until(lambda: browser.find_elements(By.CSS_SELECTOR, "svg path.curve"), "the curve is drawn")
        until(lambda: "/s" in text_of(browser, "figure"), "the workers are drawn with their rate")
        return browser.get_screenshot_as_png()


if __name__ == "__main__":
    main()
