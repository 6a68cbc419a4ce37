"""`sync_frame`: one row per publication of weights and engine: what it cost, and how far the engine was behind."""

from __future__ import annotations

import numpy as np
import pandas as pd

from fsm_trainer.analysis.columns import COLUMNS
from fsm_trainer.analysis.source import Pick, Rows, Run, Source, nullable
from fsm_trainer.analysis.timing import ISSUED, OPERATIONS, STEPS, Steps, operations_of

_MOVES = Pick(
    ("seq", "t_ns", "trigger", "engine", "rollout_version_last"), ("transition",), (("machine", ("engine",)),)
)
COSTS = {
    "sync_pause_s": "pause_s",
    "sync_transfer_s": "transfer_s",
    "sync_resume_s": "resume_s",
    "sync_bytes": "nbytes",
}
"""Metric of a load -> its column."""
_COSTS = Pick(("t_ns", "engine", "rollout_version_last", "reason", "value"), ("metric",), (("reason", tuple(COSTS)),))
_LOAD = ["version", "engine", "loaded_at_s"]


def sync_frame(run: Run | Source) -> pd.DataFrame:
    """One row per published version and rollout engine, by version, then engine.

    Moments are seconds since the log's first row, durations are seconds. An engine that went on to a newer version has
    the version it skipped with `loaded` false and no load; one that loaded a version again has a row for each load.
    Publications of unchanged weights are aliases, and no rows. All columns are in `fsm_trainer.analysis.COLUMNS`.
    ValueError if there is no log to read.
    """
    source = Source.of(run, (_MOVES, STEPS, *OPERATIONS, _COSTS))
    moves = source.take(_MOVES)
    engines = np.unique(moves.ints("engine"))
    grid = _publications(source).merge(pd.DataFrame({"engine": engines[engines >= 0]}), how="cross")
    frame = grid.merge(_loads(source, moves), on=["version", "engine"], how="left")
    frame = frame.merge(_costs(source), on=_LOAD, how="left")
    frame["loaded"] = frame["loaded_at_s"].notna()
    frame["publish_s"] = frame["loaded_at_s"] - frame["due_at_s"]
    ordered: pd.DataFrame = frame.sort_values(["due_at_s", "engine", "load_at_s"], ignore_index=True)[
        list(COLUMNS["sync_frame"])
    ]
    return ordered


def _publications(source: Source) -> pd.DataFrame:
    """Each export: when it was due, when the snapshot was there, and what the export took."""
    rows = source.take(STEPS)
    due, there = rows.where(rows.equal(trigger="due")), rows.where(rows.equal(trigger="exported"))
    exports = operations_of(source, ["export"])
    spent = exports[~exports["failed"]].groupby("version")["duration_s"].last()
    exported = pd.Series(there.seconds(), index=there.ints("train_version")).groupby(level=0).last()
    version = pd.Series(due.ints("train_version"))
    times = {"exported_at_s": version.map(exported).astype("float64"), "export_s": version.map(spent).astype("float64")}
    published: pd.DataFrame = pd.DataFrame({"version": version, "due_at_s": due.seconds(), **times})
    return published


def _loads(source: Source, moves: Rows) -> pd.DataFrame:
    """Each load of an engine: gate closed, load begun and ended, and the versions around it."""
    order = np.argsort(moves.ints("engine"), kind="stable")
    engine, seq, at = moves.ints("engine")[order], moves.ints("seq")[order], moves.seconds()[order]
    trigger = np.asarray(moves.texts("trigger").astype(object))[order]
    load = np.flatnonzero(trigger == "load")
    before, after = np.maximum(load - 1, 0), np.minimum(load + 1, len(order) - 1)
    drained = (engine[before] == engine[load]) & (trigger[before] == "drain")
    opened = (engine[after] == engine[load]) & (trigger[after] == "open")
    steps = Steps.of(source)
    version = moves.ints("rollout_version_last")[order][load]
    previous = _versions_before(engine[load], version)
    closed_at, loaded_at = np.where(drained, at[before], np.nan), np.where(opened, at[after], np.nan)
    loads: pd.DataFrame = pd.DataFrame(
        {
            "version": version,
            "engine": engine[load],
            "previous_version": nullable(previous, previous >= 0),
            "lag": nullable(steps.version_at(seq[after]) - version, opened),
            "closed_at_s": closed_at,
            "load_at_s": at[load],
            "loaded_at_s": loaded_at,
            "drain_s": at[load] - closed_at,
            "load_s": _load_times(source, seq[load]),
            "closed_s": loaded_at - np.where(drained, closed_at, at[load]),
        }
    )
    return loads


def _costs(source: Source) -> pd.DataFrame:
    """What engines said that a load took, by the moment at which it was done; nan or NA where they did not say it."""
    rows = source.take(_COSTS)
    keys = {"version": rows.ints("rollout_version_last"), "engine": rows.ints("engine"), "loaded_at_s": rows.seconds()}
    said = pd.DataFrame(
        {**keys, "reason": np.asarray(rows.texts("reason").astype(object)), "value": rows.floats("value")}
    )
    costs = said.pivot_table("value", _LOAD, "reason").rename(columns=COSTS).reindex(columns=list(COSTS.values()))
    costs["nbytes"] = costs["nbytes"].round().astype("Int64")
    found: pd.DataFrame = costs.reset_index()
    return found


def _versions_before(engine: np.ndarray, version: np.ndarray) -> np.ndarray:
    """What each engine loaded before; -1 if nothing. The loads are in order, one engine after the other."""
    same = np.append(False, engine[1:] == engine[:-1])[: len(engine)]
    before: np.ndarray = np.where(same, np.roll(version, 1), -1)
    return before


def _load_times(source: Source, load_seq: np.ndarray) -> np.ndarray:
    """What each load took; nan if it did not end. Its command is the first after its transition."""
    commands = source.take(ISSUED)
    issued = commands.where(commands.equal(trigger="load_weights")).ints("seq")
    done = operations_of(source, ["load_weights"])
    spent = pd.Series(done["duration_s"].to_numpy(), index=done["op"].to_numpy())
    command = issued[np.minimum(np.searchsorted(issued, load_seq), max(len(issued) - 1, 0))] if len(issued) else issued
    return np.asarray(spent.reindex(command), dtype=np.float64)
