"""`residency_frame`: how long each machine was in each state, and what it waited for."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fsm_trainer.analysis.entities import MACHINES
from fsm_trainer.analysis.source import NS, Floats, Run, Source
from fsm_trainer.analysis.timing import moves_of, spans_of

_KEYS = ["machine", "entity", "state", "cause"]


def residency_frame(run: Run | Source, window_s: float | None = None) -> pd.DataFrame:
    """The time of each machine (run, trainer, rollout workers, engines) by state and by cause of waiting.

    With `window_s` the log is cut into windows of that many seconds, and there is a row per window, machine, state and
    cause; else one window covers the log. In each window the rows of a machine add up to its length. Rows of no time
    are left out. All columns are in `fsm_trainer.analysis.COLUMNS`. ValueError if there is no log to read, or
    `window_s` is not above 0.
    """
    if window_s is not None and not window_s > 0:
        raise ValueError(f"window_s is {window_s}, expected seconds above 0")
    source = Source.of(run, (moves_of(*MACHINES),))
    length = (source.end_ns - source.start_ns) / NS
    width = length if window_s is None or window_s > length else window_s
    spans = _cut(spans_of(source), width or 1.0, length)
    time = spans.groupby(["window", *_KEYS], dropna=False, sort=False, observed=True)["time_s"].sum().reset_index()
    window = time.pop("window").to_numpy()
    time.insert(0, "window_start_s", window * width)
    time.insert(1, "window_end_s", np.minimum((window + 1) * width, length))
    time["share"] = time["time_s"] / (time["window_end_s"] - time["window_start_s"])
    order = ["window_start_s", "machine", "entity", "time_s"]
    frame: pd.DataFrame = time.sort_values(order, ascending=[True, True, True, False], ignore_index=True)
    return frame


def _cut(spans: pd.DataFrame, width: float, length: float) -> pd.DataFrame:
    """The spans, each cut at the windows' bounds; without those of no time."""
    spans = spans[spans["end_s"] > spans["start_s"]]
    last = max(int(np.ceil(length / width)) - 1, 0)
    start, end = spans["start_s"].to_numpy(), spans["end_s"].to_numpy()
    first, final = _window(start, width, last), _window(end, width, last)
    count = final - first + 1
    rows = np.repeat(np.arange(len(spans)), count)
    window = first[rows] + (np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count))
    time = np.minimum(end[rows], (window + 1) * width) - np.maximum(start[rows], window * width)
    time = np.where(window == last, end[rows] - np.maximum(start[rows], window * width), time)
    pieces: pd.DataFrame = spans.iloc[rows][_KEYS].assign(window=window, time_s=time)
    taken: pd.DataFrame = pieces[pieces["time_s"] > 0]
    return taken


def _window(moments: Floats, width: float, last: int) -> np.ndarray:
    return np.clip((moments // width).astype(np.int64), 0, last)
