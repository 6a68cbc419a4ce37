"""The sections of the report in their order: words, figures, charts, samples and tables, all as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fsm_trainer.analysis.compare import final_reward, settings
from fsm_trainer.report.advice import Advice
from fsm_trainer.report.chart import Chart, Table, number
from fsm_trainer.report.learning_charts import drop_chart, learning_charts, staleness_charts, sync_chart
from fsm_trainer.report.run_data import RunData
from fsm_trainer.report.samples import Sample, some_samples
from fsm_trainer.report.time_charts import time_charts


@dataclass(frozen=True)
class Section:
    """One section of the page."""

    name: str
    title: str
    sentences: tuple[str, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()
    charts: tuple[Chart, ...] = ()
    samples: tuple[Sample, ...] = ()
    tables: tuple[tuple[str, Table], ...] = field(default=())
    """Titles and tables that stand alone."""


def head(data: RunData) -> dict[str, Any]:
    """What stands above the sections."""
    summary, log = data.summary, data.log
    notes = []
    if summary.problem is not None:
        notes.append(f"The log's file: {summary.problem}; {log.dropped_bytes} bytes could not be used.")
    if summary.state == "running":
        notes.append("The run is still going; these are its figures so far.")
    if summary.state == "crashed":
        notes.append("The log has no end: the run crashed. These are the figures up to its last whole record batch.")
    classes = {"completed": "good", "failed": "bad", "crashed": "bad"}
    outcome = summary.outcome or summary.state
    return {
        "name": log.path.absolute().parent.name,
        "outcome": outcome,
        "outcome_class": classes.get(outcome, "open"),
        "message": summary.message,
        "notes": notes,
    }


def sections_of(data: RunData, advice: Advice) -> list[Section]:
    """All sections that the run has something for."""
    drops, syncs = drop_chart(data), sync_chart(data)
    found = [
        Section("advice", "What bounds it, what would help", advice.sentences),
        Section("figures", "Key figures", figures=key_figures(data)),
        Section("time", "Where the time went", charts=tuple(time_charts(data))),
        Section("learning", "Reward and loss", charts=tuple(learning_charts(data))),
        Section("stale", "Staleness", charts=tuple(staleness_charts(data))),
        Section("sync", "Weight syncs", charts=() if syncs is None else (syncs,)),
        Section(
            "dropped",
            "Drops",
            sentences=("Every batch that was consumed gave a step.",) if drops is None else (),
            charts=() if drops is None else (drops,),
        ),
        _samples(data),
        Section("settings", "Configuration", tables=(("All settings", settings_table(data)),)),
        Section("log", "Event log", figures=log_figures(data)),
    ]
    return [s for s in found if any((s.sentences, s.figures, s.charts, s.samples, s.tables))]


def key_figures(data: RunData) -> tuple[tuple[str, str], ...]:
    """The figures to see first."""
    s = data.summary
    steps = data.steps
    reward = final_reward(data.log)
    figures = [
        ("Wall time", _duration(data.wall_s)),
        ("Optimiser steps", f"{s.steps}"),
        ("Seconds a step", number(float(steps["interval_s"].mean())) if len(steps) else "-"),
        ("Generated tokens a second", _generated_per_s(data)),
        ("Reward, last tenth of the steps", "-" if reward is None else number(reward)),
        ("Mean staleness of trained batches", "-" if s.mean_staleness is None else number(s.mean_staleness)),
        ("Batches trained", f"{s.batches['trained']} of {s.batches['admitted']}"),
        ("Batches dropped", str(s.batches["dropped"])),
    ]
    if s.sides is not None:
        figures += [
            ("Bound by", s.sides.bound),
            ("Trainer idle", f"{100 * s.sides.trainer_idle:.1f} %"),
            ("Rollout idle", f"{100 * s.sides.rollout_idle:.1f} %"),
        ]
    if s.overlap is not None:
        reached = "none, synchronous; async" if s.synchronous else f"{s.overlap.speedup:.2f}x of"
        figures.append(("Overlap", f"{reached} at most {s.overlap.limit:.2f}x"))
    return tuple(figures)


def log_figures(data: RunData) -> tuple[tuple[str, str], ...]:
    """What there is of the log and whether it is whole."""
    log = data.log
    whole = {"ended": "whole", "running": "being written", "crashed": "without its end"}[log.state]
    return (
        ("Events", str(log.table.num_rows)),
        ("State", "damaged" if log.damaged else whole),
        ("Schema", log.schema_version),
        ("Decision code", "this version's" if log.same_policy else "another version's"),
    )


def settings_table(data: RunData) -> Table:
    """Every setting that the log carries."""
    rows = settings(data.log).items()
    return Table(("setting", "value"), tuple((name, _value(value)) for name, value in rows))


def _generated_per_s(data: RunData) -> str:
    """Completion tokens a second, since the run was running: the rate of `fsm-train`'s progress at the end."""
    run = data.spans[(data.spans["machine"] == "run") & (data.spans["state"] == "running")]
    rows = data.source.rows(["machine", "trigger", "tokens"], ["transition"])
    tokens = float(np.nansum(rows.where(rows.equal(machine="batch", trigger="generated")).floats("tokens")))
    seconds = 0.0 if run.empty else data.wall_s - float(run["start_s"].min())
    return f"{tokens / seconds:,.0f}" if seconds > 0 and tokens else "-"


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _samples(data: RunData) -> Section:
    samples, note = some_samples(data.log.path.parent)
    return Section("samples", "Samples", sentences=(note,), samples=tuple(samples))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"
