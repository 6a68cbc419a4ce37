"""What the explorer demands of every step, every state and every end, besides the live invariants and the monitor.

Each check is a second statement of a rule, in other words than the scheduler's own, so that the two can disagree. A
test found by the explorer calls them too.
"""

from __future__ import annotations

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, Record, RecordKind
from fsm_trainer.core.invariants import check_state as check_waits
from fsm_trainer.core.invariants import hold
from fsm_trainer.core.machines import EngineState, RolloutState, RunState, StateMachine, TrainerState
from fsm_trainer.core.policy import lockstep_publication
from fsm_trainer.core.state import Engine, State
from fsm_trainer.simulate.explore_moves import World


def check_step(state: State, records: list[Record], world: World) -> None:
    """What a step may issue; `state` is the one after it."""
    for record in records:
        if record.kind is RecordKind.COMMAND and record.trigger in _STEP_CHECKS:
            _STEP_CHECKS[record.trigger](state, record, world)


def _check_generate(s: State, r: Record, world: World) -> None:
    _check_lockstep_version(s, r, world)
    if s.config.admission == "greedy":
        assert r.train_version is not None
        lag = s.train_version + s.in_training - r.train_version
        hold(lag <= s.config.max_staleness, "greedy never generates with weights that are stale already", r)
    if s.config.max_staleness == 0 and s.config.admission != "greedy":
        alone = [b.id for b in s.unconsumed()] == [r.batch_id] and not s.in_training
        hold(
            alone and r.batch_id == s.consumed + s.counts["failed"],
            "staleness 0 generates after training, batch by batch",
            r,
        )
        hold(r.train_version == s.train_version, "staleness 0 generates with the newest weights", r)


def _publication(s: State, batch_id: int) -> int:
    c = s.config
    return lockstep_publication(
        batch_id, c.max_staleness, c.sync_interval, save_points=c.save_points, first=c.first_batch
    )


def _check_lockstep_version(s: State, r: Record, world: World) -> None:
    if s.config.admission == "lockstep":
        assert r.batch_id is not None
        k = _publication(s, r.batch_id)
        steps = s.config.first_version + sum(world.gives_step(i) for i in range(s.config.first_batch, k))
        hold(r.train_version == steps, f"lockstep generates with the weights after {k} consumed batches", r)


def _check_train(s: State, r: Record, world: World) -> None:
    in_order = s.config.admission == "lockstep" or s.config.workers == 1
    # Lockstep loses none; otherwise the failure of an engine may have taken some out of the order.
    first = s.consumed if s.config.admission == "lockstep" else min(s.batches)
    hold(not in_order or r.batch_id == first, "batches are trained in the order of their ids", r)
    assert r.batch_id is not None
    hold(r.batch_id not in world.degenerate, "a degenerate batch is never trained on", r)


def _check_export(s: State, r: Record, world: World) -> None:
    """Nothing is published for nobody; refresh comes in only where the interval alone could not feed generation."""
    hold(s.config.admission == "lockstep" or s.may_generate_more(), "no publication that nobody can need", r)
    if s.newest_publication >= 0 and s.exporting is not None:
        before = s.newest_publication
        if s.config.admission == "lockstep":
            before -= before % s.config.sync_interval  # a resumed run may begin between two of them
        since = s.exporting - before
        least = s.config.sync_interval if s.config.max_staleness >= s.config.sync_interval - 1 else 1
        hold(since >= least, "no publication before its interval", (since, r))


def _check_load(s: State, r: Record, world: World) -> None:
    if s.config.admission != "lockstep":
        newest = s.publications[s.newest_publication]
        hold(r.train_version == newest and s.exporting is None, "an engine loads the newest, and waits for it", r)


def _check_save(s: State, r: Record, world: World) -> None:
    if s.config.admission == "lockstep" and s.run.state is RunState.RUNNING:
        hold(s.consumed % s.config.save_points == 0, "lockstep saves only at save points until the end", s.consumed)


