"""A run's state as bytes and back: what decisions depend on, without times, sequence numbers and names of workers.

`freeze` and `thaw` are what makes exhaustive search possible: two schedules whose states freeze to the same bytes have
the same future, so only one of them needs to be followed. What is left out, and why that is sound:

- sequence numbers: an operation is named by what it is about, which is unique among those in flight;
- which operation started an engine: it only tells the death of an earlier one, which is ignored (`explore.strays`);
- times: the search keeps its clock at 0 and lets any operation be late at any moment, a superset of all timings;
- the worker's number: workers of one engine are alike, so only what each of them does is kept. Numbers break ties
  between engines only, and with at most 3 workers on 2 engines a tie means that all are idle (`supported`);
- texts for people, and what only they use (causes of waits, tokens, the reasons of batches without a step).

`thaw` rebuilds a scheduler from the bytes alone, so nothing that matters can hide outside of them. An attribute that
this module does not know makes `check_shape` fail.
"""

from __future__ import annotations

import marshal
from dataclasses import fields
from typing import Any

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind
from fsm_trainer.core.machines import TABLES, StateMachine
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.core.state import Batch, Engine, Op, State, Worker

_MEMBERS: list[Any] = [member for states, _, _ in TABLES.values() for member in states]
_CODE: dict[int, int] = {id(member): code for code, member in enumerate(_MEMBERS)}
_KINDS: list[CommandKind] = list(CommandKind)
_KIND_CODE: dict[int, int] = {id(kind): code for code, kind in enumerate(_KINDS)}
_OUTCOMES: list[str | None] = [None, "completed", "interrupted", "failed"]
_COUNTS = ("admitted", "trained", "dropped", "failed", "cancelled")
_NONE = -9
"""Stands for None among small integers."""

_SCALARS = (
    "train_version",
    "consumed",
    "saved_version",
    "next_id",
    "source_closed",
    "trainer_up",
    "newest_publication",
)
_OPTIONAL = ("training", "source_end", "exporting")
_STATE = {
    *_SCALARS,
    *_OPTIONAL,
    *("config", "run", "trainer", "workers", "engines", "batches", "queue", "parked", "no_step_run", "prompts"),
    *("publications", "held", "ops", "stops", "outcome", "error", "stop_deadline_ns", "counts"),
}
_LEFT_OUT = {"abandoned", "drain_reason", "running_since_ns"}
"""`abandoned` only tells a late completion from an unknown one in the log; both are ignored."""
_SHAPE: dict[type, set[str]] = {
    Batch: {"id", "worker", "engine", "machine", "version", "degenerate", "tokens"},
    Worker: {"index", "engine", "machine", "batch"},
    Engine: {"index", "machine", "up", "version", "publication", "generating", "restarts", "start_op"},
    Op: {
        *("seq", "kind", "owner", "worker", "engine", "batch_id", "version", "publication"),
        *("started_ns", "deadline_ns", "aborted"),
    },
}


def check_shape() -> None:
    """Refuse to search when the scheduler remembers something that this module does not know."""
    known = _STATE | _LEFT_OUT
    held = set(vars(State(SchedulerConfig())))
    assert held == known, f"explore_state does not know {held ^ known}"
    for kind, names in _SHAPE.items():
        held = {f.name for f in fields(kind)}
        assert held == names, f"explore_state does not know {held ^ names} of {kind.__name__}"


def supported(config: SchedulerConfig) -> bool:
    """Whether leaving out the numbers of workers is exact: ties between engines are broken by them."""
    return config.engines in (1, config.workers) or (config.workers <= 3 and config.engines <= 2)


