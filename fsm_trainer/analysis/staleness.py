"""`staleness_frame`: what each consumed batch's staleness was made of, beside what its step measured."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fsm_trainer.analysis.batches import PICKS, batches_frame
from fsm_trainer.analysis.columns import EFFECTS
from fsm_trainer.analysis.source import Run, Source
from fsm_trainer.analysis.steps import METRICS, metrics_wide
from fsm_trainer.analysis.timing import Steps

_OF_BATCH = [
    "batch_id",
    "engine",
    "state",
    "reason",
    "consumed_at_s",
    "rollout_version_first",
    "train_version_consumed",
    "staleness",
    "staleness_at_start",
    "staleness_in_flight",
    "staleness_in_queue",
    "tokens",
]


def staleness_frame(run: Run | Source) -> pd.DataFrame:
    """One row per consumed batch, in order of consumption: its staleness, where that came from, and its step's effects.

    Staleness is in optimiser steps. The effects (`EFFECTS`) are the metrics of the step that the batch gave; they are
    nan of a batch that gave none, and where the run did not log one. All columns are in `fsm_trainer.analysis.COLUMNS`.
    ValueError if there is no log to read.
    """
    source = Source.of(run, (*PICKS, METRICS))
    batches = batches_frame(source)
    consumed: pd.DataFrame = batches[batches["consumed_at_s"].notna()][_OF_BATCH].sort_values(
        ["consumed_at_s", "batch_id"], kind="stable", ignore_index=True
    )
    steps = Steps.of(source)
    step = pd.Series(pd.array(steps.version, dtype="Int64"), index=steps.batch_id)
    consumed.insert(1, "step", consumed["batch_id"].map(step[~step.index.duplicated(keep="last")]).astype("Int64"))
    metrics = metrics_wide(source, steps.version).set_index(steps.version)
    at = consumed["step"].fillna(-1).astype(np.int64)
    for name in EFFECTS:
        values = metrics[name] if name in metrics else pd.Series(np.nan, index=metrics.index)
        consumed[name] = values.reindex(at).to_numpy(dtype=np.float64)
    return consumed
