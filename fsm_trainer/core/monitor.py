"""The invariants of a run's history, checked on its records alone.

`Monitor` follows the records in order, from a scheduler or from a log, keeps its own account and raises
`InvariantViolation` at the first record that cannot be. It shares nothing with the scheduler but the edge tables.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import COMPLETIONS, NOTICES, CommandKind, InputKind, Record, RecordKind
from fsm_trainer.core.invariants import hold
from fsm_trainer.core.machines import TABLES, TERMINAL

_TERMINAL_NAMES = {(table, s.value) for table, (states, _, _) in TABLES.items() for s in states if s in TERMINAL}
_COMPLETING = frozenset({InputKind.FAILED, *(kind for kinds in COMPLETIONS.values() for kind in kinds)})
_INITIAL = {table: str(initial.value) for table, (_, initial, _) in TABLES.items()}
_EDGES = {(table, e.trigger, e.source.value, e.dest.value) for table, (_, _, edges) in TABLES.items() for e in edges}
_AFTER_STOP = {CommandKind.SAVE, *NOTICES}
"""Commands a stopping run may still issue."""
_LOST_BY_DEATH = {
    "fail": (CommandKind.START_ENGINE, CommandKind.LOAD_WEIGHTS),
    "restart": (CommandKind.START_ENGINE, CommandKind.LOAD_WEIGHTS, CommandKind.GENERATE),
}
"""By `on_engine_failure`: operations that nobody waits for any more once their engine has died."""


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
        self.train_version = config.first_version
        self.rollout_versions: dict[int, int] = {}
        self.generating: dict[int, set[int]] = {}
        """Engine -> batches that it generates."""
        self.announced: dict[int, int] = {}
        self.batch_version: dict[int, int] = {}
        self.started_with: dict[int, int] = {}
        """Version that the command to generate a batch names."""
        self.consumed = list(range(config.first_batch))
        self.ended: dict[str, str] = {}
        self.batches = config.first_batch
        self.finished: set[int] = set()
        """Batches that are rewarded and not consumed."""
        self.prompts_loaded: set[int] = set()
        self.loading: dict[int, int] = {}
        """Engine -> version that the last load command names."""
        self.steps_reported = config.first_version
        """Optimiser steps that completions of train commands stand for."""
        self.given_up: set[int] = set()
        """Operations told to end early, or whose engine died."""
        self.started_by: dict[int, int] = {}
        """Engine -> the operation that started it last."""
        self.restarts: dict[int, int] = {}
        """Engine -> how often it was started anew since it last finished a generation."""
        self.anew: set[int] = set()
        """Engines that were started anew and have loaded nothing since."""
        self.replaced = False
        """The last input is the death of an engine that another has taken the place of."""
        self.unmatched: Record | None = None
        """The last input, if it completes nothing that is in flight."""
        self.matched: int | None = None
        """The operation that the last input completes."""
        self.over = False
        self._checks = {
            RecordKind.TRANSITION: self._see_transition,
            RecordKind.QUEUE: self._see_queue,
            RecordKind.COMMAND: self._see_command,
            RecordKind.SYNC: self._see_sync,
            RecordKind.VERSION: self._see_version,
            RecordKind.INPUT: self._see_input,
            RecordKind.IGNORED: self._see_ignored,
            RecordKind.RUN_END: self._see_run_end,
        }

    def see(self, record: Record) -> None:
        """Check one record against all before it."""
        if self.over or record.seq != self.seq + 1:
            hold(not self.over, "run_end is the last record", record)
            hold(False, "seq is dense", record)
        self.seq = record.seq
        if record.t_ns > self.t_ns:
            self.t_ns = record.t_ns
        else:
            metric = record.kind is RecordKind.METRIC
            hold(record.t_ns == self.t_ns or metric, "t_ns never decreases", record)
        check = self._checks.get(record.kind)
        if check is not None:
            check(record)
        if self.unmatched is not None and record.kind is not RecordKind.INPUT:
            hold(record.kind is RecordKind.IGNORED, "a completion of nothing in flight changes nothing", record)
            self.unmatched = None

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
        admitted = self.batches - self.config.first_batch
        hold(admitted == len(self.ended), "every admitted batch ends", (admitted, self.ended))
        left = [r for op, (_, r) in self.commands.items() if op not in self.given_up]
        hold(not left, "what is in flight is awaited or given up with a record", left)
        issued = self.steps_reported - self.train_version
        hold(0 <= issued <= 1, "the engine's step count is train_version", (self.steps_reported, self.train_version))

    def _see_transition(self, r: Record) -> None:
        assert r.machine and r.entity and r.trigger and r.source and r.dest, r
        here = self.states.get(r.entity) or _INITIAL[r.machine]
        hold(here == r.source, "a transition starts where the machine is", r)
        hold((r.machine, r.trigger, r.source, r.dest) in _EDGES, "every transition is an edge", r)
        self.states[r.entity] = r.dest
        if r.machine == "batch":
            self._see_batch(r)
        if r.machine == "rollout" and r.trigger == "admit":
            self._see_admission(r)
        if r.machine in ("engine", "rollout") and r.engine is not None:
            self._see_engine(r, r.engine)

    def _see_engine(self, r: Record, engine: int) -> None:
        """A restart loses what the engine generates, and there are only so many in a row."""
        if r.machine == "rollout":
            if r.trigger == "lost":
                assert r.batch_id is not None
                self.generating[engine].discard(r.batch_id)
            elif r.trigger == "generated":
                self.restarts[engine] = 0
        elif r.trigger == "restart":
            hold(not self.generating.get(engine), "a restarted engine generates nothing any more", r)
            self.restarts[engine] = self.restarts.get(engine, 0) + 1
            most = self.config.max_engine_restarts if self.config.on_engine_failure == "restart" else 0
            hold(self.restarts[engine] <= most, "an engine is restarted only so often", r)
            hold(self.rollout_versions.get(engine, -1) >= 0, "only an engine that has served is restarted", r)
            self.loading.pop(engine, None)
            self.anew.add(engine)

    def _see_admission(self, r: Record) -> None:
        entity = f"batch-{r.batch_id}"
        hold(r.batch_id == self.batches and entity not in self.states, "batch ids are bound in order", r)
        hold(self.states.get("run") == "running", "batches are admitted only while the run goes on", r)
        self.batches += 1
        self.states[entity] = TABLES["batch"][1].value

    def _see_batch(self, r: Record) -> None:
        assert r.entity is not None and r.dest is not None and r.batch_id is not None
        if ("batch", r.dest) in _TERMINAL_NAMES:
            hold(r.entity not in self.ended, "each batch ends exactly once", r)
            self.ended[r.entity] = r.dest
            reasons = r.dest != "dropped" or r.reason in ("stale", "degenerate", "no_step")
            hold(reasons, "a drop has its reason", r)
        if r.trigger == "generated":
            self._see_stamp(r)
        elif r.trigger == "rewarded":
            self.finished.add(r.batch_id)
        elif r.dest in ("failed", "cancelled"):
            self.finished.discard(r.batch_id)
        if r.dest in ("training", "dropped") and r.source != "training":
            self._see_consumption(r)

    def _see_stamp(self, r: Record) -> None:
        """Drain mode: the version that the command named. In flight: from that on, up to what is loaded by now."""
        assert r.batch_id is not None and r.engine is not None
        first, last = r.rollout_version_first, r.rollout_version_last
        hold(first == self.batch_version.get(r.batch_id), "the batch's stamp is what the engine reports", r)
        if self.config.external_rollouts:
            return
        assert first is not None and last is not None
        low = high = self.started_with[r.batch_id]
        if self.config.sync_mode == "inflight":
            high = self.loading.get(r.engine, self.rollout_versions[r.engine])
        hold(low <= first <= last <= high, "the engine had the versions that a batch is stamped with", r)

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
        elif self.config.admission == "paced":
            mine = (self.batch_version[r.batch_id], r.batch_id)
            first = min((self.batch_version[i], i) for i in self.finished)
            hold(mine == first, "paced consumes the oldest deadline first among the finished", r)
        self.finished.discard(r.batch_id)
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
        elif kind is CommandKind.ABORT:
            assert r.reason is not None
            self.given_up.add(int(r.reason.removeprefix("op ")))
        if kind is CommandKind.LOAD_PROMPTS:
            assert r.batch_id is not None
            hold(r.batch_id not in self.prompts_loaded, "no prompt is loaded twice", r)
            self.prompts_loaded.add(r.batch_id)
        if kind is CommandKind.GENERATE:
            assert r.engine is not None and r.batch_id is not None and r.train_version is not None
            hold(self.states.get(f"engine-{r.engine}") == "open", "no generation starts at a closed gate", r)
            hold(r.train_version == self.rollout_versions[r.engine], "a generation uses what its engine serves", r)
            self.generating.setdefault(r.engine, set()).add(r.batch_id)
            self.batch_version[r.batch_id] = self.started_with[r.batch_id] = r.train_version
        elif kind is CommandKind.START_ENGINE:
            assert r.engine is not None
            self.started_by[r.engine] = r.seq
        elif kind is CommandKind.LOAD_WEIGHTS:
            assert r.engine is not None and r.train_version is not None
            idle = self.config.sync_mode == "inflight" or not self.generating.get(r.engine)
            hold(idle, "no weights are loaded while the engine generates", r)
            hold(self.announced.pop(r.engine, None) == r.train_version, "a load is announced", r)
            self.loading[r.engine] = r.train_version

    def _see_sync(self, r: Record) -> None:
        if r.trigger == "announce":
            assert r.engine is not None and r.rollout_version_last is not None
            self.announced[r.engine] = r.rollout_version_last

    def _see_version(self, r: Record) -> None:
        if r.trigger == "step":
            hold(r.train_version == self.train_version + 1, "train_version counts optimiser steps", r)
            self.train_version += 1
            hold(self.train_version == self.steps_reported, "the engine's step count is train_version", r)
            return
        assert r.engine is not None and r.rollout_version_last is not None
        # Only an engine that was built anew is given again what it had.
        least = self.rollout_versions.get(r.engine, -1) + int(r.engine not in self.anew)
        self.anew.discard(r.engine)
        hold(least <= r.rollout_version_last <= self.train_version, "rollout versions only grow, up to train's", r)
        hold(self.loading.pop(r.engine, None) == r.rollout_version_last, "a load installs what it announced", r)
        self.rollout_versions[r.engine] = r.rollout_version_last

    def _see_input(self, r: Record) -> None:
        """Match completions to commands: each completes one that is in flight, or changes nothing."""
        hold(self.unmatched is None, "a completion of nothing in flight is recorded as ignored", self.unmatched)
        kind, self.matched = InputKind(r.trigger), None
        self.replaced = r.engine in self.started_by and r.cause_seq not in (None, self.started_by[r.engine])
        if kind is InputKind.ENGINE_DIED and not self.replaced:
            lost = _LOST_BY_DEATH[self.config.on_engine_failure]
            self.given_up |= {op for op, (k, row) in self.commands.items() if k in lost and row.engine == r.engine}
        if kind not in _COMPLETING or (kind is InputKind.FAILED and r.cause_seq is None):
            return
        command = self.commands.get(r.cause_seq) if r.cause_seq is not None else None
        if command is None or not (kind is InputKind.FAILED or kind in COMPLETIONS[command[0]]):
            self.unmatched = r
            return
        assert r.cause_seq is not None
        del self.commands[r.cause_seq]
        self.matched = r.cause_seq
        self._see_completion(kind, r, *command)

    def _see_completion(self, kind: InputKind, r: Record, command: CommandKind, row: Record) -> None:
        if command is CommandKind.GENERATE:
            assert row.engine is not None and row.batch_id is not None
            self.generating[row.engine].discard(row.batch_id)
            if kind is InputKind.GENERATED and r.rollout_version_first is not None:
                self.batch_version[row.batch_id] = r.rollout_version_first
        elif kind is InputKind.TRAINED and r.reason != "no_step":
            self.steps_reported += 1

    def _see_ignored(self, r: Record) -> None:
        """Only what completes nothing, was given up, or comes when it does not matter any more, is ignored."""
        late = r.reason == "late" and self.matched in self.given_up
        aside = r.reason == "stopping" or (r.reason == "replaced" and self.replaced)
        hold(self.unmatched is not None or late or aside, "what is in flight is not ignored", r)

    def _see_run_end(self, r: Record) -> None:
        hold(r.train_version == self.train_version, "run_end names the last version", r)
        self.over = True