def freeze(scheduler: Scheduler) -> bytes:
    """The canonical bytes of a scheduler between two steps."""
    s = scheduler.state
    batches = [(b.id, b.engine, _opt(b.version), b.degenerate, _CODE[id(b.machine.state)]) for b in s.batches.values()]
    workers = sorted((w.engine, _CODE[id(w.machine.state)], _opt(w.batch)) for w in s.workers)
    engines = [
        (_CODE[id(e.machine.state)], e.up, e.version, e.publication, tuple(sorted(e.generating)), e.restarts)
        for e in s.engines
    ]
    ops = sorted(
        (_KIND_CODE[id(o.kind)], _opt(o.engine), _opt(o.batch_id), _opt(o.version), _opt(o.publication), o.aborted)
        for o in s.ops.values()
    )
    key = (
        _CODE[id(s.run.state)],
        _CODE[id(s.trainer.state)],
        workers,
        engines,
        batches,
        list(s.queue.items()),
        s.queue.closed,
        s.parked,
        sorted(s.prompts.items()),
        sorted(s.publications.items()),
        sorted(s.held),
        len(s.no_step_run),
        ops,
        min(s.stops, 2),
        _OUTCOMES.index(s.outcome),
        s.error is not None,
        s.stop_deadline_ns is not None,
        [s.counts[name] for name in _COUNTS],
        [getattr(s, name) for name in _SCALARS],
        [_opt(getattr(s, name)) for name in _OPTIONAL],
    )
    return marshal.dumps(key, 2)  # version 2: no references, so equal values give equal bytes


def thaw(config: SchedulerConfig, frozen: bytes) -> Scheduler:
    """A scheduler in the frozen state; its operations are numbered from 0 in canonical order."""
    scheduler = Scheduler(config)
    s = scheduler.state
    (run, trainer, workers, engines, batches, queued, closed, parked, prompts, publications, held) = (
        key := marshal.loads(frozen)
    )[:11]
    (no_steps, ops, stops, outcome, error, stopping, counts, scalars, optional) = key[11:]
    s.run.state, s.trainer.state = _MEMBERS[run], _MEMBERS[trainer]
    holder = _thaw_workers(s, workers)
    for engine, (state, up, version, publication, generating, restarts) in zip(s.engines, engines, strict=True):
        engine.machine.state, engine.up = _MEMBERS[state], up
        engine.version, engine.publication, engine.generating = version, publication, set(generating)
        engine.restarts = restarts
    for batch_id, on, version, degenerate, state in batches:
        machine = StateMachine("batch", f"batch-{batch_id}")
        machine.state = _MEMBERS[state]
        worker = holder.get(batch_id, on)
        s.batches[batch_id] = Batch(batch_id, worker, on, machine, _back(version), degenerate, 10)
    for item in queued:
        s.queue.offer(item)
    if closed:
        s.queue.close()
    s.parked, s.prompts, s.publications, s.held = parked, dict(prompts), dict(publications), set(held)
    s.no_step_run = ["no_step"] * no_steps
    _thaw_ops(s, ops, holder)
    s.stops, s.outcome, s.error = stops, _OUTCOMES[outcome], "an earlier error" if error else None
    s.stop_deadline_ns = 1 if stopping else None
    s.counts = dict(zip(_COUNTS, counts, strict=True))
    for name, value in zip(_SCALARS, scalars, strict=True):
        setattr(s, name, value)
    for name, value in zip(_OPTIONAL, optional, strict=True):
        setattr(s, name, _back(value))
    scheduler._recorder.seq = len(ops)
    return scheduler


def _thaw_workers(s: State, frozen: list[tuple[int, int, int]]) -> dict[int, int]:
    """Give the workers of each engine their states in canonical order; returns which worker holds which batch."""
    engines = len(s.engines)
    index = list(range(engines))
    holder = {}
    for on, state, batch in frozen:
        worker = s.workers[index[on]]
        index[on] += engines
        worker.machine.state, worker.batch = _MEMBERS[state], _back(batch)
        holder[batch] = worker.index
    return holder


def _thaw_ops(s: State, frozen: list[tuple[int, int, int, int, int, bool]], holder: dict[int, int]) -> None:
    for seq, (code, on, batch_id, version, publication, aborted) in enumerate(frozen):
        kind = _KINDS[code]
        worker, owner = None, None
        if kind in (CommandKind.GENERATE, CommandKind.REWARD):
            worker = holder[batch_id]
            owner = s.workers[worker].machine
        elif kind in (CommandKind.START_ENGINE, CommandKind.LOAD_WEIGHTS):
            owner = s.engines[on].machine
        elif kind is not CommandKind.LOAD_PROMPTS:
            owner = s.trainer
        s.ops[seq] = Op(
            seq, kind, owner, worker, _back(on), _back(batch_id), _back(version), _back(publication), 0, 1, aborted
        )


def _opt(value: int | None) -> int:
    return _NONE if value is None else value


def _back(value: int) -> int | None:
    return None if value == _NONE else value
