"""`steps_frame`: one row per optimiser step, with where its time went and what the step measured."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fsm_trainer.analysis.batches import PICKS, batches_frame
from fsm_trainer.analysis.source import Pick, Run, Source
from fsm_trainer.analysis.timing import Steps, moves_of, spans_of

TRAINER_STATES = ("training", "syncing", "saving", "checking", "waiting")
TRAINER_CAUSES = (
    "generation",
    "reward",
    "prompts",
    "weight_sync",
    "older_batch",
    "admission",
    "starting",
    "stopping",
)
"""Causes of the trainer's waits, each with a column of its own."""
METRICS = Pick(("reason", "value", "train_version"), ("metric",))
_WHO = ("trainer", "run")
_OF_BATCH = [
    "rollout_version_first",
    "staleness",
    "staleness_in_flight",
    "staleness_in_queue",
    "generating_s",
    "rewarding_s",
    "parked_s",
    "queue_s",
    "train_op_s",
]


def steps_frame(run: Run | Source) -> pd.DataFrame:
    """One row per optimiser step, by `step` (train_version after it): its batch, where the time since the step before
    went, and each metric that was logged at it, in a column of the metric's name.

    Times are seconds. `interval_s` runs from the step before (of the first: from the moment the run was up) to this
    one, and is the sum of what the trainer did in it: `training_s`, `syncing_s`, `saving_s`, `checking_s` and
    `waiting_s`; `waiting_s` is the sum of the `waiting_CAUSE_s`. A metric with the name of another column is named
    `NAME_metric`. All columns are in `fsm_trainer.analysis.COLUMNS`. ValueError if there is no log to read.
    """
    source = Source.of(run, (*PICKS, METRICS, moves_of(*_WHO)))
    steps = Steps.of(source)
    frame = pd.DataFrame({"step": steps.version, "batch_id": steps.batch_id, "stepped_at_s": steps.time_s})
    times = _trainer_times(source, steps)
    frame = pd.concat([frame, times], axis=1)
    batches = batches_frame(source).set_index("batch_id")[_OF_BATCH]
    frame = frame.join(batches, on="batch_id")
    metrics = metrics_wide(source, steps.version)
    taken = {name: f"{name}_metric" for name in metrics.columns if name in frame.columns}
    found: pd.DataFrame = pd.concat([frame, metrics.rename(columns=taken)], axis=1)
    return found


def metrics_wide(source: Source, versions: np.ndarray) -> pd.DataFrame:
    """The metrics logged at these train versions, a column each, in the order of their first row; nan where none."""
    rows = source.take(METRICS)
    # Those of a load of weights belong to no step, and get no column.
    rows = rows.where(rows.present("train_version"))
    version, names = rows.ints("train_version"), rows.texts("reason")
    values, codes = rows.floats("value"), names.codes
    at = np.searchsorted(versions, version)
    here = at < len(versions)
    here[here] = versions[at[here]] == version[here]
    columns = {}
    for code in map(int, pd.unique(codes[codes >= 0])):
        mine = here & (codes == code)
        column = np.full(len(versions), np.nan)
        column[at[mine]] = values[mine]
        columns[names.categories[code]] = column
    wide: pd.DataFrame = pd.DataFrame(columns, index=pd.RangeIndex(len(versions)))
    return wide


def _trainer_times(source: Source, steps: Steps) -> pd.DataFrame:
    """Seconds of the trainer in each state, and in waits for each cause, between one step and the next."""
    spans = spans_of(source, _WHO)
    up = spans[(spans["machine"] == "run") & (spans["state"] == "running")]["start_s"]
    begin = float(up.iloc[0]) if len(up) else 0.0
    trainer = spans[spans["machine"] == "trainer"]
    start, end = np.maximum(trainer["start_s"].to_numpy(), begin), trainer["end_s"].to_numpy()
    # A step is a moment at which the trainer changes its state, so no span lies on both sides of one.
    step = np.searchsorted(steps.time_s, end)
    spent = np.where(step < len(steps.seq), np.maximum(end - start, 0.0), 0.0)

    def total(mask: pd.Series) -> np.ndarray:
        mine = mask.to_numpy(dtype=bool)
        sums: np.ndarray = np.bincount(step[mine], weights=spent[mine], minlength=len(steps.seq) + 1)
        return sums[: len(steps.seq)].astype(np.float64)

    waiting = trainer["state"] == "waiting"
    columns = {"interval_s": np.diff(steps.time_s, prepend=begin)}
    columns |= {f"{state}_s": total(trainer["state"] == state) for state in TRAINER_STATES}
    columns |= {f"waiting_{cause}_s": total(waiting & (trainer["cause"] == cause)) for cause in TRAINER_CAUSES}
    spent_in: pd.DataFrame = pd.DataFrame(columns)
    return spent_in
