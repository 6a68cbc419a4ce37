"""What a chart of the report is: plotly's traces and axes as plain data, and the table behind it.

Colours are those that can be told apart on white and on near-black, also by most who see few colours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fsm_trainer.report.buckets import Buckets

POINTS = 240
"""Points of a curve, at most."""
TABLE_ROWS = 20
"""Rows of the table behind a curve, at most."""

COLOURS = {
    "generating": "#3b82c4",
    "rewarding": "#9467bd",
    "training": "#2e9e62",
    "syncing": "#e08a1e",
    "loading": "#c9a227",
    "draining": "#b5651d",
    "saving": "#8c6d5a",
    "ready": "#5fb3b3",
    "queued": "#d1605e",
    "checking": "#70a870",
    "starting": "#7f8fa6",
    "running": "#2e9e62",
    "open": "#8fb8de",
    "waiting": "#a9adb5",
    "idle": "#a9adb5",
    "stopping": "#7f8fa6",
    "stopped": "#5d6673",
    "failed": "#c23b3b",
    "broken": "#c23b3b",
}
SERIES = ("#3b82c4", "#e08a1e", "#2e9e62", "#9467bd", "#d1605e", "#8c6d5a")
WAITS = {
    "generating": "#8fb8de",
    "no_batch": "#b8bcc4",
    "generation": "#9fb4c7",
    "reward": "#b8a9c9",
    "prompts": "#a3b899",
    "weight_sync": "#d9c08a",
    "policy_version": "#c8b560",
    "older_batch": "#c9a9a0",
    "admission": "#bfc5b0",
    "staleness_bound": "#d6a5a5",
    "queue_full": "#cf8f8d",
    "starting": "#c9cdd4",
}
"""Waits by cause, paler than work."""
OTHER = "#7f8fa6"


@dataclass(frozen=True)
class Table:
    """Numbers for those who cannot see the chart, or want them."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """One figure of the page."""

    name: str
    """Its id in the page."""
    title: str
    caption: str
    """What it shows, in a sentence."""
    traces: list[dict[str, Any]]
    table: Table
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 260

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """Name and colour of each trace, where there are several to tell apart."""
        shown = [t for t in self.traces if t.get("showlegend", True)]
        found = tuple((str(t["name"]), str((t.get("marker") or t["line"])["color"])) for t in shown)
        return found if len(found) > 1 else ()

    def spec(self) -> dict[str, Any]:
        """What the page's script draws."""
        return {"id": self.name, "data": self.traces, "layout": {**self.layout, "height": self.height}}


def curve(
    name: str, title: str, caption: str, buckets: Buckets, table: Buckets, *, x: str, y: str, colour: str = SERIES[0]
) -> Chart:
    """A line of means in a band from least to greatest. `table` is the same series in fewer buckets."""
    xs = numbers(buckets.x)
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": xs,
        "y": numbers(buckets.mean),
        "line": {"color": colour, "width": 2},
    }
    traces = [{**line, "name": "mean" if buckets.size != 1 else y, "showlegend": False}]
    if buckets.size != 1:
        edge = {"type": "scatter", "mode": "lines", "x": xs, "line": {"width": 0}, "showlegend": False}
        low = {**edge, "y": numbers(buckets.low), "name": "least"}
        high = {**edge, "y": numbers(buckets.high), "name": "greatest", "fill": "tonexty", "fillcolor": faint(colour)}
        traces = [low, high, *traces]
        what = f"of up to {buckets.size} values" if buckets.size else "over a stretch of time"
        caption += f" Each point is the mean {what}, the band the range."
    rows = zip(table.x, table.low, table.mean, table.high, strict=True)
    shown = tuple(tuple(map(number, row)) for row in rows)
    layout = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    return Chart(name, title, caption, traces, Table((x, "least", "mean", "greatest"), shown), layout)


def numbers(values: npt.NDArray[Any]) -> list[float | None]:
    """JSON-ready and short: five digits, None for what is no number."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in np.asarray(values, dtype=np.float64).tolist()]


def number(value: float) -> str:
    """A number for a table."""
    return "-" if not math.isfinite(value) else f"{value:.4g}"


def faint(colour: str) -> str:
    """The colour as a veil."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.22)"
