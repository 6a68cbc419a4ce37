"""What staleness cost, in two tables: by its value, and along the run. `fsm-replay staleness` prints them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fsm_trainer.analysis.columns import EFFECTS
from fsm_trainer.analysis.source import Pick, Source

PARTS = ("staleness_at_start", "staleness_in_flight", "staleness_in_queue")
RATES = Pick(("reason", "train_version", "numerator", "denominator"), ("metric",), (("reason", tuple(EFFECTS)),))
_LARGEST = "ratio_max"
"""The one effect of which groups of batches have the largest, not the mean."""


def by_value(source: Source, frame: pd.DataFrame) -> pd.DataFrame:
    """One row per staleness of `staleness_frame`: batches `trained` and `dropped`, the mean of each part, the effects.

    A rate that was logged with numerator and denominator is averaged by adding up both, other effects by batch.
    """
    known = frame[frame["staleness"].notna()]
    return _grouped(source, known, known["staleness"].astype(np.int64))


def by_step(source: Source, frame: pd.DataFrame, rows: int) -> pd.DataFrame:
    """The same along the run, in at most so many rows of equally many steps: `first_step`, `last_step`, and besides
    the columns of `by_value` the mean and the largest `staleness`. A dropped batch counts to the step that came next,
    after the last step to that.
    """
    known = frame[frame["staleness"].notna()]
    step = known["train_version_consumed"].astype(np.int64) + 1
    if known["step"].notna().any():
        step = step.clip(upper=int(known["step"].max()))
    begin, end = (int(step.min()), int(step.max())) if len(step) else (1, 1)
    width = max(-(-(end - begin + 1) // rows), 1)
    first = (step - begin) // width * width + begin
    table: pd.DataFrame = _grouped(source, known, first.rename("first_step")).reset_index()
    staleness = known["staleness"].astype(np.float64).groupby(first.to_numpy())
    table.insert(1, "last_step", np.minimum(table["first_step"] + width - 1, end))
    table.insert(2, "staleness", staleness.mean().to_numpy())
    table.insert(3, "staleness_max", staleness.max().to_numpy())
    return table


def _grouped(source: Source, known: pd.DataFrame, key: pd.Series) -> pd.DataFrame:
    """Counts, means of the parts and effects of the groups that `key` names."""
    groups = known.groupby(key)
    table: pd.DataFrame = pd.DataFrame(
        {state: (known["state"] == state).groupby(key).sum() for state in ("trained", "dropped")}
    ).astype(np.int64)
    for part in PARTS:
        table[part] = groups[part].mean().astype(np.float64)
    rates = _rates(source, known, key)
    for name in EFFECTS:
        plain = groups[name].max() if name == _LARGEST else groups[name].mean()
        table[name] = rates[name].reindex(table.index).fillna(plain) if name in rates else plain
    return table


def _rates(source: Source, known: pd.DataFrame, key: pd.Series) -> pd.DataFrame:
    """Each effect that is a rate: the sum of its numerators over the sum of its denominators, by group."""
    rows = source.take(RATES)
    group = pd.Series(key.to_numpy(), index=known["step"].fillna(-1).astype(np.int64))
    logged = pd.DataFrame(
        {
            "name": rows.texts("reason").astype(object),
            "numerator": rows.floats("numerator"),
            "denominator": rows.floats("denominator"),
            "group": group[~group.index.duplicated()].reindex(rows.ints("train_version", null=-2)).to_numpy(),
        }
    )
    whole = logged.dropna(subset=["group", "denominator"])
    sums = whole.groupby(["group", "name"])[["numerator", "denominator"]].sum(min_count=1)
    rates: pd.DataFrame = (sums["numerator"] / sums["denominator"].where(sums["denominator"] != 0)).unstack("name")
    return rates
