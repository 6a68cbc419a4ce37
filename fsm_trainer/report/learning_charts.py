"""Charts of what the run learnt and what it cost: reward, loss and other metrics, staleness, weight syncs, drops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fsm_trainer.report.buckets import by_count
from fsm_trainer.report.chart import POINTS, SERIES, TABLE_ROWS, Chart, Table, curve, number, numbers
from fsm_trainer.report.run_data import RunData

_METRICS = (
    ("reward_mean", "Reward", "Mean reward of each step's batch.", "reward"),
    ("loss", "Loss", "The loss of each step.", "loss"),
    ("entropy", "Entropy", "Entropy of the policy's next-token distribution.", "nats"),
    ("approx_kl", "KL to the policy that sampled", "How far the trained policy is from the one that sampled.", "nats"),
    ("ratio_mean", "Importance ratio", "Mean ratio of the trained policy to the one that sampled.", "ratio"),
    ("logprob_gap", "Rollout against trainer", "Gap of the logprobs of the rollout engine to the trainer's.", "nats"),
    ("grad_norm", "Gradient norm", "Norm of the gradient before clipping.", "norm"),
)
"""Metric, title, caption and unit, in the order shown; a run shows those it logged."""


def learning_charts(data: RunData) -> list[Chart]:
    """Reward, loss and the other metrics that the run logged."""
    charts = []
    for at, (name, title, caption, unit) in enumerate(_METRICS):
        if name not in data.steps.columns or not data.steps[name].notna().any():
            continue
        x = data.steps["step"].to_numpy(dtype=np.float64)
        y = data.steps[name].to_numpy(dtype=np.float64)
        few, many = by_count(x, y, TABLE_ROWS), by_count(x, y, POINTS)
        colour = SERIES[at % len(SERIES)]
        charts.append(curve(f"metric-{name}", title, caption, many, few, x="optimiser step", y=unit, colour=colour))
    return charts


def staleness_charts(data: RunData) -> list[Chart]:
    """How stale consumed batches were: how many at each staleness, and over the steps."""
    rows = data.summary.staleness
    if not rows:
        return []
    x = [row.staleness for row in rows]
    parts = (
        ("trained", [row.trained for row in rows], SERIES[2]),
        ("dropped", [row.dropped for row in rows], SERIES[4]),
    )
    traces = [
        {"type": "bar", "name": name, "x": x, "y": counts, "marker": {"color": colour}}
        for name, counts, colour in parts
        if any(counts)
    ]
    table = Table(
        ("staleness", "trained", "dropped"), tuple((str(r.staleness), str(r.trained), str(r.dropped)) for r in rows)
    )
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "optimiser steps behind at consumption"}, "dtick": 1},
        "yaxis": {"title": {"text": "batches"}},
    }
    caption = "Consumed batches by how many optimiser steps their policy was behind."
    counts = Chart("staleness", "Batches by staleness", caption, traces, table, layout)
    return [counts, *_staleness_over_steps(data)]


def _staleness_over_steps(data: RunData) -> list[Chart]:
    """The mean of its two parts over the batches: before the queue and in it."""
    frame = data.staleness
    known = frame[frame["staleness_in_flight"].notna()]
    if known.empty:
        return []
    x = known["batch_id"].to_numpy(dtype=np.float64)
    parts = (
        ("in flight", "staleness_in_flight", SERIES[0]),
        ("in the queue", "staleness_in_queue", SERIES[1]),
    )
    traces, columns = [], []
    for name, column, colour in parts:
        y = known[column].to_numpy(dtype=np.float64)
        many = by_count(x, y, POINTS // 2)
        columns.append(by_count(x, y, TABLE_ROWS))
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "parts",
                "name": name,
                "x": numbers(many.x),
                "y": numbers(many.mean),
                "line": {"color": colour, "width": 1},
                "fillcolor": colour,
            }
        )
    rows = tuple(
        (number(at), number(a), number(b))
        for at, a, b in zip(columns[0].x, columns[0].mean, columns[1].mean, strict=True)
    )
    layout = {
        "xaxis": {"title": {"text": "batch"}},
        "yaxis": {"title": {"text": "optimiser steps"}, "rangemode": "tozero"},
    }
    caption = "Where staleness arose: until a batch was offered to the queue, and from then on."
    table = Table(("batch", "in flight", "in the queue"), rows)
    return [Chart("staleness-parts", "Where staleness arose", caption, traces, table, layout)]


_SYNC_PARTS = (
    *(("export", "export_s"), ("load", "load_s"), ("gate closed", "closed_s")),
    *(("pause", "pause_s"), ("transfer", "transfer_s"), ("resume", "resume_s")),
)
_SYNC_ALWAYS = 3
"""So many of them every log has; the rest engines say, or not."""


def sync_chart(data: RunData) -> Chart | None:
    """What each weight sync cost: the export holds the trainer, the closed gate holds the engine."""
    frame = data.syncs
    if frame.empty:
        return None
    x = frame["version"].to_numpy(dtype=np.float64)
    parts = [
        (name, frame[column].to_numpy(dtype=np.float64), SERIES[at])
        for at, (name, column) in enumerate(_SYNC_PARTS)
        if at < _SYNC_ALWAYS or frame[column].notna().any()
    ]
    traces: list[dict[str, Any]] = []
    for name, y, colour in parts:
        many = by_count(x, y, POINTS)
        line = {"color": colour, "width": 2}
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": numbers(many.x),
                "y": numbers(many.mean * 1e3),
                "line": line,
            }
        )
    layout = {
        "xaxis": {"title": {"text": "version published"}},
        "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
    }
    caption = (
        "Export holds the trainer, load the engine; the gate is closed from the moment a sync is due until the load "
        "is done, and no generation begins meanwhile."
    )
    if len(parts) > _SYNC_ALWAYS:
        caption += " The other lines are parts of the load, as the engine told them."
    rows = tuple((name, *_distribution(y)) for name, y, _ in parts)
    table = Table(("", "count", "mean (ms)", "median (ms)", "95 % below (ms)", "longest (ms)", "total (s)"), rows)
    return Chart("syncs", "Cost of each weight sync", caption, traces, table, layout)


def _distribution(seconds: np.ndarray) -> tuple[str, ...]:
    known = seconds[np.isfinite(seconds)]
    if not len(known):
        return ("0", *("-" * 5))
    values = (known.mean(), np.median(known), np.quantile(known, 0.95), known.max())
    return (str(len(known)), *(number(1e3 * v) for v in values), number(known.sum()))


def drop_chart(data: RunData) -> Chart | None:
    """Batches that gave no step, by reason, over the run; None if there are none."""
    dropped = data.staleness[data.staleness["state"] == "dropped"]
    if dropped.empty:
        return None
    consumed = data.staleness["batch_id"]
    edges = np.linspace(consumed.min(), consumed.max() + 1, min(POINTS // 4, len(consumed)) + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    traces = []
    for at, (reason, part) in enumerate(dropped.groupby(dropped["reason"].astype(str), sort=True)):
        counts, _ = np.histogram(part["batch_id"], edges)
        traces.append(
            {
                "type": "bar",
                "name": str(reason),
                "x": numbers(middle),
                "y": numbers(counts),
                "marker": {"color": SERIES[4 - at]},
            }
        )
    rows = _drop_rows(dropped, len(data.staleness))
    layout = {
        "barmode": "stack",
        "bargap": 0.1,
        "xaxis": {"title": {"text": "batch"}},
        "yaxis": {"title": {"text": "dropped"}},
    }
    table = Table(("reason", "batches", "share of consumed", "tokens"), rows)
    return Chart(
        "drops", "Batches without a step", "Batches that were consumed without giving a step.", traces, table, layout
    )


def _drop_rows(dropped: pd.DataFrame, consumed: int) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (str(reason), str(len(part)), f"{100 * len(part) / consumed:.1f} %", f"{int(part['tokens'].fillna(0).sum())}")
        for reason, part in dropped.groupby(dropped["reason"].astype(str), sort=True)
    )
