"""A real Prometheus for tests, on the loopback interface: it scrapes given targets and answers queries."""

from __future__ import annotations

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from rlsrl.testing.closing import ClosedAtExit
from rlsrl.testing.servers import free_address, start_server

ANSWER_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Target:
    """A metrics endpoint with the labels that a PodMonitor would add."""

    address: str
    labels: Mapping[str, str]
    path: str = "/metrics"
    honor_labels: bool = False
    """Whether the endpoint's own labels take precedence."""


class Prometheus(ClosedAtExit):
    """One server process with its data in a folder. Use as a context manager."""

    def __init__(self, folder: Path, targets: Sequence[Target], rules: Sequence[Path] = ()) -> None:
        """Start the server. It scrapes every target and evaluates every rule once a second.

        Raises:
            RuntimeError: the server does not start; the text has its output.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._address = free_address()
        configuration = folder / "prometheus.yaml"
        configuration.write_text(yaml.safe_dump(_configuration(targets, rules)))
        self._process = start_server(
            "prometheus", f"--web.listen-address={self._address}", f"--config.file={configuration}",
            f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn",
            log=folder / "log.txt", is_ready=self._is_ready,
        )  # fmt: skip

    def query(self, expression: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the current value of an expression: finite values by the labels of their series.

        Raises:
            ValueError: the expression is invalid.
        """
        result = self._get("query", query=expression)["result"]
        values = {tuple(sorted(each["metric"].items())): float(each["value"][1]) for each in result}
        return {labels: value for labels, value in values.items() if math.isfinite(value)}

    def label_values(self, query: str) -> set[str]:
        """Return the values of a dashboard variable: ``label_values(selector, label)``."""
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        if match is None:
            raise ValueError(f"{query!r} is not of the form label_values(selector, label)")
        return {value for labels in self.query(f"count by ({match[2]}) ({match[1]})") for _, value in labels}

    def alerts(self) -> set[str]:
        """Return the pending and firing alerts."""
        return {each["labels"]["alertname"] for each in self._get("alerts")["alerts"]}

    def evaluations(self) -> dict[str, str]:
        """Return the health of each alert's rule: ``ok`` after an evaluation without an error."""
        groups = self._get("rules")["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def faults(self) -> list[str]:
        """Return the errors of targets that cannot be scraped."""
        targets = self._get("targets")["activeTargets"]
        return [f"{each['scrapeUrl']}: {each['lastError']}" for each in targets if each["health"] != "up"]

    @override
    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=ANSWER_SECONDS):
                return True
        except OSError:
            return False

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"http://{self._address}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode(errors='replace')}") from error


def _configuration(targets: Sequence[Target], rules: Sequence[Path]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": list(_jobs(targets)),
    }


def _jobs(targets: Sequence[Target]) -> Iterator[dict[str, Any]]:
    for honor in (False, True):
        places = [
            {"targets": [each.address], "labels": {**each.labels, "__metrics_path__": each.path}}
            for each in targets
            if each.honor_labels is honor
        ]
        yield {"job_name": f"pods-{honor}", "honor_labels": honor, "static_configs": places}
