"""The event log as data frames: all events, the operations, the batches, and what each machine did when.

Every function after `load_events` is a pure function of its frame. This module knows the log's columns and nothing of
why the scheduler decided as it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from fsm_trainer.analysis.entities import BATCH_ENDS
from fsm_trainer.eventlog.reader import EventLog, read_log
from fsm_trainer.eventlog.schema import SCHEMA

_NAMES = ["machine", "entity"]


def load_events(run: str | Path, columns: Sequence[str] | None = None) -> pd.DataFrame:
    """All events of a run directory or log file, one row each, in order, with Arrow dtypes.

    `columns` (docs/event-log.md) loads only these, and `seq` and `kind`. Of a run that crashed, or is still going, what
    there is. ValueError if there is no log to read, or it has no such column.
    """
    for name in columns or ():
        if name not in SCHEMA.names:
            raise ValueError(f"an event log has no column {name[:40]!r}, expected some of {', '.join(SCHEMA.names)}")
    return events_frame(read_log(run, columns=columns))


def events_frame(log: EventLog) -> pd.DataFrame:
    """The events of a log that has been read."""
    frame: pd.DataFrame = log.table.to_pandas(types_mapper=pd.ArrowDtype)
    return frame


def rows_of(events: pd.DataFrame, kind: str, **equal: str) -> pd.DataFrame:
    """The rows of one kind in which the given columns have the given values."""
    mask = events["kind"] == kind
    for column, value in equal.items():
        mask &= (events[column] == value).fillna(False)
    selected: pd.DataFrame = events[mask]
    return selected


def operations(events: pd.DataFrame) -> pd.DataFrame:
    """One row per completed operation: command, outcome, owner, batch, engine, and its times in nanoseconds.

    `duration_ns` is what the worker thread spent; `wait_ns` is how long the command waited for its thread, and
    `inbox_ns` how long the completion waited for the loop.
    """
    commands = rows_of(events, "command")[["seq", "trigger", "machine", "entity", "batch_id", "engine"]]
    inputs = rows_of(events, "input")[
        ["seq", "t_ns", "trigger", "cause_seq", "reason", "tokens", "posted_ns", "started_ns", "finished_ns"]
    ]
    inputs = inputs[inputs["trigger"] != "engine_died"]  # of which `cause_seq` only says which start it was
    joined = inputs.merge(
        commands.rename(columns={"seq": "op", "trigger": "command"}), left_on="cause_seq", right_on="op", how="inner"
    )
    joined = joined.rename(columns={"trigger": "outcome"}).drop(columns="cause_seq")
    timed: pd.DataFrame = joined.assign(
        duration_ns=joined["finished_ns"] - joined["started_ns"],
        wait_ns=joined["started_ns"] - joined["posted_ns"],
        inbox_ns=joined["t_ns"] - joined["finished_ns"],
    )
    return timed


def ended_batches(events: pd.DataFrame) -> pd.DataFrame:
    """One row per batch that ended: batch_id, state, reason, staleness, rollout version, when."""
    moves = rows_of(events, "transition", machine="batch")
    ends = moves[moves["dest"].isin(BATCH_ENDS)]
    columns = ["batch_id", "dest", "reason", "staleness", "rollout_version_first", "engine", "t_ns"]
    batches: pd.DataFrame = ends[columns].rename(columns={"dest": "state"}).reset_index(drop=True)
    return batches


def intervals(events: pd.DataFrame) -> pd.DataFrame:
    """What each machine but the batches did when: machine, entity, state, cause (categories), start_ns, end_ns.

    From the first to the last moment of the log, without gap or overlap. `cause` is null outside waits.
    """
    mask = events["kind"].isin(["transition", "wait"]) & (events["machine"] != "batch").fillna(False)
    rows = events.loc[mask, ["t_ns", "kind", *_NAMES, "source", "dest", "reason"]]
    if rows.empty:
        empty: pd.DataFrame = pd.DataFrame(columns=[*_NAMES, "state", "cause", "start_ns", "end_ns"])
        return empty
    changes = _changes(rows)
    # In the order of their names, a machine's own rows in the order of the log.
    codes = np.stack([changes[name].cat.codes for name in _NAMES])
    order = np.lexsort(codes[::-1])
    first = np.append(True, (np.diff(codes[:, order]) != 0).any(axis=0))
    here: pd.DataFrame = changes.iloc[np.repeat(order, 1 + first)].reset_index(drop=True)
    # Before its first row a machine was where that row found it.
    begun = np.flatnonzero(first) + np.arange(first.sum())
    here.loc[begun, "state"] = rows["source"].iloc[order[first]].to_numpy(dtype=object)
    here.loc[begun, "cause"] = None
    start = here["start_ns"].to_numpy().copy()
    start[begun] = int(events["t_ns"].min())
    end = np.append(start[1:], 0)
    end[np.append(begun[1:] - 1, len(here) - 1)] = int(events["t_ns"].max())
    spans: pd.DataFrame = here.assign(start_ns=start, end_ns=end)
    return spans


def _changes(rows: pd.DataFrame) -> pd.DataFrame:
    """The state and cause from each transition or wait on."""
    moved = (rows["kind"] == "transition").to_numpy(dtype=bool)
    dest, source, cause = (_categories(rows[name]) for name in ("dest", "source", "reason"))
    states = dest.categories.union(source.categories)
    codes = np.where(moved, dest.set_categories(states).codes, source.set_categories(states).codes)
    columns = {
        **{name: _categories(rows[name]) for name in _NAMES},
        "state": pd.Categorical.from_codes(codes, categories=states),
        "cause": pd.Categorical.from_codes(np.where(moved, -1, cause.codes), categories=cause.categories),
        "start_ns": rows["t_ns"].to_numpy(dtype=np.int64),
    }
    changes: pd.DataFrame = pd.DataFrame(columns)
    return changes


def _categories(column: pd.Series) -> pd.Categorical:
    """A text column as sorted categories."""
    encoded = pa.table([pa.array(column.array)], ["text"])["text"].combine_chunks().dictionary_encode()
    codes = np.asarray(encoded.indices.fill_null(-1))
    found = pd.Categorical.from_codes(codes, categories=pd.Index(encoded.dictionary.to_pylist(), dtype=object))
    ordered: pd.Categorical = found.set_categories(found.categories.sort_values())
    return ordered


def residency(spans: pd.DataFrame, start_ns: int | None = None, end_ns: int | None = None) -> pd.DataFrame:
    """Nanoseconds of each machine in each state and cause, within a stretch of time if one is given."""
    start = spans["start_ns"] if start_ns is None else spans["start_ns"].clip(lower=start_ns)
    end = spans["end_ns"] if end_ns is None else spans["end_ns"].clip(upper=end_ns)
    timed = spans.assign(ns=(end - start).clip(lower=0))
    keys = ["machine", "entity", "state", "cause"]
    total = timed.groupby(keys, dropna=False, sort=False, as_index=False, observed=True)["ns"].sum()
    total = total.astype(dict.fromkeys(keys, object))
    order = ["machine", "entity", "ns"]
    spent: pd.DataFrame = total[total["ns"] > 0].sort_values(order, ascending=[True, True, False], ignore_index=True)
    return spent