_STEP_CHECKS = {
    CommandKind.GENERATE.value: _check_generate,
    CommandKind.TRAIN.value: _check_train,
    CommandKind.EXPORT.value: _check_export,
    CommandKind.LOAD_WEIGHTS.value: _check_load,
    CommandKind.SAVE.value: _check_save,
}


def check_state(state: State) -> None:
    """Nobody waits while what it waits for is there; what is promised stays possible."""
    if state.run.ended:
        return
    hold(bool(state.ops), "no deadlock: something is in flight until the run has ended", state.run.state)
    if state.run.state is RunState.STOPPING:
        _check_stopping(state)
    if state.active:
        check_waits(state)
        _check_trainer(state)
        for engine in state.engines:
            _check_engine(state, engine)
    _check_bounds(state)


def _check_stopping(s: State) -> None:
    machines: list[StateMachine] = [s.trainer, *(w.machine for w in s.workers)]
    idle = [m.entity for m in machines if not m.ended and not s.busy(m)]
    hold(not idle, "a stopping run keeps nothing that has nothing to do", idle)
    ended = [op for op in s.ops.values() if op.owner is not None and op.owner.ended]
    hold(not ended, "nothing is stopped while it is at work", ended)


def _deadlines(s: State) -> list[int]:
    served = {e.index: e.version for e in s.engines}
    return [(served[b.engine] if b.version is None else b.version) + s.config.max_staleness for b in s.unconsumed()]


def _schedulable(s: State, deadlines: list[int], taken: int = 0) -> bool:
    """Hall's condition: up to any deadline there are as many steps as batches that must be consumed by it."""
    first = s.train_version + s.in_training + taken
    return all(sum(d <= due for d in deadlines) <= due - first + 1 for due in deadlines)


def _check_trainer(s: State) -> None:
    if s.config.admission == "paced":
        hold(_schedulable(s, _deadlines(s)), "every unconsumed batch can still be trained in time", s.train_version)
    if s.trainer.state is not TrainerState.WAITING:
        return
    _check_saved(s)
    if s.may_generate_more() and s.newest_publication >= 0 and s.config.admission != "lockstep":
        behind = s.train_version - s.newest_publication
        hold(behind < s.config.sync_interval, "a due sync is begun at once", behind)
    if s.config.admission == "paced" and s.finished():
        due = min(s.deadline_of(b) for b in s.finished())
        rest = _deadlines(s)
        rest.remove(due)
        hold(not _schedulable(s, rest, taken=1), "the trainer waits only for a batch that must go first", s.finished())


def _check_saved(s: State) -> None:
    """A due checkpoint is made before anything else is consumed."""
    behind, points = s.train_version - s.saved_version, s.config.save_points
    if s.config.admission == "lockstep":
        hold(not (points and behind and s.consumed % points == 0), "lockstep saves at each save point", s.consumed)
    else:
        hold(not points or behind < s.config.save_interval, "a due checkpoint is made at once", behind)


def _check_engine(s: State, engine: Engine) -> None:
    """Lockstep: a due sync closes no gate, and an engine with nothing running loads what its batches need."""
    if s.config.admission != "lockstep" or not s.may_generate_more():
        return
    hold(engine.machine.state is not EngineState.DRAINING, "a due sync closes no gate in lockstep", engine)
    if engine.machine.state is EngineState.OPEN and not engine.generating:
        ids = [b.id for b in s.unstarted() if b.engine == engine.index]
        needs = [_publication(s, i) for i in ids]
        need = min(needs, default=engine.publication)
        hold(need <= engine.publication or need not in s.publications, "an idle engine loads what is needed", engine)


