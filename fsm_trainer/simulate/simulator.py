"""`simulate`: one run of a configuration on the virtual clock, from a seed, with every invariant checked on the way.

The loop, the scheduler and the lanes' order are those of a live run; only time and the world are made up.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fsm_trainer.core.config import SECOND_NS, Deadlines, SchedulerConfig
from fsm_trainer.core.events import CommandKind, Record, RecordKind
from fsm_trainer.core.invariants import hold
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.engines.fake_behaviour import Amount, Effect, FakeBehaviour
from fsm_trainer.runtime.clock import VirtualClock
from fsm_trainer.runtime.loop import EventLoop
from fsm_trainer.simulate.checked import CheckedScheduler, input_bound
from fsm_trainer.simulate.durations import Durations
from fsm_trainer.simulate.faults import FaultPlan, Part
from fsm_trainer.simulate.shares import Shares, measure_shares
from fsm_trainer.simulate.sink import MemorySink
from fsm_trainer.simulate.world import VirtualWorld

if TYPE_CHECKING:
    import pandas as pd

MAX_INPUTS = 1_000_000
MAX_PROBLEM = 500
"""Characters of a problem's line."""
NO_DEADLINES = Deadlines(*[0.0] * len(fields(Deadlines)))
"""Nothing is ever late, so a run that stands still shows as `Starved`."""


class SimulationError(RuntimeError):
    """A simulated run broke a rule or could never end: the scheduler is wrong, or the run was told to wait for ever."""

    def __init__(self, cause: Exception, last_records: Sequence[Record]) -> None:
        """Tell `cause` in one line and keep what the scheduler said last."""
        super().__init__(" ".join(f"{type(cause).__name__}: {cause}".split())[:MAX_PROBLEM])
        self.last_records = tuple(last_records)

    @property
    def rule(self) -> str:
        """What broke, without the details of this run."""
        return ":".join(str(self).split(":")[:2])[:100]


class Configured(Protocol):
    """A run's configuration, such as `TrainConfig`."""

    def to_scheduler_config(self) -> SchedulerConfig:
        """The scheduler's share of it."""


