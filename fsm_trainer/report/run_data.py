"""What the report needs of one run, computed once: its summary, its frames, and where the time of training went."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from fsm_trainer.analysis.source import NS, Source
from fsm_trainer.analysis.staleness import staleness_frame
from fsm_trainer.analysis.steps import steps_frame
from fsm_trainer.analysis.summary import Summary, summarize_log
from fsm_trainer.analysis.syncs import sync_frame
from fsm_trainer.analysis.timing import spans_of
from fsm_trainer.eventlog.reader import EventLog


@dataclass(frozen=True)
class RunData:
    """One run. All times are seconds since the log's first row."""

    log: EventLog

    @cached_property
    def source(self) -> Source:
        """The log's rows."""
        return Source.of(self.log)

    @cached_property
    def summary(self) -> Summary:
        """Its figures."""
        return summarize_log(self.log)

    @property
    def wall_s(self) -> float:
        """From the first to the last row."""
        return self.summary.wall_ns / NS

    @cached_property
    def spans(self) -> pd.DataFrame:
        """What each machine did when, as `analysis.timing.spans_of` gives it."""
        return spans_of(self.source)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """The optimiser steps with their metrics."""
        return steps_frame(self.source)

    @cached_property
    def staleness(self) -> pd.DataFrame:
        """The consumed batches."""
        return staleness_frame(self.source)

    @cached_property
    def syncs(self) -> pd.DataFrame:
        """The publications, by engine."""
        return sync_frame(self.source)

    @cached_property
    def queue(self) -> pd.DataFrame:
        """`time_s` and `queue_len` of each change of the train queue."""
        rows = self.source.rows(["t_ns", "queue_len"], ["queue"])
        changes: pd.DataFrame = pd.DataFrame({"time_s": rows.seconds(), "queue_len": rows.ints("queue_len")})
        return changes

    @cached_property
    def window(self) -> tuple[float, float] | None:
        """When the run trained: from the first weights served to the beginning of the end; None if it never did."""
        run = self.spans[self.spans["machine"] == "run"]
        training = run[run["state"].isin(["running", "draining"])]
        if training.empty or training["end_s"].max() <= training["start_s"].min():
            return None
        return float(training["start_s"].min()), float(training["end_s"].max())

    @cached_property
    def shares(self) -> pd.DataFrame:
        """Shares of that time: `machine`, `entity`, `state`, `cause` ("" outside waits) and `share`; none if None."""
        columns = ["machine", "entity", "state", "cause"]
        if self.window is None:
            none: pd.DataFrame = pd.DataFrame(columns=[*columns, "share"])
            return none
        begin, end = self.window
        spans = self.spans
        inside = (spans["end_s"].clip(upper=end) - spans["start_s"].clip(lower=begin)).clip(lower=0.0)
        timed = spans[columns].astype(object).fillna("").assign(share=inside / (end - begin))
        total = timed.groupby(columns, sort=False, as_index=False)["share"].sum()
        found: pd.DataFrame = total[total["share"] > 0].sort_values("share", ascending=False, ignore_index=True)
        return found

    def waits(self, machine: str) -> dict[str, float]:
        """Mean share of the time that the machines of a kind wait, by cause, the largest first."""
        waiting = self.shares[(self.shares["machine"] == machine) & (self.shares["cause"] != "")]
        count = max(self.shares[self.shares["machine"] == machine]["entity"].nunique(), 1)
        total = waiting.groupby("cause")["share"].sum().sort_values(ascending=False) / count
        return {str(cause): float(share) for cause, share in total.items()}
