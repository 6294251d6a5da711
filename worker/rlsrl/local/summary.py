"""The result of a run: ``summary.json`` and the lines printed at the end. Pure.

Everything comes from the disk, so the summary of a run is always the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rlsrl.api.spec import Stop
from rlsrl.api.status import return_text
from rlsrl.data.episodes import info_texts
from rlsrl.local.metrics_log import MetricsRow
from rlsrl.local.run_record import RunRecord
from rlsrl.parameters.evaluations import best_of, evaluation_of
from rlsrl.parameters.protocols import VersionInfo
from rlsrl.parameters.terminal import failure_of


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The stored facts of a run without running processes."""

    name: str
    seed: int
    record: RunRecord
    terminal: Mapping[str, Any] | None
    """The terminal record; None while the run is unfinished."""
    versions: Sequence[VersionInfo]
    """The stored versions of the policy, oldest first."""
    rows: Sequence[MetricsRow]
    """The learning curve, without rolled-back rows."""
    fixed_evaluations: Sequence[Mapping[str, Any]] = ()
    """The results of fixed versions: see ``metrics_log.fixed_evaluations``."""
    stop: Stop
    """When the run ends, as last edited."""
    ledger: Mapping[str, Any]
    """``produced``, ``trained``, ``in_buffer``, ``dropped``, ``lost`` and ``balanced``, in transitions."""


def summarize(facts: RunFacts) -> dict[str, Any]:
    """Return the JSON value of ``summary.json``."""
    newest = facts.versions[-1] if facts.versions else None
    result = (facts.terminal or {}).get("result") or (newest.metadata if newest else {})
    env_steps = int(result.get("env_steps", 0))
    seconds = facts.record.training_seconds
    lags = [row.scalars["policy_lag"] for row in facts.rows if "policy_lag" in row.scalars]
    return {
        "name": facts.name,
        "run_uid": facts.record.run_uid,
        "seed": facts.seed,
        "finished": facts.terminal is not None and failure_of(facts.terminal) is None,
        "reason": (facts.terminal or {}).get("reason"),
        "failure": failure_of(facts.terminal),
        "env_steps": env_steps,
        "train_steps": int(result.get("train_steps", 0)),
        "return_mean": result.get("return_mean"),
        "goal": facts.stop.return_mean,
        "episodes": facts.stop.episodes,
        "length_mean": result.get("length_mean"),
        "episode_info": dict(result.get("episode_info", {})),
        "non_finite_returns": int(result.get("non_finite_returns", 0)),
        "minibatches": int(result.get("minibatches", 0)),
        "minibatches_skipped": int(result.get("minibatches_skipped", 0)),
        "wall_seconds": round(facts.record.wall_seconds, 3),
        "training_seconds": round(seconds, 3),
        "env_steps_per_second": round(env_steps / seconds, 1) if seconds > 0 else None,
        "policy_lag": round(fmean(lags), 3) if lags else None,
        "max_policy_lag": max(lags, default=None),
        "versions": {
            "count": len(facts.versions),
            "last": str(newest.version) if newest else None,
            "tagged": {tag: str(info.version) for info in facts.versions for tag in info.tags},
        },
        "evaluation": _evaluation(newest),
        "best": _evaluation(best_of(facts.versions)),
        "fixed_evaluations": [dict(each) for each in facts.fixed_evaluations],
        "ledger": dict(facts.ledger),
        "untrained": facts.ledger.get("produced", 0) - facts.ledger.get("trained", 0),
        "attempts": facts.record.attempt,
        "lives": len(facts.record.lives),
        "restarts": dict(facts.record.restarts),
        "rollbacks": [{**asdict(rollback), "text": str(rollback)} for rollback in facts.record.rollbacks],
        "created_at": facts.record.created_at,
        "package_version": facts.record.package_version,
    }


def _evaluation(info: VersionInfo | None) -> dict[str, Any] | None:
    """Return the version's evaluation, or None."""
    evaluation = None if info is None else evaluation_of(info)
    return None if info is None or evaluation is None else {"version": str(info.version), **evaluation}


