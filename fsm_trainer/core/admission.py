"""The three admissions: when a batch may be started, when it may be consumed, and what engines must load.

`paced` bounds staleness with nothing thrown away, `greedy` produces until the queue is full and drops what went
stale, `lockstep` fixes which weights generate which batch; docs/scheduler.md gives the reasons. They only read the
state: the rules in `rules.py` act on their answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from fsm_trainer.core import policy
from fsm_trainer.core.state import Batch, Engine, State


class Admission(ABC):
    """What the scheduler asks of an admission; this base holds what `paced` and `greedy` share (drain-mode sync)."""

    def __init__(self, state: State) -> None:
        """Answer questions about `state`."""
        self.state = state
        self.config = state.config

    @abstractmethod
    def may_admit(self, engine: Engine) -> bool:
        """Whether the next batch may be admitted on this engine now."""

    @abstractmethod
    def may_start(self, batch: Batch) -> bool:
        """Whether an admitted batch may start generating with what its (open) engine serves."""

    @abstractmethod
    def candidate(self) -> Batch | None:
        """The finished batch to consume next, if it may be consumed now."""

    @abstractmethod
    def next_to_enqueue(self) -> Batch:
        """Which parked batch gets a freed slot."""

    @abstractmethod
    def refresh_needed(self) -> bool:
        """Whether generation stands still until newer weights are published; the common conditions hold already."""

    def sync_due(self) -> bool:
        """Whether the consumption just made calls for a publication."""
        published = self.state.newest_publication if self.state.exporting is None else self.state.exporting
        return self.state.train_version - published >= self.config.sync_interval

    def publication_id(self) -> int:
        """The name of a publication made now."""
        return self.state.train_version

    def save_due(self) -> bool:
        """Whether a checkpoint is due: `save_interval` steps have been taken since the last one."""
        return 0 < self.config.save_interval <= self.state.train_version - self.state.saved_version

    def gate_closes(self, engine: Engine) -> bool:
        """Whether the engine must stop admitting generations: a newer publication is due."""
        due = self.state.newest_publication if self.state.exporting is None else self.state.exporting
        return due > engine.publication

    def target(self, engine: Engine) -> int | None:
        """Publication that an engine with nothing running should load now. The newest, so an export is waited for."""
        newest = self.state.newest_publication
        return newest if self.state.exporting is None and newest > engine.publication else None

    def oldest_needed(self) -> int:
        """Publications below this one will not be loaded any more."""
        return self.state.newest_publication

    def _lag(self, engine: Engine) -> int:
        return self.state.train_version + self.state.in_training - engine.version


class Paced(Admission):
    """Admit a batch only if all unconsumed batches can still be consumed within their deadlines."""

    def may_admit(self, engine: Engine) -> bool:
        """The set of unconsumed batches stays feasible with the new one."""
        s = self.state
        deadlines = [s.deadline_of(b) for b in s.unconsumed()]
        deadlines.append(engine.version + self.config.max_staleness)
        return policy.feasible(s.train_version + s.in_training, deadlines)

    def may_start(self, batch: Batch) -> bool:
        """Admission has already decided; an engine's version never decreases."""
        return True

    def candidate(self) -> Batch | None:
        """The oldest deadline among the finished, if the rest stays feasible after it.

        If it does not, some unfinished batch has an older deadline and no slack left: the trainer waits for that one.
        """
        s = self.state
        first = min(s.finished(), key=lambda b: (s.deadline_of(b), b.id), default=None)
        if first is None:
            return None
        rest = [s.deadline_of(b) for b in s.unconsumed() if b is not first]
        return first if policy.feasible(s.train_version + 1, rest) else None

    def next_to_enqueue(self) -> Batch:
        """Oldest deadline, then lowest id."""
        return min(self.state.parked_batches(), key=lambda b: (self.state.deadline_of(b), b.id))

    def refresh_needed(self) -> bool:
        """Nothing is outstanding, and still nothing could be admitted."""
        return not self.state.batches


class Greedy(Admission):
    """Produce whenever a worker is free; the check at consumption drops what went stale."""

    def may_admit(self, engine: Engine) -> bool:
        """Never start what would be stale already."""
        return self._lag(engine) <= self.config.max_staleness

    def may_start(self, batch: Batch) -> bool:
        """The same test again, since training may have gone on while the prompts were loaded."""
        return self.may_admit(self.state.engines[batch.engine])

    def candidate(self) -> Batch | None:
        """First in, first out."""
        items = self.state.queue.items()
        return self.state.batches[items[0]] if items else None

    def next_to_enqueue(self) -> Batch:
        """In the order they were finished."""
        return self.state.parked_batches()[0]

    def refresh_needed(self) -> bool:
        """No outstanding batch is fresh enough to be trained on, and no engine is fresh enough to start one."""
        s, bound = self.state, self.config.max_staleness
        fresh_batch = any(s.train_version - s.version_of(b) <= bound for b in s.unconsumed())
        return not fresh_batch and all(self._lag(e) > bound for e in s.engines)


class Lockstep(Admission):
    """Batch i is generated by exactly publication k(i) and consumed as the i-th, whatever the threads do."""

    def _needs(self, batch_id: int) -> int:
        config = self.config
        return policy.lockstep_publication(
            batch_id,
            config.max_staleness,
            config.sync_interval,
            save_points=config.save_points,
            first=config.first_batch,
        )

    def may_admit(self, engine: Engine) -> bool:
        """The publication that the next batch needs is made, or being made."""
        return self._needs(self.state.next_id) <= self.state.consumed

    def may_start(self, batch: Batch) -> bool:
        """The engine serves exactly the publication the batch needs."""
        return self.state.engines[batch.engine].publication == self._needs(batch.id)

    def candidate(self) -> Batch | None:
        """The batch whose turn it is, from the queue or parked."""
        return next((b for b in self.state.finished() if b.id == self.state.consumed), None)

    def next_to_enqueue(self) -> Batch:
        """The lowest id: deadlines are in id order."""
        return min(self.state.parked_batches(), key=lambda b: b.id)

    def refresh_needed(self) -> bool:
        """Never: every publication a batch can need is due at a consumption."""
        return False

    def sync_due(self) -> bool:
        """Every `sync_interval` consumed batches, with or without a step."""
        return self.state.consumed % self.config.sync_interval == 0

    def publication_id(self) -> int:
        """Publications are counted in consumed batches."""
        return self.state.consumed

    def save_due(self) -> bool:
        """Counted in consumed batches too, so that checkpoints come at the same places whatever gives a step."""
        here = self.config.save_points > 0 and self.state.consumed % self.config.save_points == 0
        return here and self.state.train_version > self.state.saved_version

    def gate_closes(self, engine: Engine) -> bool:
        """Only for a load that can start at once: a due sync closes no gate here."""
        return self.target(engine) is not None

    def target(self, engine: Engine) -> int | None:
        """The lowest publication that the engine's unstarted batches need, once nothing generates on it."""
        needs = [self._needs(b.id) for b in self.state.unstarted() if b.engine == engine.index]
        if not engine.up or engine.publication < 0:
            needs.append(self.config.first_batch)
        need = min(needs, default=engine.publication)
        available = need in self.state.publications and not engine.generating
        return need if available and need > engine.publication else None

    def oldest_needed(self) -> int:
        """The lowest publication of the next batch and of the admitted, unstarted ones."""
        ids = [self.state.next_id, *(b.id for b in self.state.unstarted())]
        return min(self._needs(i) for i in ids)


ADMISSION_TYPES: dict[str, type[Admission]] = {"paced": Paced, "greedy": Greedy, "lockstep": Lockstep}
