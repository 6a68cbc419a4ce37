"""All that `fsm-replay staleness` says of a run, computed once; text, JSON and plot are made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from fsm_trainer.analysis.batches import PICKS
from fsm_trainer.analysis.bias import MEASURES, batch_measures, bias_table, sample_lengths
from fsm_trainer.analysis.source import Source
from fsm_trainer.analysis.staleness import staleness_frame
from fsm_trainer.analysis.staleness_tables import RATES, by_step, by_value
from fsm_trainer.analysis.steps import METRICS
from fsm_trainer.eventlog.reader import EventLog

COLUMNS = sorted(set[str]().union({"t_ns"}, *(pick.names for pick in (*PICKS, METRICS, RATES))))
"""The columns that the report needs: a log read with these alone takes less memory."""
SURE = 3.0
"""Standard errors beyond which a difference is no chance."""
LEAST = 5
"""Batches that a group needs before anything is said of it."""
_WORDS = {
    "tokens": ("longer", "shorter"),
    "reward": ("better rewarded", "worse rewarded"),
    "generate_s": ("slower to generate", "quicker to generate"),
}


@dataclass(frozen=True)
class StalenessReport:
    """The tables of one run."""

    batches: pd.DataFrame
    """`staleness_frame`."""
    by_value: pd.DataFrame
    by_step: pd.DataFrame
    bias: pd.DataFrame
    measures: pd.DataFrame
    """What `bias` is made of, one row a batch."""
    samples_kept: bool
    """The lengths are those of the kept samples; else the tokens of whole batches."""

    @property
    def findings(self) -> list[str]:
        """What the bias table means, a sentence each; none without a group to compare with."""
        if "trained" not in set(self.bias["group"]):
            return []
        others = self.bias[self.bias["group"] != "trained"].to_dict("records")
        return [sentence for row in others for sentence in _findings(row)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        tables = {"by_staleness": self.by_value, "by_step": self.by_step, "by_batch": self.batches, "bias": self.bias}
        rows = {name: [_plain(row) for row in table.to_dict("records")] for name, table in tables.items()}
        return {**rows, "samples_kept": self.samples_kept, "findings": self.findings}


def staleness_report(log: EventLog, rows: int = 20) -> StalenessReport:
    """Compute it, with at most so many rows along the run."""
    source = Source.of(log)
    frame = staleness_frame(source)
    samples = sample_lengths(log.path.parent)
    measures = batch_measures(source, samples)
    return StalenessReport(
        batches=frame,
        by_value=by_value(source, frame).rename_axis("staleness").reset_index(),
        by_step=by_step(source, frame, rows),
        bias=bias_table(measures),
        measures=measures,
        samples_kept=samples is not None,
    )


def _findings(row: Mapping[Any, Any]) -> list[str]:
    who, count = row["group"], int(row["batches"])
    if count < LEAST:
        return [f"{who}: too few ({count}) to compare"]
    found = []
    for name in MEASURES:
        z, difference = row[f"{name}_z"], row[f"{name}_difference"]
        if math.isfinite(z) and abs(z) >= SURE:
            base = row[name] - difference
            share = f"{abs(100 * difference / base):.0f} % " if base else ""
            found.append(f"{who}: {share}{_WORDS[name][difference < 0]} than trained ones (z {z:+.1f})")
    return found or [f"{who}: no difference to the trained ones beyond {SURE:g} standard errors"]


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: _value(value) for name, value in row.items()}


def _value(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is pd.NA or (isinstance(value, float) and not math.isfinite(value)):
        return None  # JSON has neither
    return value
