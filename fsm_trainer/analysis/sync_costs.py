"""What the loads of weights cost on average, as the engines said it: bytes, speed, and the parts of a load."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fsm_trainer.analysis.frames import rows_of
from fsm_trainer.analysis.syncs import COSTS


@dataclass(frozen=True)
class SyncCosts:
    """Means over those loads of a run that have the number; None where none has it."""

    loads: int
    """Loads of which anything is known."""
    nbytes: float | None
    """Bytes that came over in a load."""
    bytes_per_s: float | None
    """Bytes of all loads over the seconds of their transfers, of those that have both."""
    pause_s: float | None
    transfer_s: float | None
    resume_s: float | None


def sync_costs(events: pd.DataFrame) -> SyncCosts | None:
    """The costs in a log's events; None where no engine said any, as in logs of older versions."""
    # The few that are wanted first: a copy of all metric rows would be large.
    wanted = events["reason"].isin(list(COSTS))
    rows = rows_of(events.loc[wanted, ["kind", "cause_seq", "reason", "value"]], "metric")
    if rows.empty:
        return None
    loads = rows.pivot_table("value", "cause_seq", "reason").reindex(columns=list(COSTS)).astype("float64")
    loads = loads.rename(columns=COSTS)
    both = loads[["nbytes", "transfer_s"]].dropna().sum()
    speed = float(both["nbytes"] / both["transfer_s"]) if both["transfer_s"] > 0 else None
    means = {name: None if np.isnan(mean) else float(mean) for name, mean in loads.mean().items()}
    return SyncCosts(len(loads), means["nbytes"], speed, means["pause_s"], means["transfer_s"], means["resume_s"])
