"""Drives a bare Scheduler in tests: a seeded order of completions, faults where asked, a monitor over every record."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import NOTICES, Command, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.core.monitor import Monitor
from fsm_trainer.core.scheduler import Scheduler

MAX_EVENTS = 20_000


@dataclass
class World:
    """What the outside does: where prompts end and which batches give no step."""

    prompts: int | None = None
    degenerate: Collection[int] = ()
    no_step: Collection[int] = ()


@dataclass
class Driver:
    """A scheduler, what it asked for and has not got yet, and all it said."""

    config: SchedulerConfig
    world: World = field(default_factory=World)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config)
        self.monitor = Monitor(self.config)
        self.pending: list[Command] = []
        self.notices: list[Command] = []
        self.records: list[Record] = []
        self.t_ns = 0
        self.events = 0

    def feed(self, event: Input, *, at_ns: int | None = None) -> list[Record]:
        """Hand one input to the scheduler, 1 us after the last one unless told."""
        self.t_ns = max(self.t_ns + 1_000, at_ns or 0)
        self.events += 1
        records, commands = self.scheduler.step(replace(event, t_ns=self.t_ns))
        self.monitor.see_all(records)
        self.records.extend(records)
        for command in commands:
            (self.notices if command.kind in NOTICES else self.pending).append(command)
        return records

    def begin(self) -> Driver:
        """The first input."""
        self.feed(Input(InputKind.BEGIN))
        return self

    def complete(self, command: Command) -> list[Record]:
        """Complete one pending command as the world would."""
        self.pending.remove(command)
        return self.feed(self.completion(command))

    def fail(self, command: Command, message: str = "boom", reason: str = "ValueError") -> list[Record]:
        """Let one pending command fail."""
        self.pending.remove(command)
        return self.feed(Input(InputKind.FAILED, op=command.op, reason=reason, message=message))

    def completion(self, c: Command) -> Input:
        """What a well-behaved outside answers."""
        w = self.world
        if c.kind is CommandKind.LOAD_PROMPTS:
            assert c.batch_id is not None
            there = w.prompts is None or c.batch_id < w.prompts
            return Input(InputKind.LOADED if there else InputKind.EXHAUSTED, op=c.op)
        if c.kind is CommandKind.GENERATE:
            return Input(
                InputKind.GENERATED,
                op=c.op,
                rollout_version_first=c.version,
                rollout_version_last=c.version,
                tokens=10,
            )
        if c.kind is CommandKind.REWARD:
            return Input(InputKind.REWARDED, op=c.op, reason="degenerate" if c.batch_id in w.degenerate else None)
        if c.kind is CommandKind.TRAIN:
            assert c.version is not None
            stepped = c.batch_id not in w.no_step
            return Input(
                InputKind.TRAINED, op=c.op, train_version=c.version + stepped, reason=None if stepped else "no_step"
            )
        if c.kind is CommandKind.LOAD_WEIGHTS:
            return Input(InputKind.WEIGHTS_LOADED, op=c.op, rollout_version_last=c.version)
        kind = {
            CommandKind.START_TRAINER: InputKind.STARTED,
            CommandKind.START_ENGINE: InputKind.STARTED,
            CommandKind.EXPORT: InputKind.EXPORTED,
            CommandKind.SAVE: InputKind.SAVED,
        }[c.kind]
        return Input(kind, op=c.op, train_version=c.version)

    def find(self, kind: CommandKind, batch_id: int | None = None) -> Command:
        """The one pending command of a kind (and batch)."""
        found = [c for c in self.pending if c.kind is kind and batch_id in (None, c.batch_id)]
        assert len(found) == 1, (kind, batch_id, self.pending)
        return found[0]

    def until(self, kind: CommandKind, batch_id: int | None = None, *, keep: Collection[CommandKind] = ()) -> Command:
        """Complete the others (but those kinds to `keep` pending), oldest first, until this one is pending."""
        while True:
            for command in self.pending:
                if command.kind is kind and batch_id in (None, command.batch_id):
                    return command
            self.complete(next(c for c in self.pending if c.kind not in keep))

    def complete_all_but(self, *kept: Command) -> None:
        """Complete everything, and what follows from it, except these."""
        while others := [c for c in self.pending if c not in kept]:
            self.complete(others[0])

    def finish(self, rng: random.Random | None = None) -> Driver:
        """Complete everything, in a random order if given one, until the run has ended."""
        while not self.scheduler.finished:
            assert self.pending, f"deadlock: {self.scheduler.status()}"
            assert self.events < MAX_EVENTS, f"livelock: {self.scheduler.status()}"
            self.complete(self.pending[rng.randrange(len(self.pending)) if rng else 0])
        return self.check_end()

    def check_end(self) -> Driver:
        """Everything is accounted for."""
        self.monitor.finish()
        assert not self.pending
        return self

    def kinds(self, kind: RecordKind, trigger: str | None = None) -> list[Record]:
        """Records of one kind (and trigger)."""
        return [r for r in self.records if r.kind is kind and trigger in (None, r.trigger)]

    def trained(self) -> list[tuple[int | None, int | None]]:
        """(batch, policy version) of each train command, in order."""
        rows = [r for r in self.kinds(RecordKind.TRANSITION, "train") if r.machine == "batch"]
        return [(r.batch_id, r.rollout_version_first) for r in rows]
