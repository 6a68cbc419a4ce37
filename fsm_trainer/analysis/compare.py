"""Two runs side by side: the figures in which they differ, and their settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fsm_trainer.analysis.source import NS, Source
from fsm_trainer.analysis.summary import summarize_log
from fsm_trainer.eventlog.reader import EventLog

_LAST_SHARE = 0.1
"""The share of the steps at the end over which a run's final reward is taken."""

Pair = tuple[Any, Any]


def compare_figures(one: EventLog, other: EventLog) -> dict[str, Pair]:
    """Figure -> its value in each run, whether they differ or not; None where a run has none."""
    left, right = figures(one), figures(other)
    return {name: (left.get(name), right.get(name)) for name in [*left, *(n for n in right if n not in left)]}


def figures(log: EventLog) -> dict[str, float | int | str | None]:
    """One run's figures, in the order to show them: times in seconds, shares from 0 to 1."""
    summary = summarize_log(log)
    found: dict[str, float | int | str | None] = {
        "outcome": summary.outcome or summary.state,
        "wall time (s)": summary.wall_ns / NS,
        "optimiser steps": summary.steps,
        **{f"batches {state}": count for state, count in summary.batches.items()},
        **{f"dropped as {reason}": count for reason, count in summary.drops.items()},
        "mean staleness of trained batches": summary.mean_staleness,
        "reward, last tenth of the steps": final_reward(log),
    }
    if summary.sides is not None:
        found["rollout workers idle (share)"] = summary.sides.rollout_idle
        found["trainer idle (share)"] = summary.sides.trainer_idle
        found["bound by"] = summary.sides.bound
    if summary.overlap is not None:
        o = summary.overlap
        found.update({"step (s)": o.step_s, "rollout (s a step)": o.rollout_s, "reward (s a step)": o.reward_s})
        found.update({"train (s a step)": o.train_s, "sync (s a step)": o.sync_s})
    return found


def final_reward(log: EventLog) -> float | None:
    """Mean of `reward_mean` over the last tenth of the steps, at least one; None if the run logged no reward."""
    metrics = Source.of(log).rows(["reason", "value"], ["metric"])
    values = metrics.where(metrics.equal(reason="reward_mean")).floats("value")
    values = values[~np.isnan(values)]
    return float(values[-max(1, round(len(values) * _LAST_SHARE)) :].mean()) if len(values) else None


def compare_settings(one: EventLog, other: EventLog) -> dict[str, Pair]:
    """Settings whose values differ, by dotted name; None where a run has no such setting."""
    left, right = settings(one), settings(other)
    names = sorted({*left, *right})
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def settings(log: EventLog) -> dict[str, Any]:
    """All settings of a run, flat: the scheduler's below `scheduler.`, the rest below `run.`."""
    return {**_flat("scheduler", log.scheduler_config), **_flat("run", log.run_config)}


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found.update(_flat(f"{prefix}.{name}", value))
        else:
            found[f"{prefix}.{name}"] = value
    return found
