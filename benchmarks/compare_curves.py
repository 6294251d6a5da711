"""Draw the learning curves of several programs, and print the last mean return of their seeds.

    python benchmarks/compare_curves.py --out docs/results/halfcheetah.png \\
        rlsrl=runs/hc1 rlsrl=runs/hc2 reference=ref1.csv reference=ref2.csv

Each argument is ``NAME=PATH``: a run folder, or a CSV of a reference program in this folder. Paths of one name are its
seeds. Prints mean and standard deviation, over the seeds, of the last mean return.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlsrl.local.curves import read_curve

Points = list[tuple[float, float]]


def points_of(path: Path) -> Points:
    """Return (transitions trained, mean return of the last 100 episodes), ascending."""
    if path.is_dir():
        return list(read_curve(path / "metrics.jsonl", path.name).returns.points)
    with path.open(newline="") as file:
        rows = [(float(row["env_steps"]), float(row["return_mean"])) for row in csv.DictReader(file)]
    return [(steps, mean) for steps, mean in rows if not math.isnan(mean)]


def draw(curves: Mapping[str, Sequence[Points]], out: Path, *, title: str, figures: str) -> None:
    """Draw the curves of each program's seeds into a picture. ``figures`` says what is drawn over env steps."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (name, seeds) in enumerate(curves.items()):
        for points in seeds:
            label = name if points is seeds[0] else None
            axes.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.8, linewidth=1.2, label=label)
    axes.set_xlabel("env steps")
    axes.set_ylabel(figures)
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    curves: dict[str, list[Points]] = defaultdict(list)
    for argument in args.curves:
        name, _, path = argument.partition("=")
        curves[name].append(points_of(Path(path)))
    draw(curves, args.out, title=args.title, figures="mean return of the last 100 episodes")
    for name, seeds in curves.items():
        last = [points[-1][1] for points in seeds]
        spread = statistics.stdev(last) if len(last) > 1 else math.nan
        values = ", ".join(f"{value:.1f}" for value in last)
        print(f"{name}: mean {statistics.mean(last):.1f}, standard deviation {spread:.1f} of {values}")


if __name__ == "__main__":
    main()
