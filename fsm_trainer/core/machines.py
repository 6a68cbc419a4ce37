"""The state machines as data: states, triggers and edges, and the thin `Machine` built from them.

An edge is `(trigger, source, dest, meaning)` and carries no condition, so `(state, trigger) -> state` is a function
and a logged transition can be validated by lookup. Guards live in `policy.py` and `admission.py`. The same tables
give the reachability test, the diagrams in docs/ and the replayer's validator.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any, NamedTuple

from transitions import Machine

logging.getLogger("transitions").setLevel(logging.WARNING)


class RolloutState(str, Enum):
    """A rollout worker carries one prompt batch at a time from admission to the train queue."""

    IDLE = "idle"
    LOADING = "loading"
    READY = "ready"
    GENERATING = "generating"
    REWARDING = "rewarding"
    QUEUED = "queued"
    STOPPED = "stopped"
    FAILED = "failed"


class TrainerState(str, Enum):
    """The one consumer of the train queue."""

    WAITING = "waiting"
    CHECKING = "checking"
    TRAINING = "training"
    SYNCING = "syncing"
    SAVING = "saving"
    STOPPED = "stopped"
    FAILED = "failed"


class EngineState(str, Enum):
    """One rollout engine's gate: only `open` admits new generations."""

    STARTING = "starting"
    OPEN = "open"
    DRAINING = "draining"
    LOADING = "loading"
    BROKEN = "broken"
    STOPPED = "stopped"


