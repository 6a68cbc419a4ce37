"""`batches_frame`: one row per prompt batch, from its admission to its end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from fsm_trainer.analysis.entities import BATCH_ENDS
from fsm_trainer.analysis.source import Floats, Ints, Mask, Pick, Rows, Run, Source, nullable
from fsm_trainer.analysis.timing import OPERATIONS, STEPS, Steps, operations_of

_COLUMNS = (
    *("seq", "t_ns", "machine", "entity", "trigger", "dest", "batch_id", "engine", "tokens", "reason"),
    *("rollout_version_first", "rollout_version_last"),
)
_TRIGGERS = (
    "admit",
    "loaded",
    "start",
    "generated",
    "rewarded",
    "enqueue",
    "take",
    "trained",
    "drop",
    "fail",
    "cancel",
)
_AMONG = (("machine", ("rollout", "batch", "trainer")), ("trigger", _TRIGGERS))
_STAGES = Pick(_COLUMNS, ("transition",), _AMONG)
PICKS = (_STAGES, STEPS, *OPERATIONS)
"""What a frame of batches needs of a log."""
_OPERATIONS = {"generate": "generate_op_s", "reward": "reward_op_s", "train": "train_op_s"}


def batches_frame(run: Run | Source) -> pd.DataFrame:
    """One row per admitted prompt batch, by `batch_id`: when it passed each stage, its versions, and its end.

    Moments are seconds since the log's first row, durations are seconds, versions and staleness are optimiser steps;
    what has not happened is nan or NA. The durations from `loading_s` to `training_s` follow on one another without a
    gap: of a batch that was consumed they add up to `ended_at_s - admitted_at_s`. `staleness` is the sum of
    `staleness_in_flight` and `staleness_in_queue`. All columns are in `fsm_trainer.analysis.COLUMNS`. ValueError if
    there is no log to read.
    """
    source = Source.of(run, PICKS)
    stages = _Stages.of(source)
    steps = Steps.of(source)
    frame: pd.DataFrame = stages.frame()
    for name, column in _versions(stages, steps).items():
        frame[name] = column
    frame = frame.assign(**_durations(frame))
    operations = operations_of(source, tuple(_OPERATIONS))
    for command, name in _OPERATIONS.items():
        done = operations[(operations["command"] == command) & ~operations["failed"]]
        frame[name] = stages.scatter(done["batch_id"].to_numpy(), done["duration_s"].to_numpy())
    return frame


@dataclass(frozen=True)
class _Stages:
    """The transitions of workers, batches and trainer that carry a batch, by what they mean to it."""

    rows: Rows
    ids: Ints

    @classmethod
    def of(cls, source: Source) -> _Stages:
        rows = source.take(_STAGES)
        admitted = rows.where(rows.equal(machine="rollout", trigger="admit"))
        return cls(rows, np.unique(admitted.ints("batch_id")))

    def scatter(self, batch_ids: Ints, values: Floats) -> Floats:
        """The values at their batches' places; nan elsewhere."""
        at = np.searchsorted(self.ids, batch_ids)
        here = (at < len(self.ids)) & (batch_ids >= 0)
        here[here] = self.ids[at[here]] == batch_ids[here]
        placed = np.full(len(self.ids), np.nan)
        placed[at[here]] = values[here]
        return placed

    def of_stage(self, mask: Mask) -> Rows:
        """One row a batch: that of its stage."""
        return self.rows.where(mask)

    def stage(self, **wanted: str) -> Rows:
        """The rows of a stage, such as `machine="batch", trigger="rewarded"`."""
        return self.of_stage(self.rows.equal(**wanted))

    def times(self, rows: Rows) -> Floats:
        """When each batch passed the stage."""
        return self.scatter(rows.ints("batch_id"), rows.seconds())

    def whole(self, rows: Rows, name: str) -> pd.Series:
        """An integer column of the stage, as `Int64`."""
        values = self.scatter(rows.ints("batch_id"), rows.floats(name))
        known = ~np.isnan(values)
        return nullable(np.where(known, values, 0.0), known)

    def words(self, rows: Rows, name: str) -> pd.Categorical:
        """A text column of the stage."""
        texts = rows.texts(name)
        codes = self.scatter(rows.ints("batch_id"), texts.codes.astype(np.float64))
        return pd.Categorical.from_codes(np.where(np.isnan(codes), -1, codes).astype(np.int64), texts.categories)

    def ended(self) -> Rows:
        """How batches ended."""
        dest = self.rows.texts("dest")
        return self.of_stage(self.rows.equal(machine="batch") & np.isin(dest, BATCH_ENDS))

    def frame(self) -> pd.DataFrame:
        """What the stages' rows say."""
        admitted, started = (
            self.stage(machine="rollout", trigger="admit"),
            self.stage(machine="rollout", trigger="start"),
        )
        generated, ended = self.stage(machine="batch", trigger="generated"), self.ended()
        state = self.words(ended, "dest")
        state = state.set_categories([*BATCH_ENDS, "open"]).fillna("open")
        version = self.whole(generated, "rollout_version_first").fillna(self.whole(started, "rollout_version_first"))
        frame: pd.DataFrame = pd.DataFrame(
            {
                "batch_id": self.ids,
                "worker": self.words(admitted, "entity"),
                "engine": self.whole(admitted, "engine"),
                "state": state,
                "reason": self.words(ended, "reason"),
                "admitted_at_s": self.times(admitted),
                "loaded_at_s": self.times(self.stage(machine="rollout", trigger="loaded")),
                "started_at_s": self.times(started),
                "generated_at_s": self.times(generated),
                "rewarded_at_s": self.times(self.stage(machine="batch", trigger="rewarded")),
                "queued_at_s": self.times(self.stage(machine="batch", trigger="enqueue")),
                "consumed_at_s": self.times(self.stage(machine="trainer", trigger="take")),
                "ended_at_s": self.times(ended),
                "tokens": self.whole(generated, "tokens"),
                "rollout_version_first": version,
                "rollout_version_last": self.whole(generated, "rollout_version_last"),
            }
        )
        return frame


