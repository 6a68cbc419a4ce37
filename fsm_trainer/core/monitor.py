"""The invariants of a run's history (DESIGN section 8), checked on its records alone.

`Monitor` follows the records in order, from a scheduler or from a log, keeps its own account and raises
`InvariantViolation` at the first record that cannot be. It shares nothing with the scheduler but the edge tables.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import COMPLETIONS, NOTICES, CommandKind, InputKind, Record, RecordKind
from fsm_trainer.core.invariants import hold
from fsm_trainer.core.machines import TABLES, TERMINAL, edge_exists

_TERMINAL_NAMES = {(table, s.value) for table, (states, _, _) in TABLES.items() for s in states if s in TERMINAL}
_AFTER_STOP = {CommandKind.SAVE, *NOTICES}
"""Commands a stopping run may still issue."""


class Monitor:
    """An independent account of one run. Feed it every record with `see`; call `finish` at the end."""

    def __init__(self, config: SchedulerConfig) -> None:
        """Expect a run of this configuration from its first record on."""
        self.config = config
        self.seq = -1
        self.t_ns = 0
        self.states: dict[str, str] = {}
        self.commands: dict[int, tuple[CommandKind, Record]] = {}
        self.queue: list[int] = []
        self.train_version = 0
        self.rollout_versions: dict[int, int] = {}
        self.generating: dict[int, int] = {}
        """Engine -> generations in flight."""
        self.announced: dict[int, int] = {}
        self.batch_version: dict[int, int] = {}
        self.consumed: list[int] = []
        self.ended: dict[str, str] = {}
        self.over = False

    def see(self, record: Record) -> None:
        """Check one record against all before it."""
        hold(not self.over, "run_end is the last record", record)
        hold(record.seq == self.seq + 1, "seq is dense", record)
        hold(record.t_ns >= self.t_ns or record.kind is RecordKind.METRIC, "t_ns never decreases", record)
        self.seq, self.t_ns = record.seq, max(self.t_ns, record.t_ns)
        check = getattr(self, f"_see_{record.kind.value}", None)
        if check is not None:
            check(record)

    def see_all(self, records: Iterable[Record]) -> Monitor:
        """Check a sequence of records."""
        for record in records:
            self.see(record)
        return self

    def finish(self) -> None:
        """Check what must hold once a run has ended."""
        hold(self.over, "a run ends in run_end", self.seq)
        open_ones = {e: s for e, s in self.states.items() if (e.split("-")[0], s) not in _TERMINAL_NAMES}
        hold(not open_ones, "every machine ends in a terminal state", open_ones)
        batches = sum(e.startswith("batch-") for e in self.states)
        hold(batches == len(self.ended), "every admitted batch ends", (batches, self.ended))

    def _see_transition(self, r: Record) -> None:
        assert r.machine and r.entity and r.trigger and r.source and r.dest, r
        initial = TABLES[r.machine][1].value
        here = self.states.get(r.entity, initial)
        hold(here == r.source, "a transition starts where the machine is", r)
        hold(edge_exists(r.machine, r.trigger, r.source, r.dest), "every transition is an edge", r)
        self.states[r.entity] = r.dest
        if r.machine == "batch":
            self._see_batch(r)
        if r.machine == "rollout" and r.trigger == "admit":
            self._see_admission(r)

    def _see_admission(self, r: Record) -> None:
        entity = f"batch-{r.batch_id}"
        admitted = sum(e.startswith("batch-") for e in self.states)
        hold(r.batch_id == admitted and entity not in self.states, "batch ids are bound in order", r)
        self.states[entity] = TABLES["batch"][1].value

    def _see_batch(self, r: Record) -> None:
        assert r.entity is not None and r.dest is not None and r.batch_id is not None
        if ("batch", r.dest) in _TERMINAL_NAMES:
            hold(r.entity not in self.ended, "each batch ends exactly once", r)
            self.ended[r.entity] = r.dest
        if r.dest in ("training", "dropped") and r.source != "training":
            self._see_consumption(r)

    def _see_consumption(self, r: Record) -> None:
        """Staleness within the bound, no needless drop, and the order the admission promised."""
        assert r.batch_id is not None
        bound, lockstep = self.config.max_staleness, self.config.admission == "lockstep"
        staleness = self.train_version - self.batch_version[r.batch_id]
        hold(r.staleness == staleness, "staleness is train_version - rollout version", r)
        if r.dest == "training":
            hold(staleness <= bound, "staleness at train start is within the bound", r)
        if r.reason == "stale":
            greedy = self.config.admission == "greedy" or self.config.external_rollouts
            hold(staleness > bound and greedy, "no needless drop", r)
        if lockstep:
            hold(r.batch_id == len(self.consumed), "lockstep consumes in id order", r)
        self.consumed.append(r.batch_id)

    def _see_queue(self, r: Record) -> None:
        assert r.batch_id is not None
        if r.trigger == "put":
            self.queue.append(r.batch_id)
        elif r.trigger == "take":
            fifo = self.config.admission == "greedy"
            hold(r.batch_id in self.queue[: 1 if fifo else None], "greedy takes first in, first out", r)
            self.queue.remove(r.batch_id)
        hold(r.queue_len == len(self.queue) <= self.config.queue_size, "queue within capacity", r)

    def _see_command(self, r: Record) -> None:
        kind = CommandKind(r.trigger)
        hold(self.states.get("run") != "stopping" or kind in _AFTER_STOP, "nothing new starts after stop", r)
        if kind not in NOTICES:
            self.commands[r.seq] = (kind, r)
        if kind is CommandKind.GENERATE:
            assert r.engine is not None and r.batch_id is not None and r.train_version is not None
            hold(self.states.get(f"engine-{r.engine}") == "open", "no generation starts at a closed gate", r)
            hold(r.train_version == self.rollout_versions[r.engine], "a generation uses what its engine serves", r)
            self.generating[r.engine] = self.generating.get(r.engine, 0) + 1
            self.batch_version[r.batch_id] = r.train_version
        elif kind is CommandKind.LOAD_WEIGHTS:
            assert r.engine is not None and r.train_version is not None
            hold(not self.generating.get(r.engine), "no weights are loaded while the engine generates", r)
            hold(self.announced.pop(r.engine) == r.train_version, "a load is announced", r)

    def _see_sync(self, r: Record) -> None:
        if r.trigger == "announce":
            assert r.engine is not None and r.rollout_version_last is not None
            self.announced[r.engine] = r.rollout_version_last

    def _see_version(self, r: Record) -> None:
        if r.trigger == "step":
            hold(r.train_version == self.train_version + 1, "train_version counts optimiser steps", r)
            self.train_version += 1
            return
        assert r.engine is not None and r.rollout_version_last is not None
        before = self.rollout_versions.get(r.engine, -1)
        hold(before < r.rollout_version_last <= self.train_version, "rollout versions only grow, up to train's", r)
        self.rollout_versions[r.engine] = r.rollout_version_last

    def _see_input(self, r: Record) -> None:
        """Match completions to commands; the scheduler's own verdict on a mismatch is an `ignored` record."""
        command = self.commands.get(r.cause_seq) if r.cause_seq is not None else None
        if command is None or r.trigger is None:
            return
        kind, row = command
        completes = InputKind(r.trigger) in COMPLETIONS[kind] or r.trigger == InputKind.FAILED.value
        if not completes:
            return
        assert r.cause_seq is not None
        del self.commands[r.cause_seq]
        if kind is CommandKind.GENERATE:
            assert row.engine is not None and row.batch_id is not None
            self.generating[row.engine] -= 1
            if r.trigger == InputKind.GENERATED.value and r.rollout_version_first is not None:
                self.batch_version[row.batch_id] = r.rollout_version_first

    def _see_run_end(self, r: Record) -> None:
        hold(r.train_version == self.train_version, "run_end names the last version", r)
        self.over = True