def result_lines(summary: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the result and the folder, for the user to read."""
    return_mean = summary["return_mean"]
    returns = _no_return(summary) if return_mean is None else f"mean return {return_text(return_mean)}"
    if _has_missed_goal(summary):
        returns += f", below the goal {summary['goal']:g} (docs/debugging.md),"
    unfinished = "has not finished" if summary["failure"] is None else "has failed"
    state = f"finished ({summary['reason']})" if summary["finished"] else unfinished
    rate = summary["env_steps_per_second"]
    speed = f" ({rate:,.0f} a second, start-up included)" if rate else ""
    effort = f"{summary['env_steps']:,} env steps in {summary['training_seconds']:.1f} s{speed}"
    return [
        f"{summary['name']} {state}: {returns} after {effort}",
        *_episode_lines(summary),
        *_evaluation_lines(summary),
        *_untrained_lines(summary),
        *_dropped_lines(summary["ledger"]),
        *(f"WARNING: {rollback['text']}" for rollback in summary["rollbacks"]),
        *_non_finite_lines(summary),
        *ledger_warning(summary["ledger"]),
        f"results: {folder}",
    ]


def next_commands(summary: Mapping[str, Any], folder: Path, *, program: str) -> list[str]:
    """Return commands to try next; nothing after a failure, or without a version.

    ``program`` is how the user calls rlsrl.
    """
    if summary["failure"] is not None or not summary["versions"]["count"]:
        return []
    missed = _has_missed_goal(summary)
    commands = ("plot", "eval", "eval --stochastic") if missed else ("eval", "params list", "plot")
    return ["try next:", *(f"  {program} {command} {shlex.quote(str(folder))}" for command in commands)]


def _has_missed_goal(summary: Mapping[str, Any]) -> bool:
    """Return whether a limit of ``stop`` ended the run before ``stop.returnMean`` was reached."""
    goal, return_mean = summary["goal"], summary["return_mean"]
    has_reached_limit = summary["finished"] and summary["reason"] not in ("returnMean", "now")
    return has_reached_limit and goal is not None and (return_mean is None or return_mean < goal)


def _episode_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a line about lengths and values of ``info``, and one about keys that no episode had."""
    if summary["length_mean"] is None:
        return []
    info = summary["episode_info"]
    texts = info_texts(info, num_last=summary["episodes"])
    lines = [", ".join([f"episodes: mean length {summary['length_mean']:.1f}", *texts])]
    if missing := [key for key, statistics in info.items() if not statistics["count"]]:
        lines += [
            f"WARNING: no episode had a finite number under {', '.join(missing)} in info (environment.episodeInfo).",
            "WARNING: the actors' logs name the keys of info; look for episode_info_missing.",
        ]
    return lines


def _evaluation_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a line each for the last and the best evaluated version, and for fixed versions."""
    last, best = summary["evaluation"], summary["best"]
    lines = []
    if last is not None:
        lines.append(f"evaluation of the last version, {last['version']}: {_evaluation_text(last)}")
    if best is not None and best != last:
        lines.append(f"evaluation of the best version, {best['version']}: {_evaluation_text(best)}")
    fixed = summary["fixed_evaluations"]
    return [*lines, *(f"evaluation of the fixed version {each['version']}: {_evaluation_text(each)}" for each in fixed)]


def _untrained_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a line with the transitions that were gathered, and those of them that are not in the weights; nothing if
    none was gathered.
    """
    produced = summary["ledger"].get("produced", 0)
    rolled_back = summary["ledger"].get("lost", {}).get("rolled_back", 0)
    lost = f"{rolled_back:,} of them trained and rolled back (those weights are lost), " if rolled_back else ""
    untrained = f"{summary['untrained'] - rolled_back:,} {'' if lost else 'of them '}not trained"
    return [f"gathered {produced:,} transitions, {lost}{untrained}"] if produced else []


def _dropped_lines(ledger: Mapping[str, Any]) -> list[str]:
    """Return a line about transitions that were not finite, or nothing."""
    if not (dropped := ledger.get("dropped", {}).get("non_finite", 0)):
        return []
    return [
        f"WARNING: {dropped:,} of {ledger['produced']:,} transitions were not finite (NaN or inf) and not trained.",
        "WARNING: the environments are named in the actors' logs; look for environment_fault.",
    ]


def _no_return(summary: Mapping[str, Any]) -> str:
    return "no return is finite" if summary["non_finite_returns"] else "no episode ended"


def _non_finite_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a line for each kind of number that was not finite; nothing for a healthy run."""
    lines = []
    if skipped := summary["minibatches_skipped"]:
        untrained = summary["ledger"].get("dropped", {}).get("update_skipped", 0)
        lines.append(
            f"skipped {skipped:,} of {summary['minibatches']:,} minibatches, whose loss or gradient was not finite; "
            f"{untrained:,} transitions were dropped untrained"
        )
    if returns := summary["non_finite_returns"]:
        lines.append(f"{returns:,} episodes had a return that is not finite: they are in no mean return")
    return lines


def _evaluation_text(evaluation: Mapping[str, Any]) -> str:
    unfinished = f"unfinished: {evaluation['unfinished']}" if "unfinished" in evaluation else ""
    if "return_mean" not in evaluation:
        return unfinished
    faults = f" ({cut:,} environment faults)" if (cut := evaluation.get("faults")) else ""
    result = f"mean return {return_text(evaluation['return_mean'])} over {evaluation['episodes']} episodes{faults}"
    return ", ".join([*([unfinished] if unfinished else []), result, *info_texts(evaluation.get("episode_info", {}))])


def ledger_warning(ledger: Mapping[str, Any]) -> list[str]:
    """Return warnings if the ledger does not add up, else nothing."""
    if ledger.get("balanced", False):
        return []
    counts = ", ".join(f"{name} {value}" for name, value in ledger.items() if name != "balanced")
    return [
        "WARNING: THE SAMPLE LEDGER DOES NOT ADD UP: some samples were lost or counted twice.",
        f"WARNING: {counts or 'there is no ledger'}",
        "WARNING: this is a bug in rlsrl; keep the run's folder for the report.",
    ]
