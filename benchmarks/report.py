"""Make the page, table and picture of all results: ``make bench-report``.

Writes ``docs/benchmarks/README.md`` and ``ratios.png`` from the JSON files beside them, and the table into the
repository's README between two marks. A workload without a result is listed as not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import learning
import memory_over_time
from figures import RLSRL, SHOWN
from learning import COMPARISONS, HINDERED, Comparison, control_of, programs_of
from machine import REPOSITORY
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from memory_over_time import WATCHED
from results import FLOORS_KEPT_AS, FOLDER, SECONDS, kept
from workloads import WORKLOADS, Workload

PAGE, PICTURE = "README.md", "ratios.png"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
NOT_MEASURED = "not shown: not measured"
OTHER_SETTINGS = "not shown: measured with other settings"
HEADER = ("", "workload", "rlsrl", "fastest peer", "rlsrl / peer", "others used", "processor")
LEGEND = """\
Figures are trained environment steps a second; for L they are seconds, and fewer are better. The
contestants took turns in the rounds of one run, and each figure is the median over the rounds. Each round has its own
ratio; the table has the median, the lowest and the highest ratio. L's ratio is that of the medians: its rounds are
seeds, which differ by more than programs do. All figures of a row are from one machine; rows may be from different
machines.

All contestants have equal environments, networks, minibatches, epochs and gradient steps a sample. rlsrl runs with its
recommended settings: the training step is compiled, the acting weights are up to one step old, and the network for
images (W2, B2, R2, G2) computes in bfloat16. Peers compute in float32, uncompiled, as their users run them. Among them
only Sample Factory acts while it trains.

`jax` is a single file in which JAX compiles environment, policy and update into one program, in the manner of PureJaxRL
(Lu et al. 2022). It is a peer in W1N and B1N, where everyone may step environments as fast as they can. In W1 and B1
all others step Gymnasium's environment, so that its figure stands apart: it shows what a compiled environment allows.

*Others used* is the largest share of the machine's processor time that other programs used during a turn. It is a
difference of two clocks, so it may be slightly negative."""
ORIGIN = """\
`make bench-report` makes this page from the files beside it. `make bench W=W1` writes the file of a workload, with all
rounds, including noisy ones, and with settings, versions, machine and commit. If a commit was rewritten later, it has
another name and the same hash of the tree `worker/`, which newer results name, too."""
SHORT = """\
G2 has no verdict: it ran for three short rounds, with windows of 12 and 14 s and against Sample Factory in one setting
(16 workers), on an NVIDIA H200 with 16 cores (2026-11-26, PyTorch 2.11): rlsrl 15,896, 17,856 and 16,224, Sample
Factory 14,646, 15,226 and 13,442, which gives ratios of 1.09, 1.17 and 1.21. The policy worker answered by recorded
evaluations ([0058](../decisions/0058-replay-evaluations-on-a-gpu.md)), in a version that was tidied since. In two
earlier rounds without them (commit 4b93b36856cd) rlsrl came to 11,327 and 11,902, Sample Factory to 13,787 and 14,258,
the single file to 8,139 and 8,384, and Stable-Baselines3 to 4,449 and 5,414."""

LEARNING = """\
`python benchmarks/learning.py NAME` compares rlsrl, compiled and with a lag of one step, with the single file and equal
settings. The bootstrap interval of the ratio of the medians must lie within 0.8 and 1.25. If it crosses a bound, seeds
are added, up to 100. For CartPole the same check must find that a run with a slowed trainer and the largest lag learns
worse. Pong has too few seeds for an interval, so its means are compared."""
MEMORY = """\
`python benchmarks/memory_over_time.py W1` measures the memory for an hour. The growth is the slope of a line, with its
95 % interval."""

FLOORS = """\
`python benchmarks/product_floors.py` times each product of an update by itself, convolutions and gradients included,
with as many threads as cores, by the fastest of torch's libraries. The floor of an update is the sum. The share is what
the result above reaches of the updates a second that the floor allows."""

PAIRED = """\
`make paired BASE=REV W=W1` compares the speed of the checked-out commit with an older one, or with several (`BASE="REV
REV"`). All run the workload in turn: 30 rounds, each commit for 20 s, the order reversed from round to round. Each
commit runs in its own checkout (a git worktree under `.paired/trees`) on the workload as its own
`benchmarks/workloads.py` defines it. Commits with the same dependencies share this Python environment; for a commit
with other dependencies its own `make setup` makes another one.