def _versions(stages: _Stages, steps: Steps) -> dict[str, pd.Series]:
    """train_version at the stages, and how staleness came about."""

    def at(**wanted: str) -> pd.Series:
        rows = stages.stage(**wanted)
        versions = stages.scatter(rows.ints("batch_id"), steps.version_at(rows.ints("seq")).astype(np.float64))
        known = ~np.isnan(versions)
        return nullable(np.where(known, versions, 0.0), known)

    started = at(machine="rollout", trigger="start")
    finished, consumed = at(machine="batch", trigger="rewarded"), at(machine="trainer", trigger="take")
    served = stages.whole(stages.stage(machine="batch", trigger="generated"), "rollout_version_first")
    return {
        "train_version_started": started,
        "train_version_rewarded": finished,
        "train_version_consumed": consumed,
        "staleness": consumed - served,
        "staleness_at_start": started - served,
        "staleness_in_flight": finished - served,
        "staleness_in_queue": consumed - finished,
    }


def _durations(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Seconds from one stage to the next. A batch taken straight from its parked worker spent none in the queue."""
    left = frame["queued_at_s"].fillna(frame["consumed_at_s"])
    straight = frame["queued_at_s"].isna() & frame["consumed_at_s"].notna()
    return {
        "loading_s": frame["loaded_at_s"] - frame["admitted_at_s"],
        "ready_s": frame["started_at_s"] - frame["loaded_at_s"],
        "generating_s": frame["generated_at_s"] - frame["started_at_s"],
        "rewarding_s": frame["rewarded_at_s"] - frame["generated_at_s"],
        "parked_s": left - frame["rewarded_at_s"],
        "queue_s": (frame["consumed_at_s"] - frame["queued_at_s"]).mask(straight, 0.0),
        "training_s": (frame["ended_at_s"] - frame["consumed_at_s"]).where(frame["consumed_at_s"].notna()),
    }
