"""Charts of where the time went: a close look at a few steps, shares over the run, residency by cause, the queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fsm_trainer.analysis.entities import place_of
from fsm_trainer.analysis.residency import residency_frame
from fsm_trainer.report.buckets import of_steps
from fsm_trainer.report.chart import (
    COLOURS,
    OTHER,
    POINTS,
    SERIES,
    TABLE_ROWS,
    WAITS,
    Chart,
    Table,
    curve,
    number,
    numbers,
)
from fsm_trainer.report.run_data import RunData

WINDOWS = 100
"""Stretches of time that the shares over the run are shown for."""
CLOSE_STEPS = 8
_CLOSE_BARS = 600
_MACHINES = ("trainer", "rollout", "engine")
_WAITING = ("waiting", "idle", "ready", "queued", "open")
_SHARE_AXIS = {"title": {"text": "share of the time"}, "tickformat": ".0%", "range": [0, 1]}


def time_charts(data: RunData) -> list[Chart]:
    """All of them; those that a run has nothing for are left out."""
    charts = [close_look(data), residency(data)]
    if data.wall_s > 0:
        over_time = residency_frame(data.source, data.wall_s / WINDOWS)
        charts += [shares(data, over_time, "trainer", "What the trainer did over the run")]
        charts += [shares(data, over_time, "rollout", "What the rollout workers did over the run")]
    return [chart for chart in [*charts, queue(data)] if chart is not None]


def close_look(data: RunData) -> Chart | None:
    """Every visit of every machine during a few steps in the middle of the run."""
    steps = data.steps["stepped_at_s"].to_numpy()
    if len(steps) >= 2:
        first = max(0, (len(steps) - CLOSE_STEPS) // 2)
        last = min(first + CLOSE_STEPS, len(steps) - 1)
        begin, end = float(steps[first]), float(steps[last])
        versions = data.steps["step"].to_numpy()
        what = f"Steps {versions[first] + 1} to {versions[last]}: each bar is one visit of a state."
    else:
        begin, end, what = 0.0, data.wall_s, "The whole run: each bar is one visit of a state."
    spans = data.spans[data.spans["machine"].isin(_MACHINES)]
    spans = spans[(spans["end_s"] > begin) & (spans["start_s"] < end) & (spans["end_s"] > spans["start_s"])]
    spans = _in_order(spans.head(_CLOSE_BARS))
    if spans.empty:
        return None
    spans = spans.assign(start_s=spans["start_s"].clip(lower=begin), end_s=spans["end_s"].clip(upper=end))
    entities = list(dict.fromkeys(spans["entity"].astype(str)))
    rows = [
        (str(e), _label(s, c), number(a), number(b - a))
        for e, s, c, a, b in zip(
            spans["entity"], spans["state"], spans["cause"], spans["start_s"], spans["end_s"], strict=True
        )
    ]
    return Chart(
        "closeup",
        "A close look",
        what,
        [_bars(state, part) for state, part in spans.groupby(spans["state"].astype(str), sort=False)],
        Table(("machine", "state", "from (s)", "for (s)"), tuple(rows[: 4 * TABLE_ROWS])),
        {
            "barmode": "overlay",
            "bargap": 0.25,
            "xaxis": {"title": {"text": "seconds since the run began"}, "range": [begin, end]},
            "yaxis": {"categoryorder": "array", "categoryarray": entities[::-1], "type": "category"},
        },
        height=60 + 38 * len(entities),
    )


def _bars(state: str, spans: pd.DataFrame) -> dict[str, Any]:
    cause = spans["cause"].astype(object).fillna("")
    return {
        "type": "bar",
        "orientation": "h",
        "name": state,
        "y": spans["entity"].astype(str).tolist(),
        "base": numbers(spans["start_s"].to_numpy()),
        "x": numbers((spans["end_s"] - spans["start_s"]).to_numpy()),
        "text": cause.tolist(),
        "textposition": "none",
        "hovertemplate": "%{y} " + state + " %{text}<br>%{x:.4~s}s<extra></extra>",
        "marker": {"color": COLOURS.get(state, OTHER)},
    }


def residency(data: RunData) -> Chart | None:
    """Where the time of each machine went, as a bar that adds up to the run."""
    found = [row for row in data.summary.residency if row.machine in _MACHINES and row.share > 0]
    if not found:
        return None
    found.sort(key=lambda row: (place_of(row.machine, row.entity), -row.share))
    entities = list(dict.fromkeys(row.entity for row in found))
    labels = list(dict.fromkeys(_label(row.state, row.cause) for row in sorted(found, key=lambda row: -row.share)))
    colours = _colours({_label(row.state, row.cause): (row.state, row.cause) for row in found})
    traces = []
    for label in labels:
        part = [row for row in found if _label(row.state, row.cause) == label]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label,
                "y": [row.entity for row in part],
                "x": [float(f"{row.share:.5g}") for row in part],
                "marker": {"color": colours[label]},
                "hovertemplate": "%{y} " + label + " %{x:.1%}<extra></extra>",
            }
        )
    rows = tuple((r.entity, r.state, r.cause or "", number(r.ns / 1e9), f"{100 * r.share:.1f} %") for r in found)
    return Chart(
        "residency",
        "Residency by cause",
        "Each bar is one machine's whole time, by state and, in waits, by cause.",
        traces,
        Table(("machine", "state", "cause", "seconds", "share"), rows),
        {
            "barmode": "stack",
            "bargap": 0.25,
            "xaxis": {"tickformat": ".0%", "range": [0, 1]},
            "yaxis": {"categoryorder": "array", "categoryarray": entities[::-1], "type": "category"},
        },
        height=50 + 38 * len(entities),
    )


def shares(data: RunData, over_time: pd.DataFrame, machine: str, title: str) -> Chart | None:
    """Shares of the time by state and cause, over the run, as the mean of the machines of a kind."""
    part = over_time[over_time["machine"] == machine]
    if part.empty:
        return None
    wide, colours = _by_label(part)
    middle = wide.index.to_numpy() + data.wall_s / WINDOWS / 2
    traces = [
        {
            "type": "bar",
            "name": str(label),
            "x": numbers(middle),
            "y": numbers(wide[label].to_numpy()),
            "width": data.wall_s / WINDOWS,
            "marker": {"color": colours[str(label)], "line": {"width": 0}},
            "hovertemplate": str(label) + " %{y:.1%}<extra></extra>",
        }
        for label in wide.columns
    ]
    few = wide.groupby(np.arange(len(wide)) * TABLE_ROWS // max(len(wide), 1)).mean()
    at = np.arange(len(few)) * data.wall_s / max(len(few), 1)
    rows = tuple(
        (number(t), *(f"{100 * v:.1f} %" for v in values)) for t, values in zip(at, few.to_numpy(), strict=True)
    )
    return Chart(
        f"shares-{machine}",
        title,
        f"Each column is {number(data.wall_s / WINDOWS)} s of the run.",
        traces,
        Table(("from (s)", *map(str, wide.columns)), rows),
        {
            "barmode": "stack",
            "bargap": 0,
            "xaxis": {"title": {"text": "seconds since the run began"}, "range": [0, data.wall_s]},
            "yaxis": _SHARE_AXIS,
        },
        height=250,
    )


def _by_label(part: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, str]]:
    """Shares in each window, a column a label, the largest first; and the labels' colours."""
    names = list(zip(part["state"], part["cause"], strict=True))
    labels = [_label(state, cause) for state, cause in names]
    wide = part.assign(label=labels).pivot_table(
        index="window_start_s", columns="label", values="share", aggfunc="sum", fill_value=0.0
    )
    ordered: pd.DataFrame = wide[wide.sum().sort_values(ascending=False).index] / part["entity"].nunique()
    return ordered, _colours(dict(zip(labels, names, strict=True)))