def _check_bounds(s: State) -> None:
    idle = [w for w in s.workers if w.machine.state is RolloutState.IDLE and w.batch is not None]
    hold(not idle, "an idle worker holds no batch", idle)
    queued = sorted(w.batch for w in s.workers if w.machine.state is RolloutState.QUEUED and w.batch is not None)
    hold(queued == sorted(s.parked), "a worker is queued exactly while its batch is parked", (queued, s.parked))
    hold((s.training is not None) == bool(s.in_training), "a batch is in training as long as the trainer", s.training)
    kept = s.config.max_staleness // s.config.sync_interval + 1 if s.config.admission == "lockstep" else 1
    hold(len(s.held) <= kept + len(s.engines), "few snapshots are kept", s.held)
    read = {op.version for op in s.ops.values() if op.kind is CommandKind.LOAD_WEIGHTS} | {*s.publications.values()}
    hold(read <= s.held, "no snapshot is released that is loaded or may be", (read, s.held))
    if s.config.max_steps is not None:
        needed = s.train_version + s.in_training + len(s.unconsumed())
        hold(needed <= s.config.max_steps, "no batch is admitted that max_steps would throw away", needed)
    ahead = sum(i >= s.next_id for i in s.prompts)
    hold(ahead <= s.config.prefetch, "no more prompts are loaded ahead than asked", s.prompts)


def check_end(state: State, world: World, *, faulted: bool, lost: int = 0) -> None:
    """What an ended run owes: everything trained, saved and accounted for, as far as nobody interfered.

    Of an undisturbed one too, at most `lost` batches may have gone with engines that failed and were started anew.
    """
    s, counts = state, state.counts
    hold(not s.parked, "nothing is parked at the end", s.parked)
    without_step = sum(not world.gives_step(i) for i in range(s.config.first_batch, s.next_id))
    overtaken = counts["trained"] * (s.config.workers + s.config.queue_size) if s.config.admission == "greedy" else 0
    hold(counts["dropped"] <= without_step + overtaken, "a step makes stale at most what was outstanding", counts)
    if faulted:
        hold(s.outcome in ("failed", "interrupted", "completed"), "a disturbed run has an outcome", s.outcome)
        return
    if s.error is not None:
        hold(
            len(s.no_step_run) >= s.config.max_no_step_batches or not s.config.drop_stale, "no error by itself", s.error
        )
        return
    if s.stops < 2:
        hold(counts["failed"] <= lost, "nothing fails by itself", counts)
        hold(s.saved_version == s.train_version or not s.config.save_last, "the last step is saved", s.saved_version)
        hold(counts["cancelled"] == 0 or world.prompts is not None, "what is admitted is consumed", counts)
    if s.stops == 0:
        all_steps = s.config.max_steps is not None and s.train_version == s.config.max_steps
        all_prompts = world.prompts is not None and s.consumed + counts["failed"] == world.prompts
        hold(s.outcome == "completed" and (all_steps or all_prompts), "an undisturbed run completes", s.outcome)


def event_bound(config: SchedulerConfig, admitted: int, disturbances: int) -> int:
    """Events that a run which admits so many batches may take: linear in the batches, whatever the order.

    Begin and starts, four operations a batch, at most one publication and one save a batch and one more of each, one
    load a publication and engine, and the prompt batches asked for in vain.
    """
    publications = admitted + 1
    starts, in_vain = 2 + config.engines, config.prefetch + config.workers
    return starts + 4 * admitted + publications * (1 + config.engines) + admitted + 1 + in_vain + disturbances


def check_longest(config: SchedulerConfig, longest: int, admitted: int, disturbances: int) -> None:
    """The longest of all schedules is within the bound."""
    bound = event_bound(config, admitted, disturbances)
    hold(longest <= bound, "the number of events is bounded", (longest, bound))


def ending_bound(state: State, disturbances: int) -> int | None:
    """Events that a draining or stopping run may still take; None while it goes on."""
    if state.run.state is RunState.STOPPING:
        return len(state.ops) + 1 + disturbances  # what is in flight, and the last save
    if state.run.state is RunState.DRAINING:
        per_batch = 4 + 1 + len(state.engines) + 1
        return len(state.ops) + per_batch * len(state.batches) + 1 + disturbances
    return None
