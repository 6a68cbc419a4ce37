"""Who waits for what: the named cause of every wait, wait deadlines, and the sentence a timeout prints."""

from __future__ import annotations

from fsm_trainer.core.config import SECOND_NS
from fsm_trainer.core.machines import EngineState, RolloutState, RunState, StateMachine, TrainerState
from fsm_trainer.core.state import Batch, Engine, State, Worker

_PHASE = {
    RolloutState.LOADING: "prompts",
    RolloutState.READY: "weight_sync",
    RolloutState.GENERATING: "generation",
    RolloutState.REWARDING: "reward",
}
"""What a batch still needs, by its worker's state, as the trainer's cause."""

_ADVANCED_FIRST = (RolloutState.REWARDING, RolloutState.GENERATING, RolloutState.READY, RolloutState.LOADING)


def causes(state: State) -> list[tuple[StateMachine, str]]:
    """The cause of each machine's state, for those states that are waits."""
    found = [(w.machine, _worker_cause(state, w)) for w in state.workers]
    found.append((state.trainer, _trainer_cause(state)))
    found.extend((e.machine, _engine_cause(e)) for e in state.engines)
    return [(machine, cause) for machine, cause in found if cause]


def _worker_cause(state: State, worker: Worker) -> str:
    here = worker.machine.state
    if here is RolloutState.IDLE:
        return _idle_cause(state)
    if here is RolloutState.READY:
        opened = state.engines[worker.engine].machine.state is EngineState.OPEN
        return "policy_version" if opened else "weight_sync"
    return "queue_full" if here is RolloutState.QUEUED else ""


def _idle_cause(state: State) -> str:
    if state.run.state is not RunState.RUNNING:
        return str(state.run.state.value)
    if state.exhausted:
        return "exhausted"
    return "staleness_bound" if state.steps_left() else "max_steps"


def _trainer_cause(state: State) -> str:
    if state.trainer.state is not TrainerState.WAITING:
        return ""
    if state.run.state in (RunState.STARTING, RunState.STOPPING):
        return str(state.run.state.value)
    if state.finished():
        return "older_batch"
    phases = {state.workers[b.worker].machine.state for b in state.unconsumed()}
    for phase in _ADVANCED_FIRST:
        if phase in phases:
            return _PHASE[phase]
    return "weight_sync" if state.sync_pending() else "admission"


def _engine_cause(engine: Engine) -> str:
    if engine.machine.state is EngineState.OPEN:
        return "generating" if engine.generating else "no_batch"
    if engine.machine.state is EngineState.DRAINING:
        return "generating" if engine.generating else "snapshot"
    return ""


def wait_deadlines(state: State) -> list[tuple[StateMachine, int]]:
    """Waits at the train queue and the moment (ns) each becomes a failure."""
    limit = state.config.deadlines.queue_s
    if not limit or not state.active:
        return []
    waiting = [w.machine for w in state.workers if w.machine.state is RolloutState.QUEUED]
    if state.trainer.state is TrainerState.WAITING:
        waiting.append(state.trainer)
    return [(m, waiting_since(state, m) + int(limit * SECOND_NS)) for m in waiting]


def waiting_since(state: State, machine: StateMachine) -> int:
    """When the wait began: the trainer does not count the time before the run was up."""
    return max(machine.since_ns, state.running_since_ns) if machine is state.trainer else machine.since_ns


def next_deadline_ns(state: State) -> int | None:
    """Earliest moment at which something is late, if anything can be."""
    moments = [op.deadline_ns for op in state.ops.values() if op.deadline_ns is not None]
    moments.extend(deadline for _, deadline in wait_deadlines(state))
    if state.stop_deadline_ns is not None:
        moments.append(state.stop_deadline_ns)
    return min(moments, default=None)


def culprit(state: State, machine: StateMachine, now_ns: int) -> str:
    """What the late machine waited for and who did not deliver it."""
    if machine is state.trainer:
        batches = state.unconsumed()
        doing = [_doing(state.workers[b.worker].machine, b, now_ns) for b in batches]
        return f"no batch came into the train queue; {'; '.join(doing) or 'no batch is under way'}"
    since = (now_ns - state.trainer.since_ns) / SECOND_NS
    batch = "" if state.training is None else f" (batch {state.training})"
    return (
        f"no free slot in the train queue ({len(state.queue)} of {state.queue.maxsize} taken); "
        f"trainer is in {state.trainer.state.value}{batch} since {since:.1f} s"
    )


def _doing(machine: StateMachine, batch: Batch, now_ns: int) -> str:
    since = (now_ns - machine.since_ns) / SECOND_NS
    return f"{machine.entity} is in {machine.state.value} (batch {batch.id}) since {since:.1f} s"