def queue(data: RunData) -> Chart | None:
    """Batches in the train queue over the run."""
    if data.queue.empty or data.wall_s <= 0:
        return None
    times, lengths = data.queue["time_s"].to_numpy(), data.queue["queue_len"].to_numpy(dtype=np.float64)
    return curve(
        "queue",
        "Train queue",
        "Batches in the train queue, weighed by how long they were there.",
        of_steps(times, lengths, data.wall_s, POINTS // 2),
        of_steps(times, lengths, data.wall_s, TABLE_ROWS),
        x="seconds since the run began",
        y="batches",
        colour=SERIES[3],
    )


def _label(state: object, cause: object) -> str:
    # Not a text where there is no cause: None or nan.
    return f"{state} ({cause.replace('_', ' ')})" if isinstance(cause, str) and cause else str(state)


def _colours(names: dict[str, tuple[Any, Any]]) -> dict[str, str]:
    """A colour for each label: of the cause for a machine that waits for work, else of the state."""
    return {
        label: WAITS.get(str(cause), COLOURS["waiting"])
        if isinstance(cause, str) and cause and state in _WAITING
        else COLOURS.get(str(state), OTHER)
        for label, (state, cause) in names.items()
    }


def _in_order(spans: pd.DataFrame) -> pd.DataFrame:
    names = zip(spans["machine"].astype(str), spans["entity"].astype(str), strict=True)
    places = pd.DataFrame([place_of(*each) for each in names], columns=["kind", "number"], index=spans.index)
    ordered: pd.DataFrame = spans.join(places).sort_values(["kind", "number", "start_s"], kind="stable")
    return ordered
