"""Everything the scheduler remembers, and what follows directly from it.

Plain mutable data owned by the loop thread. The rules that change it are in `rules.py`, `handlers.py` and
`shutdown.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsm_trainer.core import policy
from fsm_trainer.core.batch_queue import BoundedQueue
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind
from fsm_trainer.core.machines import RolloutState, RunState, StateMachine, TrainerState

NO_VERSION = -1
"""Version of an engine that has loaded nothing yet."""


@dataclass(eq=False)
class Batch:
    """One open prompt batch."""

    id: int
    worker: int
    engine: int
    machine: StateMachine
    version: int | None = None
    """Policy version of its generation; None until that starts."""
    degenerate: bool = False
    tokens: int | None = None


@dataclass(eq=False)
class Worker:
    """One rollout worker, bound to one engine for good."""

    index: int
    engine: int
    machine: StateMachine
    batch: int | None = None


@dataclass(eq=False)
class Engine:
    """One rollout engine: what it serves and what runs on it."""

    index: int
    machine: StateMachine
    up: bool = False
    version: int = NO_VERSION
    publication: int = NO_VERSION
    generating: set[int] = field(default_factory=set)
    """Ids of the batches it is generating now."""
    restarts: int = 0
    """How often it was started anew since it last finished a generation."""
    start_op: int | None = None
    """The operation that started it last."""


@dataclass(eq=False)
class Op:
    """One operation in flight; completions carry `seq` back."""

    seq: int
    kind: CommandKind
    owner: StateMachine | None
    """The machine that waits for it; None for a prefetch."""
    worker: int | None = None
    engine: int | None = None
    batch_id: int | None = None
    version: int | None = None
    publication: int | None = None
    started_ns: int = 0
    deadline_ns: int | None = None
    aborted: bool = False


class State:
    """All machines, the queue, the versions and the operations in flight."""

    def __init__(self, config: SchedulerConfig) -> None:
        """A run that has not begun."""
        self.config = config
        self.run = StateMachine("run", "run")
        self.trainer = StateMachine("trainer", "trainer")
        self.workers = [
            Worker(i, i % config.engines, StateMachine("rollout", f"rollout-{i}")) for i in range(config.workers)
        ]
        self.engines = [Engine(i, StateMachine("engine", f"engine-{i}")) for i in range(config.engines)]
        self.batches: dict[int, Batch] = {}
        """Open batches by id, in id order."""
        self.queue: BoundedQueue[int] = BoundedQueue(config.queue_size)
        self.parked: list[int] = []
        """Finished batches whose worker waits for a free slot, in the order they came."""
        self.training: int | None = None
        """The batch in the trainer's hands."""
        self.train_version = config.first_version
        self.consumed = config.first_batch
        """Batches consumed, those of the runs before this one included."""
        self.saved_version = config.first_version
        self.no_step_run: list[str] = []
        """Reasons of the batches consumed without a step since the last step."""
        self.next_id = config.first_batch
        self.prompts: dict[int, bool] = {}
        """Prompt batches asked for and not yet used: id -> loaded."""
        self.source_end: int | None = None
        """First batch id that the prompt source does not have, once known."""
        self.source_closed = False
        self.trainer_up = False
        self.publications: dict[int, int] = {}
        """Exported publications that may still be loaded: publication -> version."""
        self.newest_publication = NO_VERSION
        self.held: set[int] = set()
        """Versions whose snapshots are exported and not released."""
        self.exporting: int | None = None
        """Publication being exported."""
        self.ops: dict[int, Op] = {}
        self.abandoned: set[int] = set()
        self.stops = 0
        self.drain_reason = ""
        self.outcome: str | None = None
        self.error: str | None = None
        self.stop_deadline_ns: int | None = None
        self.running_since_ns = 0
        self.counts = {"admitted": 0, "trained": 0, "dropped": 0, "failed": 0, "cancelled": 0}

    @property
    def in_training(self) -> int:
        """1 while an optimiser step is in flight, else 0."""
        return int(self.trainer.state is TrainerState.TRAINING)

    @property
    def active(self) -> bool:
        """Whether batches move: running, or draining what was admitted."""
        state = self.run.state
        return state is RunState.RUNNING or state is RunState.DRAINING

    def unconsumed(self) -> list[Batch]:
        """Open batches that the trainer has not taken, in id order."""
        training = self.training
        return [b for b in self.batches.values() if b.id != training]

    def unstarted(self) -> list[Batch]:
        """Admitted batches whose generation has not started, in id order."""
        return [b for b in self.batches.values() if b.version is None]

    def finished(self) -> list[Batch]:
        """Batches ready to be consumed: queued first (oldest first), then parked."""
        return [self.batches[i] for i in (*self.queue.items(), *self.parked)]

    def version_of(self, batch: Batch) -> int:
        """The batch's policy version; until its generation starts, the version its engine serves now."""
        return self.engines[batch.engine].version if batch.version is None else batch.version

    def deadline_of(self, batch: Batch) -> int:
        """Last train_version at which the batch may be consumed."""
        return self.version_of(batch) + self.config.max_staleness

    @property
    def exhausted(self) -> bool:
        """Whether the prompt source is known to have no batch `next_id`."""
        return self.source_end is not None and self.next_id >= self.source_end

    @property
    def max_steps_reached(self) -> bool:
        """Whether the asked number of optimiser steps is taken."""
        return self.config.max_steps is not None and self.train_version >= self.config.max_steps

    def steps_left(self) -> bool:
        """Whether one more batch could still give a step within `max_steps`."""
        return policy.steps_left(self.config.max_steps, self.train_version, self.in_training, len(self.unconsumed()))

    def may_generate_more(self) -> bool:
        """Whether any generation can still start: new weights are worth publishing only then."""
        if self.unstarted():
            return True
        admitting = self.run.state in (RunState.STARTING, RunState.RUNNING)
        return admitting and not self.exhausted and not self.max_steps_reached

    def sync_pending(self) -> bool:
        """Whether a publication is being exported or an engine has yet to load the newest."""
        return self.exporting is not None or any(e.publication != self.newest_publication for e in self.engines)

    def busy(self, machine: StateMachine) -> bool:
        """Whether an operation of this machine is in flight."""
        return any(op.owner is machine for op in self.ops.values())

    def newest_on(self, engine: Engine) -> int:
        """Newest version the engine may serve: a load in flight may be done before its completion is taken in."""
        loading = [op.version for op in self.ops.values() if op.owner is engine.machine and op.version is not None]
        return max([engine.version, *loading])

    def idle_workers(self) -> list[Worker]:
        """Workers that could be admitted, best first: least loaded engine, newest weights, lowest index."""
        load = [0] * len(self.engines)
        for worker in self.workers:
            load[worker.engine] += worker.batch is not None
        idle = [w for w in self.workers if w.machine.state is RolloutState.IDLE]
        return sorted(idle, key=lambda w: (load[w.engine], -self.engines[w.engine].version, w.index))

    def parked_batches(self) -> list[Batch]:
        """Parked batches as objects, in the order they came."""
        return [self.batches[i] for i in self.parked]
