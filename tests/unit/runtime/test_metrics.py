import re
from collections import Counter as Count
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

import rlsrl
from rlsrl.api.roles import ROLES
from rlsrl.runtime.ledger import CHAIN, LedgerPage
from rlsrl.runtime.metrics import Declaration, LedgerCollector, Metrics

KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
ATTRIBUTES = {name: each for name in dir(Metrics) if isinstance(each := getattr(Metrics, name), Declaration)}


def shown(registry: CollectorRegistry) -> set[str]:
    """Return rlsrl's metric families, without the ``process_*`` families."""
    return {family.name for family in registry.collect() if not family.name.startswith("process_")}


def test_names_are_unique() -> None:
    assert max(Count(each.name for each in Metrics.declared()).values()) == 1


@pytest.mark.parametrize("declaration", Metrics.declared(), ids=lambda each: each.name)
def test_declarations_follow_the_conventions(declaration: Declaration) -> None:
    assert declaration.name.startswith("rlsrl_")
    assert declaration.name.endswith("_total") == (declaration.kind == "counter")
    assert not declaration.unit or declaration.unit in declaration.name
    assert declaration.help.endswith(".")
    assert declaration.roles
    assert len(declaration.labels) <= 1, "labels multiply series"
    assert (declaration.kind == "histogram") == bool(declaration.buckets)
    assert list(declaration.buckets) == sorted(set(declaration.buckets))


def test_every_role_of_the_table_sets_metrics_and_the_ledger_names_no_other() -> None:
    table = {role.name for role in ROLES}
    assert {role for declaration in Metrics.declared() for role in declaration.roles} == table
    assert set(CHAIN) <= table


def test_every_declaration_is_set_somewhere() -> None:
    package = Path(rlsrl.__file__).parent
    sources = "\n".join(path.read_text() for path in package.rglob("*.py") if path.name != "metrics.py")
    unset = [name for name in ATTRIBUTES if not re.search(rf"metrics\.{name}\b", sources)]
    assert not unset, "every declared metric is set by some code"


def test_a_process_exposes_only_the_metrics_that_it_sets() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    assert shown(registry) == set()
    metrics.env_steps.inc(128)
    metrics.waiting_seconds.labels(reason="credit").inc(0.5)
    assert shown(registry) == {"rlsrl_env_steps", "rlsrl_waiting_seconds"}
    assert registry.get_sample_value("rlsrl_env_steps_total") == 128
    assert registry.get_sample_value("rlsrl_waiting_seconds_total", {"reason": "credit"}) == 0.5


def test_every_declaration_creates_its_kind_of_instrument() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    by_name = {declaration.name: name for name, declaration in ATTRIBUTES.items()}
    for name, attribute in by_name.items():
        declaration = getattr(Metrics, attribute)
        assert declaration.name == name
        instrument = getattr(metrics, attribute)
        assert type(instrument) is KINDS[declaration.kind]
        assert getattr(metrics, attribute) is instrument
    assert shown(registry) == {name.removesuffix("_total") for name in by_name}


def test_two_registries_share_no_value() -> None:
    first, second = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    first.rollouts.inc()
    second.rollouts.inc(5)
    assert first.registry.get_sample_value("rlsrl_rollouts_total") == 1
    assert second.registry.get_sample_value("rlsrl_rollouts_total") == 5


def test_lag_is_a_histogram_of_steps() -> None:
    metrics = Metrics(CollectorRegistry())
    for lag in (0, 0, 1, 100):
        metrics.policy_lag.observe(lag)
    sample = metrics.registry.get_sample_value
    buckets = {
        bound: sample("rlsrl_policy_lag_steps_bucket", {"le": bound}) for bound in ("0.0", "1.0", "64.0", "+Inf")
    }
    assert buckets == {"0.0": 2, "1.0": 3, "64.0": 3, "+Inf": 4}


def test_first_use_by_many_threads_makes_one_instrument() -> None:
    metrics = Metrics(CollectorRegistry())

    def use() -> None:
        metrics.train_steps.inc()

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(use) for _ in range(200)]:
            future.result()
    assert metrics.registry.get_sample_value("rlsrl_train_steps_total") == 200


def test_the_present_ledger_page_is_exposed(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with LedgerPage.open(tmp_path / "actor-0.page", "actor", 0) as page:
        LedgerCollector(lambda: page.record, registry)
        for produced in (3, 7):
            page.update(produced=4 if produced == 7 else 3)
            assert registry.get_sample_value("rlsrl_ledger_transitions", {"term": "produced"}) == produced
    assert registry.get_sample_value("rlsrl_ledger_transitions", {"term": "lost.rolled_back"}) == 0


def test_the_process_metrics_are_exposed() -> None:
    text = generate_latest(Metrics(CollectorRegistry()).registry).decode()
    assert "process_resident_memory_bytes" in text
