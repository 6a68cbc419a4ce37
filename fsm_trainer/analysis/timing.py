"""What several frames need of a log: its optimiser steps, its operations, and what each machine did when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from fsm_trainer.analysis.entities import MACHINES
from fsm_trainer.analysis.source import NS, Floats, Ints, Pick, Rows, Source

STEPS = Pick(("seq", "t_ns", "trigger", "train_version", "batch_id"), ("version", "sync"))
ISSUED = Pick(("seq", "trigger", "batch_id", "engine", "train_version"), ("command",))
ENDED = Pick(("t_ns", "trigger", "cause_seq", "started_ns", "finished_ns"), ("input",))
OPERATIONS = (ISSUED, ENDED)


def moves_of(*machines: str) -> Pick:
    """What `spans_of` needs to know of these machines."""
    columns = ("t_ns", "kind", "machine", "entity", "source", "dest", "reason")
    return Pick(columns, ("transition", "wait"), (("machine", machines),))


@dataclass(frozen=True)
class Steps:
    """The optimiser steps of a log, one element each."""

    seq: Ints
    time_s: Floats
    version: Ints
    """train_version after the step."""
    batch_id: Ints
    first: int
    """train_version before the first of them."""

    @classmethod
    def of(cls, source: Source) -> Steps:
        """Those of a log. Without one, `first` is the version that was published."""
        rows = source.take(STEPS)
        steps = rows.where(rows.equal(trigger="step"))
        published = rows.where(rows.equal(trigger="due")).ints("train_version")
        version = steps.ints("train_version")
        first = int(version[0]) - 1 if len(version) else int(published[0]) if len(published) else 0
        return cls(steps.ints("seq"), steps.seconds(), version, steps.ints("batch_id"), first)

    def version_at(self, seq: Ints) -> Ints:
        """train_version when these rows were written."""
        before = np.searchsorted(self.seq, seq)
        known: Ints = np.concatenate([[self.first], self.version]).astype(np.int64)
        return known[before]


def operations_of(source: Source, commands: Sequence[str]) -> pd.DataFrame:
    """One row per operation of these kinds that ended: what it was, and its times.

    Columns: `op` (seq of its command), `command`, `batch_id`, `engine`, `version` (-1 if it has none), `failed`,
    `ended_s` (when the loop took its end) and `duration_s` (what the worker thread spent; nan if it was not told).
    """
    issued = source.take(ISSUED)
    issued = issued.where(issued.among("trigger", commands))
    ends = source.take(ENDED)
    seq = issued.ints("seq")
    cause = ends.ints("cause_seq")
    at = np.searchsorted(seq, cause)
    known = (at < len(seq)) & (cause >= 0)
    known[known] = seq[at[known]] == cause[known]
    ends, at = ends.where(known), at[known]
    timed = ends.present("started_ns") & ends.present("finished_ns")
    spent = (ends.ints("finished_ns") - ends.ints("started_ns")) / NS
    found: pd.DataFrame = pd.DataFrame(
        {
            "op": seq[at],
            "command": issued.texts("trigger").take(at),
            "batch_id": issued.ints("batch_id")[at],
            "engine": issued.ints("engine")[at],
            "version": issued.ints("train_version")[at],
            "failed": ends.equal(trigger="failed"),
            "ended_s": ends.seconds(),
            "duration_s": np.where(timed, spent, np.nan),
        }
    )
    return found


def spans_of(source: Source, machines: Sequence[str] = MACHINES) -> pd.DataFrame:
    """What each of these machines did when, from the log's first moment to its last, without gap or overlap.

    Columns: `machine`, `entity`, `state` and `cause` (categories; `cause` null outside waits), `start_s` and `end_s`
    in seconds since the first row; by entity, then in order.
    """
    rows = source.take(moves_of(*machines))
    moved = rows.equal(kind="transition")
    states = _one_of(moved, rows, "dest", "source")
    cause = rows.texts("reason")
    cause = pd.Categorical.from_codes(np.where(moved, -1, cause.codes), cause.categories).remove_unused_categories()
    entity = rows.texts("entity")
    order = np.argsort(entity.codes, kind="stable")
    first = np.append(True, np.diff(entity.codes[order]) != 0)[: len(order)]
    here = pd.DataFrame(
        {
            "machine": rows.texts("machine").take(order),
            "entity": entity.take(order),
            "state": states.take(order),
            "cause": cause.take(order),
            "start_s": rows.seconds()[order],
        }
    )
    begun = _beginnings(here[first], rows.texts("source").take(order)[first], states.categories)
    spans = pd.concat([begun, here], ignore_index=True)
    at = np.argsort(np.concatenate([np.flatnonzero(first) - 0.5, np.arange(len(order))]), kind="stable")
    spans = spans.iloc[at].reset_index(drop=True)
    last = np.append(np.diff(spans["entity"].cat.codes.to_numpy()) != 0, True)[: len(spans)]
    ends = np.append(spans["start_s"].to_numpy()[1:], 0.0)[: len(spans)]
    timed: pd.DataFrame = spans.assign(end_s=np.where(last, (source.end_ns - source.start_ns) / NS, ends))
    return timed


def _beginnings(firsts: pd.DataFrame, source: pd.Categorical, categories: pd.Index) -> pd.DataFrame:
    """Before its first row a machine was where that row found it."""
    begun: pd.DataFrame = firsts.assign(state=source.set_categories(categories), start_s=0.0)
    begun["cause"] = pd.Categorical.from_codes(np.full(len(begun), -1), categories=firsts["cause"].cat.categories)
    return begun


def _one_of(choice: np.ndarray, rows: Rows, name: str, other: str) -> pd.Categorical:
    """The one column where `choice`, the other elsewhere, in the categories of both."""
    one, two = rows.texts(name), rows.texts(other)
    both = one.categories.union(two.categories)
    codes = np.where(choice, one.set_categories(both).codes, two.set_categories(both).codes)
    return pd.Categorical.from_codes(codes, categories=both)