class BatchState(str, Enum):
    """One prompt batch; exactly one of the last four ends it."""

    ADMITTED = "admitted"
    GENERATED = "generated"
    REWARDED = "rewarded"
    QUEUED = "queued"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RunState(str, Enum):
    """The whole run."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


State = RolloutState | TrainerState | EngineState | BatchState | RunState


class Edge(NamedTuple):
    """One allowed transition and what it means."""

    trigger: str
    source: State
    dest: State
    meaning: str


def _each(trigger: str, sources: tuple[State, ...], dest: State, meaning: str) -> tuple[Edge, ...]:
    return tuple(Edge(trigger, source, dest, meaning) for source in sources)


_R, _T, _E, _B, _X = RolloutState, TrainerState, EngineState, BatchState, RunState

ROLLOUT_EDGES: tuple[Edge, ...] = (
    Edge("admit", _R.IDLE, _R.LOADING, "admission gave the worker the next batch id"),
    Edge("loaded", _R.LOADING, _R.READY, "the batch's prompts are there"),
    Edge("exhausted", _R.LOADING, _R.IDLE, "the prompt source has no such batch"),
    Edge("start", _R.READY, _R.GENERATING, "the engine's gate is open at the version the batch needs"),
    Edge("generated", _R.GENERATING, _R.REWARDING, "all samples of the batch are finished"),
    Edge("lost", _R.GENERATING, _R.IDLE, "its engine failed; the batch's prompts go back to their source"),
    Edge("rewarded", _R.REWARDING, _R.QUEUED, "scored and materialised, offered to the train queue"),
    Edge("accepted", _R.QUEUED, _R.IDLE, "the queue, or the trainer itself, took the batch"),
    *_each(
        "stop", (_R.IDLE, _R.LOADING, _R.READY, _R.GENERATING, _R.REWARDING, _R.QUEUED), _R.STOPPED, "the run ended"
    ),
    *_each("fail", (_R.LOADING, _R.GENERATING, _R.REWARDING, _R.QUEUED), _R.FAILED, "its operation failed or was late"),
)

TRAINER_EDGES: tuple[Edge, ...] = (
    Edge("take", _T.WAITING, _T.CHECKING, "a batch was taken for consumption"),
    Edge("train", _T.CHECKING, _T.TRAINING, "the batch is fresh and can give a step"),
    Edge("drop", _T.CHECKING, _T.WAITING, "the batch was dropped, no sync is due"),
    Edge("sync", _T.CHECKING, _T.SYNCING, "a sync is due though no step was taken"),
    Edge("save", _T.CHECKING, _T.SAVING, "no step was taken and a checkpoint is due (lockstep counts batches)"),
    Edge("trained", _T.TRAINING, _T.WAITING, "the step is done, no sync or save is due"),
    Edge("sync", _T.TRAINING, _T.SYNCING, "the step is done and a sync is due"),
    Edge("save", _T.TRAINING, _T.SAVING, "the step is done and a checkpoint is due"),
    Edge("refuse", _T.TRAINING, _T.WAITING, "the loss was not finite: no step, the weights are the last step's"),
    Edge("sync", _T.WAITING, _T.SYNCING, "first publication, or a refresh so that generation can go on"),
    Edge("exported", _T.SYNCING, _T.WAITING, "the snapshot is exported; engines load it on their own"),
    Edge("save", _T.SYNCING, _T.SAVING, "the snapshot is exported and a checkpoint is due"),
    Edge("save", _T.WAITING, _T.SAVING, "the last step is saved at the end of the run"),
    Edge("saved", _T.SAVING, _T.WAITING, "the checkpoint is complete"),
    Edge("stop", _T.WAITING, _T.STOPPED, "the run ended"),
    *_each(
        "fail",
        (_T.WAITING, _T.CHECKING, _T.TRAINING, _T.SYNCING, _T.SAVING),
        _T.FAILED,
        "its operation failed or was late, or a stale batch met the raise policy",
    ),
)

ENGINE_EDGES: tuple[Edge, ...] = (
    Edge("load", _E.STARTING, _E.LOADING, "the engine is up and loads its first snapshot"),
    Edge("drain", _E.OPEN, _E.DRAINING, "a sync is due: no new generation is admitted"),
    Edge("load", _E.DRAINING, _E.LOADING, "its own work has drained and a snapshot is there"),
    Edge("load", _E.OPEN, _E.LOADING, "in-flight sync: what it generates is paused and goes on with the new weights"),
    Edge("reopen", _E.DRAINING, _E.OPEN, "the snapshot is an alias of the weights it serves"),
    Edge("open", _E.LOADING, _E.OPEN, "the announced version is loaded"),
    *_each(
        "restart",
        (_E.OPEN, _E.DRAINING, _E.LOADING, _E.STARTING),
        _E.STARTING,
        "a new one is built: it died, was late or failed a load, and may be restarted",
    ),
    *_each(
        "break",
        (_E.STARTING, _E.OPEN, _E.DRAINING, _E.LOADING),
        _E.BROKEN,
        "died, or its weights are unknown after a failed load",
    ),
    *_each("stop", (_E.STARTING, _E.OPEN, _E.DRAINING, _E.LOADING), _E.STOPPED, "the run ended"),
)

BATCH_EDGES: tuple[Edge, ...] = (
    Edge("generated", _B.ADMITTED, _B.GENERATED, "generation finished"),
    Edge("rewarded", _B.GENERATED, _B.REWARDED, "scored and materialised"),
    Edge("enqueue", _B.REWARDED, _B.QUEUED, "in the train queue"),
    Edge("train", _B.QUEUED, _B.TRAINING, "taken from the queue"),
    Edge("train", _B.REWARDED, _B.TRAINING, "taken from its parked worker"),
    Edge("trained", _B.TRAINING, _B.TRAINED, "it gave an optimiser step"),
    *_each("drop", (_B.REWARDED, _B.QUEUED, _B.TRAINING), _B.DROPPED, "consumed without a step, with a reason"),
    *_each(
        "fail",
        (_B.ADMITTED, _B.GENERATED, _B.REWARDED, _B.QUEUED, _B.TRAINING),
        _B.FAILED,
        "the operation on it failed or was late, or it was stale under the raise policy",
    ),
    *_each(
        "cancel",
        (_B.ADMITTED, _B.GENERATED, _B.REWARDED, _B.QUEUED),
        _B.CANCELLED,
        "the run ended, or the prompt source had no such batch",
    ),
)

RUN_EDGES: tuple[Edge, ...] = (
    Edge("run", _X.STARTING, _X.RUNNING, "engines are up with the first weights"),
    Edge("drain", _X.RUNNING, _X.DRAINING, "done, out of prompts, or asked to stop: admit nothing more"),
    *_each("stop", (_X.STARTING, _X.RUNNING, _X.DRAINING), _X.STOPPING, "start nothing, await what is in flight"),
    Edge("finish", _X.STOPPING, _X.STOPPED, "nothing is in flight"),
    Edge("fail", _X.STOPPING, _X.FAILED, "nothing is in flight and an error was kept"),
)

TABLES: dict[str, tuple[type[Enum], State, tuple[Edge, ...]]] = {
    "rollout": (RolloutState, RolloutState.IDLE, ROLLOUT_EDGES),
    "trainer": (TrainerState, TrainerState.WAITING, TRAINER_EDGES),
    "engine": (EngineState, EngineState.STARTING, ENGINE_EDGES),
    "batch": (BatchState, BatchState.ADMITTED, BATCH_EDGES),
    "run": (RunState, RunState.STARTING, RUN_EDGES),
}
"""Machine name -> (states, initial state, edges)."""

TERMINAL: frozenset[State] = frozenset(
    {
        _R.STOPPED,
        _R.FAILED,
        _T.STOPPED,
        _T.FAILED,
        _E.BROKEN,
        _E.STOPPED,
        _B.TRAINED,
        _B.DROPPED,
        _B.FAILED,
        _B.CANCELLED,
        _X.STOPPED,
        _X.FAILED,
    }
)


class _Table(Machine):
    """A table as a `transitions.Machine`, which is asked once for each edge: no edge has a condition."""

    def __init__(self, **options: Any) -> None:
        """No edge taken yet."""
        self.taken: dict[tuple[State, str], State] = {}
        super().__init__(**options)


def _build(name: str) -> _Table:
    """One `transitions.Machine` serves all machines of a table: the model only carries the state."""
    states, initial, edges = TABLES[name]
    rows: list[dict[str, Any]] = [{"trigger": e.trigger, "source": e.source, "dest": e.dest} for e in edges]
    return _Table(
        model=None,
        states=states,
        initial=initial,
        transitions=rows,
        auto_transitions=False,
        send_event=True,
        queued=False,
    )


_MACHINES: dict[str, _Table] = {name: _build(name) for name in TABLES}


class StateMachine:
    """One running machine: its table, a name for people (`rollout-0`), its state and since when."""

    __slots__ = ("cause", "entity", "since_ns", "state", "table")

    def __init__(self, table: str, entity: str) -> None:
        """Start in the table's initial state."""
        self.table = table
        self.entity = entity
        self.state: State = TABLES[table][1]
        self.since_ns = 0
        self.cause = ""

    @property
    def ended(self) -> bool:
        """Whether it is in a terminal state."""
        return self.state in TERMINAL

    def fire(self, trigger: str, t_ns: int) -> tuple[State, State]:
        """Take the edge of `trigger`; returns (source, dest). Raises transitions.MachineError if there is none."""
        source, table = self.state, _MACHINES[self.table]
        known = table.taken.get((source, trigger))
        if known is None:
            table.events[trigger].trigger(self)
            table.taken[source, trigger] = self.state
        else:
            self.state = known
        self.since_ns = t_ns
        self.cause = ""
        return source, self.state
