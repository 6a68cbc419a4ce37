"""Long series in few points, so that a page holds no more of a long run than of a short one. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Buckets:
    """A series in buckets of as many points each, nan left out; arrays of one length."""

    x: Floats
    """Mean x of each bucket."""
    low: Floats
    mean: Floats
    high: Floats
    size: int
    """Most points in a bucket, 1 if nothing was put together; 0 if a bucket is a stretch of time."""


def by_count(x: Floats, y: Floats, most: int) -> Buckets:
    """At most `most` buckets of neighbouring points, with least, mean and greatest y of each."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    count = min(most, len(x))
    if count == 0:
        empty = np.empty(0)
        return Buckets(empty, empty, empty, empty, 0)
    edges = np.linspace(0, len(x), count + 1).astype(np.int64)
    starts, sizes = edges[:-1], np.diff(edges)
    return Buckets(
        x=np.add.reduceat(x, starts) / sizes,
        low=np.minimum.reduceat(y, starts),
        mean=np.add.reduceat(y, starts) / sizes,
        high=np.maximum.reduceat(y, starts),
        size=int(sizes.max()),
    )


def of_steps(times: Floats, values: Floats, end: float, most: int) -> Buckets:
    """A value that holds until the next one, in `most` equal stretches of time from 0 to `end`; 0 before the first.

    `mean` weighs each value by how long it held; `low` and `high` are the least and greatest that held at all.
    """
    if not len(times) or end <= 0:
        return by_count(np.empty(0), np.empty(0), most)
    times, values = np.concatenate([[0.0], times]), np.concatenate([[0.0], values])
    edges = np.linspace(0.0, end, most + 1)
    held = np.concatenate([[0.0], np.cumsum(values[:-1] * np.diff(times))])
    integral = np.interp(edges, times, held) + values[-1] * np.clip(edges - times[-1], 0.0, None)
    # What holds at a bucket's begin holds in it; then whatever begins in it.
    carried = values[np.searchsorted(times, edges[:-1], side="right") - 1]
    at = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, most - 1)
    low, high = carried.copy(), carried.copy()
    np.minimum.at(low, at, values)
    np.maximum.at(high, at, values)
    return Buckets((edges[:-1] + edges[1:]) / 2, low, np.diff(integral) / np.diff(edges), high, 0)