@dataclass(frozen=True)
class SimResult:
    """What a simulated run left."""

    config: SchedulerConfig
    seed: int
    outcome: str
    """completed, interrupted or failed."""
    error: str | None
    wall_s: float
    """Virtual seconds from the first to the last event."""
    records: list[Record] = field(repr=False)
    """The event log, up to the row at which it failed if it was told to."""
    inputs: int
    """Inputs the scheduler took."""

    @cached_property
    def digest(self) -> str:
        """Fingerprint of all records: equal digests are equal runs."""
        found = hashlib.sha256()
        for record in self.records:
            found.update("|".join(map(str, (record.kind.value, *record[:2], *record[3:]))).encode() + b"\n")
        return found.hexdigest()

    @cached_property
    def batches(self) -> dict[str, int]:
        """Batches admitted, and those trained, dropped, failed and cancelled."""
        admitted = sum(r.machine == "rollout" and r.trigger == "admit" for r in self.of_kind(RecordKind.TRANSITION))
        states = Counter(r.dest for r in self.of_kind(RecordKind.TRANSITION) if r.machine == "batch")
        ends = ("trained", "dropped", "failed", "cancelled")
        return {"admitted": admitted, **{end: states.get(end, 0) for end in ends}}

    @cached_property
    def steps(self) -> int:
        """Optimiser steps taken."""
        return sum(r.trigger == "step" for r in self.of_kind(RecordKind.VERSION))

    @cached_property
    def drops(self) -> dict[str, int]:
        """Batches consumed without a step, by reason."""
        return dict(sorted(Counter(str(r.reason) for r in self.of_kind(RecordKind.DROP)).items()))

    @cached_property
    def staleness(self) -> dict[int, int]:
        """Trained batches by staleness."""
        ends = [r for r in self.of_kind(RecordKind.TRANSITION) if r.machine == "batch" and r.dest == "trained"]
        return dict(sorted(Counter(r.staleness for r in ends if r.staleness is not None).items()))

    @cached_property
    def shares(self) -> Shares | None:
        """Who worked and who waited for what while the run trained; None if it never did."""
        return measure_shares(self.records)

    def of_kind(self, kind: RecordKind) -> list[Record]:
        """The records of one kind, in order."""
        return [record for record in self.records if record.kind is kind]

    def events(self) -> pd.DataFrame:
        """The event log as a frame, as `fsm_trainer.analysis.load_events` gives a recorded one."""
        import pandas as pd
        import pyarrow as pa

        from fsm_trainer.eventlog.writer import to_batch

        frame: pd.DataFrame = pa.table(to_batch(self.records)).to_pandas(types_mapper=pd.ArrowDtype)
        return frame

    def write(self, directory: str | Path) -> Path:
        """Write the event log into a directory, which `fsm-replay` then reads like a run's; returns the file."""
        from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
        from fsm_trainer.eventlog.writer import write_log

        path = Path(directory, LOG_NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_log(path, self.records, log_metadata(self.config, {"simulated": True, "seed": self.seed}))
        return path


def simulate(
    config: SchedulerConfig | Configured,
    *,
    seed: int = 0,
    durations: Durations | Mapping[CommandKind, Amount] | None = None,
    faults: FaultPlan | Sequence[Part] = (),
    batches: int | None = None,
    max_inputs: int = MAX_INPUTS,
    check: bool = True,
) -> SimResult:
    """Run `config` on the virtual clock; the same arguments give the same records.

    `durations` default to a rollout of 1 s and a step of 0.5 s; random ones follow from `seed`. `batches` is the size
    of the prompt source (None: endless). Raises SimulationError if the scheduler breaks its own rules (`check=False`
    leaves the costly checks out) or the run could never end.
    """
    if not isinstance(config, SchedulerConfig):
        config = config.to_scheduler_config()
    if not isinstance(durations, Durations):
        durations = Durations.of() if durations is None else Durations(durations)
    plan = faults if isinstance(faults, FaultPlan) else FaultPlan(tuple(faults))
    scheduler = CheckedScheduler(config) if check else Scheduler(config)
    try:
        return _run(scheduler, seed, durations, plan, batches, max_inputs)
    except Exception as error:  # a core that breaks may raise anything, and all of it is the finding
        last = scheduler.last_records if isinstance(scheduler, CheckedScheduler) else ()
        raise SimulationError(error, tuple(last)) from error


def _run(
    scheduler: Scheduler, seed: int, durations: Durations, plan: FaultPlan, batches: int | None, max_inputs: int
) -> SimResult:
    config = scheduler.config
    clock, sink = VirtualClock(), MemorySink(fail_at=plan.log_fails_at)
    behaviour = FakeBehaviour(durations.operations, durations.tokens, plan.operations, batches, seed)
    world = VirtualWorld(
        behaviour,
        clock,
        plan=plan,
        before=durations.before,
        after=durations.after,
        max_inputs=max_inputs,
        serial_engines=durations.serial_engines,
        held_up=durations.held_up,
        inflight=config.inflight,
    )
    loop = EventLoop(scheduler, sink, world, world.dispatch, clock)
    outcome = loop.run()
    result = SimResult(config, seed, outcome, loop.error, clock.now_ns() / SECOND_NS, sink.records, loop.inputs)
    if isinstance(scheduler, CheckedScheduler):
        _check_end(result, scheduler, world)
        if plan.harmless and config.deadlines == NO_DEADLINES:
            _check_healed(result, plan, batches)
    return result


def _check_end(result: SimResult, scheduler: Scheduler, world: VirtualWorld) -> None:
    """What is left in the world is only what the scheduler gave up, and the outcome says what happened."""
    given_up = {notice.target for notice in world.notices} | scheduler.state.abandoned
    left = [command for command in world.in_flight() if command.op not in given_up]
    hold(not left, "everything in flight is awaited or given up", left)
    hold((result.outcome == "failed") == (result.error is not None), "a failed run says why", result.error)


def _check_healed(result: SimResult, plan: FaultPlan, batches: int | None) -> None:
    """A run in which nothing fatal happens reaches its end within its bound of inputs."""
    expected = "interrupted" if result.outcome == "interrupted" and plan.stops else "completed"
    hold(result.outcome == expected, "a run without fatal faults completes", (result.outcome, result.error))
    unusable = sum(fault.effect in (Effect.NO_STEP, Effect.DEGENERATE) for fault in plan.operations)
    bound = input_bound(result.config, batches=batches, unusable=unusable, extra=len(plan.parts))
    hold(bound is None or result.inputs <= bound, "inputs per step are bounded", (result.inputs, bound))
    if result.outcome == "completed" and batches is None and not plan.stops:
        wanted = max(0, (result.config.max_steps or 0) - result.config.first_version)
        hold(result.steps == wanted, "all steps are taken", result.steps)
