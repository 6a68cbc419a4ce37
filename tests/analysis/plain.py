"""The frames' figures by another way: one pass over the records in plain Python, in whole nanoseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from fsm_trainer.core.events import Record, RecordKind

ENDS = ("trained", "dropped", "failed", "cancelled")


def batches(records: Sequence[Record]) -> dict[int, dict[str, Any]]:
    """Batch -> moment (ns since the first row) and train_version at each of its stages, and how it ended."""
    found: dict[int, dict[str, Any]] = {}
    commands: dict[int, Record] = {}
    version = _first_version(records)
    for r in records:
        at = r.t_ns - records[0].t_ns
        if r.kind is RecordKind.COMMAND:
            commands[r.seq] = r
        if r.kind is RecordKind.VERSION and r.trigger == "step":
            assert r.train_version is not None
            version = r.train_version
        if r.kind is RecordKind.INPUT and r.trigger in ("generated", "rewarded", "trained"):
            command = commands.get(r.cause_seq or 0)
            if command is not None and r.started_ns is not None and r.finished_ns is not None:
                batch = found[command.batch_id or 0]
                batch[f"{command.trigger}_op"] = r.finished_ns - r.started_ns
        if r.kind is not RecordKind.TRANSITION or r.batch_id is None:
            continue
        if (r.machine, r.trigger) == ("rollout", "admit"):
            found[r.batch_id] = {"admitted": at, "worker": r.entity, "engine": r.engine, "state": "open"}
        batch = found[r.batch_id]
        if (r.machine, r.trigger) == ("rollout", "loaded"):
            batch["loaded"] = at
        if (r.machine, r.trigger) == ("rollout", "start"):
            batch |= {"started": at, "version_started": version, "first": r.rollout_version_first}
        if (r.machine, r.trigger) == ("batch", "generated"):
            batch |= {"generated": at, "tokens": r.tokens, "last": r.rollout_version_last}
        if (r.machine, r.trigger) == ("batch", "rewarded"):
            batch |= {"rewarded": at, "version_rewarded": version}
        if (r.machine, r.trigger) == ("batch", "enqueue"):
            batch["queued"] = at
        if (r.machine, r.trigger) == ("trainer", "take"):
            batch |= {"consumed": at, "version_consumed": version}
        if r.machine == "batch" and r.dest in ENDS:
            batch |= {"ended": at, "state": r.dest, "reason": r.reason, "staleness": r.staleness}
    return found


def _first_version(records: Sequence[Record]) -> int:
    published = (r.train_version for r in records if r.kind is RecordKind.SYNC and r.trigger == "due")
    return next(published, 0) or 0


def time_spent(records: Sequence[Record], start: int, end: int) -> dict[tuple[str, str, str | None], int]:
    """(entity, state, cause) -> ns between two moments (ns since the first row)."""
    spent: dict[tuple[str, str, str | None], int] = defaultdict(int)
    here: dict[str, tuple[str, str | None, int]] = {}
    origin = records[0].t_ns
    for r in records:
        if r.machine in (None, "batch") or r.kind not in (RecordKind.TRANSITION, RecordKind.WAIT) or r.entity is None:
            continue
        at = r.t_ns - origin
        state, cause, since = here.get(r.entity, (r.source or "", None, 0))
        spent[r.entity, state, cause] += max(0, min(at, end) - max(since, start))
        moved = r.kind is RecordKind.TRANSITION
        here[r.entity] = ((r.dest if moved else r.source) or "", None if moved else r.reason, at)
    for entity, (state, cause, since) in here.items():
        spent[entity, state, cause] += max(0, end - max(since, start))
    return {key: ns for key, ns in spent.items() if ns}


def steps(records: Sequence[Record]) -> list[tuple[int, int, int]]:
    """(train_version, batch, ns since the first row) of each optimiser step."""
    origin = records[0].t_ns
    return [
        (r.train_version or 0, -1 if r.batch_id is None else r.batch_id, r.t_ns - origin)
        for r in records
        if r.kind is RecordKind.VERSION and r.trigger == "step"
    ]


def syncs(records: Sequence[Record]) -> dict[tuple[int, int], dict[str, Any]]:
    """(version, engine) -> moments and durations (ns) of each load that ended, and the lag at its end."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    closed: dict[int, int] = {}
    served: dict[int, int] = {}
    version = _first_version(records)
    origin = records[0].t_ns
    commands = {r.seq: r for r in records if r.kind is RecordKind.COMMAND}
    for r in records:
        at = r.t_ns - origin
        if r.kind is RecordKind.VERSION and r.trigger == "step":
            version = r.train_version or 0
        if r.kind is RecordKind.TRANSITION and r.machine == "engine" and r.engine is not None:
            wanted = -1 if r.rollout_version_last is None else r.rollout_version_last
            if r.trigger == "drain":
                closed[r.engine] = at
            if r.trigger == "load":
                found[wanted, r.engine] = {"begun": at, "closed": closed.pop(r.engine, None)}
            if r.trigger == "open":
                found[wanted, r.engine] |= {"loaded": at, "lag": version - wanted, "before": served.get(r.engine)}
                served[r.engine] = wanted
        if r.kind is RecordKind.INPUT and r.trigger == "weights_loaded" and r.cause_seq in commands:
            command = commands[r.cause_seq]
            load = found[command.train_version or 0, command.engine or 0]
            load["took"] = (r.finished_ns or 0) - (r.started_ns or 0)
    return {key: load for key, load in found.items() if "loaded" in load}