The command prints the ratios of each round, and for each older commit the median ratio with its 90 % bounds. The bounds
are order statistics (the sign test's), so they assume nothing about the distribution. Beside the speed is the processor
time of one env step. A round counts if other programs used at most 3 % of the machine during all its turns. Other
rounds are printed and discarded. Each round is stored under `.paired/rounds` as soon as it is measured; after an
interruption the same command continues. One invocation takes at most two hours, and ends after 30 discarded rounds."""

Result = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The kept results of all measurements, by name. Missing ones were not measured."""

    throughput: Mapping[str, Result] = field(default_factory=dict)
    learning: Mapping[str, Result] = field(default_factory=dict)
    memory: Mapping[str, Result] = field(default_factory=dict)
    floors: Mapping[str, Result] = field(default_factory=dict)
    """Of the products of workloads with replay."""

    @classmethod
    def read(cls) -> Self:
        """Read the results from their files."""
        return cls(
            throughput=_found(WORKLOADS, ""),
            learning=_found(COMPARISONS, learning.KEPT_AS),
            memory=_found(WATCHED, memory_over_time.KEPT_AS),
            floors=(kept(FLOORS_KEPT_AS) or {"floors": {}})["floors"],
        )


def main() -> None:
    """Write the page, the picture and the README's table."""
    measured = Measured.read()
    results = measured.throughput
    FOLDER.mkdir(parents=True, exist_ok=True)
    draw(results, FOLDER / PICTURE)
    (FOLDER / PAGE).write_text(page(measured))
    readme = REPOSITORY / "README.md"
    readme.write_text(with_part(readme.read_text(), f"{table(results)}\n"))
    print(f"{len(results)} of {len(WORKLOADS)} workloads are measured: {FOLDER / PAGE}, {readme}")


def with_part(text: str, part: str) -> str:
    """Return the text with ``part`` between the marks.

    Raises:
        ValueError: the text does not have each mark once, in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"the text must have one {BEGIN} and then one {END}")
    return f"{before}{BEGIN}\n{part}{END}{after}"


def table(results: Mapping[str, Result]) -> str:
    """Return a Markdown table with one row per workload."""
    rows = [HEADER, ("---",) * len(HEADER)]
    rows += [_row(workload, results.get(name)) for name, workload in WORKLOADS.items()]
    return _markdown(rows)


def learning_table(learned: Mapping[str, Result]) -> str:
    """Return a Markdown table with one row per comparison, and one per negative control."""
    rows = [("", "figure", "result", "verdict", "when and where"), ("---",) * 5]
    for name, comparison in COMPARISONS.items():
        found = learned.get(name, {})
        missing = NOT_MEASURED if _is_of_today(comparison, found) else OTHER_SETTINGS
        # Runs are kept one by one, so that an unfinished comparison has some.
        judged = found if "verdict" in found and missing == NOT_MEASURED else {}
        rows.append((name, comparison.what, judged.get("why", ""), judged.get("verdict", missing), _origin(judged)))
        if comparison.has_control:
            control = judged.get("control", {})
            steps = f"; at most {control_of(comparison).workload.total_steps:,}"
            what = HINDERED if comparison.greedy_goal is None else HINDERED + steps
            rows.append(("", what, control.get("why", ""), control.get("verdict", missing), ""))
    return _markdown(rows)


def memory_table(watched: Mapping[str, Result]) -> str:
    """Return a Markdown table with one row per role of each run."""
    rows = [("", "role", "MB", "growth, MB an hour", "verdict", "when and where"), ("---",) * 6]
    for name in WATCHED:
        if (found := watched.get(name)) is None:
            rows.append((name, "", "", "", NOT_MEASURED, ""))
            continue
        experiment = WORKLOADS[name].experiment()["spec"]
        if found.get("experiment", experiment) != experiment:
            rows.append((name, "", "", "", OTHER_SETTINGS, ""))
            continue
        for role, growth in found["growths"].items():
            grown = f"{growth['per_hour']:+.2f} ± {growth['error']:.2f}"
            label = f"{name}, {found['minutes']} minutes, {found['env_steps']:,.0f} env steps"
            verdict = "grows" if growth["grows"] else "flat"
            rows.append((label, role, f"{growth['megabytes']:,.0f}", grown, verdict, _origin(found)))
    return _markdown(rows)


def floors_table(floors: Mapping[str, Result]) -> str:
    """Return the table of the products' floors."""
    rows: list[Sequence[str]] = [("workload", "products of an update", "floor", "share reached"), ("---",) * 4]
    for name, floor in floors.items():
        share = f"{floor['share']:.0%}" if "share" in floor else "not of the same machine"
        rows.append((name, f"{floor['products']:g}", f"{1e3 * floor['floor_seconds']:.2f} ms", share))
    return _markdown(rows)


def page(measured: Measured) -> str:
    """Return the page of all results."""
    results = measured.throughput
    parts = [
        "# Throughput against peers",
        LEGEND,
        ORIGIN,
        table(results),
        SHORT,
    ]
    if _shown(results):
        parts.append(f"![ratios]({PICTURE})")
    parts += ["## Learning", LEARNING, learning_table(measured.learning)]
    parts += ["## Memory", MEMORY, memory_table(measured.memory)]
    if measured.floors:
        parts += ["## Floors of matrix products", FLOORS, floors_table(measured.floors)]
    parts += ["## Two commits", PAIRED]
    if results:
        parts += ["## How each was measured", *(_details(result) for result in results.values())]
    return "\n\n".join(parts) + "\n"


def draw(results: Mapping[str, Result], path: Path) -> None:
    """Draw the ratios with their ranges, or remove the picture if there is no result."""
    if not (shown := _shown(results)):
        path.unlink(missing_ok=True)
        return
    figure = Figure(figsize=(8, 0.6 + 0.42 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    speeds = [times_as_fast(result) for result in shown]
    # The ratio of the medians may lie outside the range of the single seeds (L).
    beside = [
        [max(0.0, speed["median"] - speed["low"]) for speed in speeds],
        [max(0.0, speed["high"] - speed["median"]) for speed in speeds],
    ]
    names = [result["workload"] for result in shown]
    medians = [speed["median"] for speed in speeds]
    axes.barh(names, medians, xerr=beside, color="C0", ecolor="0.2", capsize=3, height=0.6)
    axes.axvline(1.0, color="0.2", linewidth=1.0)
    axes.invert_yaxis()
    axes.set_xlabel("rlsrl, times as fast as the fastest peer")
    figure.savefig(path, dpi=120)


def _found(names: Iterable[str], kept_as: str) -> dict[str, Result]:
    return {name: found for name in names if (found := kept(f"{kept_as}{name}")) is not None}


def _shown(results: Mapping[str, Result]) -> list[Result]:
    return [result for result in results.values() if result["verdict"] == SHOWN]


def times_as_fast(result: Result) -> Mapping[str, float]:
    """Return how many times as fast rlsrl is: the ratio, inverted for seconds."""
    ratio: Mapping[str, float] = result["ratio"]
    if result["unit"] != SECONDS:
        return ratio
    return {"median": 1.0 / ratio["median"], "low": 1.0 / ratio["high"], "high": 1.0 / ratio["low"]}


def _is_of_today(comparison: Comparison, found: Result) -> bool:
    """Return whether all kept runs have the present inputs of their programs."""
    programs = [*programs_of(comparison), *([control_of(comparison)] if comparison.has_control else [])]
    digests = {program.name: program.digest for program in programs}
    return all(program["digest"] == digests.get(name) for name, program in found.get("programs", {}).items())


def _origin(found: Result) -> str:
    if not found:
        return ""
    return f"{found['when'][:10]}, commit {found['machine']['commit']}, {found['machine']['processor']}"


def _markdown(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(workload: Workload, result: Result | None) -> tuple[str, ...]:
    missing = NOT_MEASURED if workload.device == "cpu" else f"{NOT_MEASURED}, needs a GPU"
    verdict = missing if result is None else str(result["verdict"])
    if result is None or verdict != SHOWN:
        return (workload.name, workload.title, verdict, "", "", "", "")
    figures, peer, ratio = result["figures"], result["fastest_peer"], result["ratio"]
    unit, better = (" s", ", less is better") if result["unit"] == SECONDS else ("", "")
    return (
        workload.name,
        workload.title,
        _amount(figures[RLSRL]["median"]) + unit + _beside(result, RLSRL),
        f"{peer} {_amount(figures[peer]['median'])}{unit}{_beside(result, peer)}",
        f"**{ratio['median']:.2f}** ({ratio['low']:.2f} to {ratio['high']:.2f}){better}{_apart(result)}",
        f"{result['others']:.1%}",
        result["machine"]["processor"],
    )


def _apart(result: Result) -> str:
    """Return the ratios to contestants that are no peers of the workload."""
    found = result.get("apart", {}).items()
    return "".join(f"; {ratio['median']:.2f} of {name}'s" for name, ratio in found)


def _beside(result: Result, name: str) -> str:
    """Return the share of the limit and the memory, if the workload has a limit."""
    limit = result.get("of_the_limit")
    return "" if limit is None else f" ({limit[name]:.1%} of the limit, {result['megabytes'][name]:,.0f} MB)"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _details(result: Result) -> str:
    machine = result["machine"]
    flags = ", ".join(machine["flags"]) or "none of AMX and AVX-512"
    tree = f" (`worker/` {machine['worker_tree']})" if "worker_tree" in machine else ""
    where = (
        f"{result['when']}, commit {machine['commit']}{tree}; {machine['processor']}, {machine['cores']} cores "
        f"({flags}), Python {machine['python']}, {_versions(machine['packages'])}."
    )
    lines = [
        f"### {result['workload']}: {result['title']}",
        "",
        where,
        "",
        *_contestants(result),
        *_rounds(result["rounds"], result["unit"]),
        *_profile(result["rounds"]),
    ]
    return "\n".join(lines)


def _contestants(result: Result) -> Iterable[str]:
    for name, contestant in result["contestants"].items():
        setting = f"`{contestant['setting']}`" if contestant["setting"] else "from the experiment"
        yield f"- {name}: {setting}; {_versions(contestant['versions'])}"
    for name, why in result["absent"].items():
        yield f"- {name} took no part: {why}"
    yield ""


def _rounds(rounds: Sequence[Mapping[str, Any]], unit: str) -> Iterable[str]:
    yield f"| round | contestant | {unit} | own use | others used | MB |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for number, round_ in enumerate(rounds, start=1):
        label = f"{number}" if round_["quiet"] else f"{number}, not quiet"
        for turn in round_["turns"]:
            figure = "-" if turn["figure"] is None else _amount(turn["figure"])
            memory = "-" if turn["megabytes"] is None else f"{turn['megabytes']:,.0f}"
            yield f"| {label} | {turn['contestant']} | {figure} | {turn['own']:.0%} | {turn['others']:.1%} | {memory} |"
    yield ""


def _profile(rounds: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield how rlsrl spent its time in the last round, if that is known."""
    turns = [turn for round_ in rounds for turn in round_["turns"] if turn["more"].get("profile")]
    if not turns:
        return
    yield "How rlsrl spent its time in the last round, by role (`cpu`: processor seconds a second of the process):"
    yield ""
    for role, shares in turns[-1]["more"]["profile"].items():
        listed = ", ".join(f"{what} {share:.0%}" for what, share in sorted(shares.items(), key=lambda item: -item[1]))
        yield f"- {role}: {listed}"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


if __name__ == "__main__":
    main()
