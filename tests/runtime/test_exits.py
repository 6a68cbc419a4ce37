"""Each way a run can end, with the real scheduler, real threads or virtual time, and no model.

The fixture `nothing_left` (conftest) counts threads and processes after every one of them.
"""

import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from fsm_trainer.core.config import Deadlines, SchedulerConfig
from fsm_trainer.core.events import NOTICES, Command, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.engines.base import Loaded, RolloutRequest, Snapshot
from fsm_trainer.runtime.host import ProcessHost
from fsm_trainer.runtime.inbox import ThreadInbox
from fsm_trainer.runtime.lanes import Lanes, Operations
from fsm_trainer.runtime.loop import EventLoop
from fsm_trainer.runtime.signals import stop_signals
from fsm_trainer.testing import Effect, FakeBehaviour, FakeOperations, FakeRolloutEngine, Fault, MemorySink, VirtualRun
from tests.clocks import JumpingClock

C, K, R = CommandKind, InputKind, RecordKind
TERMINAL = {"trained", "dropped", "failed", "cancelled"}


class Live:
    """One run with real threads."""

    def __init__(self, config: SchedulerConfig, operations: Callable[["Live"], Operations], **sink: Any) -> None:
        self.clock = JumpingClock()
        self.inbox = ThreadInbox(self.clock)
        self.sink = MemorySink(**sink)
        self.operations = operations(self)
        self.lanes = Lanes(self.operations, self.inbox.put, self.clock)
        self.dispatched: list[Command] = []
        self.scheduler = Scheduler(config)
        self.loop = EventLoop(self.scheduler, self.sink, self.inbox, self.dispatch, self.clock, [self])
        self.react: Callable[[Sequence[Record]], None] = lambda _: None

    def dispatch(self, command: Command) -> None:
        assert self.loop.log_failure is not None or self.sink.records[command.op].kind is R.COMMAND
        self.dispatched.append(command)
        self.lanes.dispatch(command)

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        self.react(records)
        return ()

    def run(self) -> str:
        with stop_signals(self.inbox.put):
            outcome = self.loop.run()
        assert self.lanes.close(30) == []
        return outcome

    @property
    def end(self) -> Record:
        return self.sink.records[-1]


def fake(behaviour: FakeBehaviour) -> Callable[[Live], Operations]:
    return lambda live: FakeOperations(behaviour, post=live.inbox.put)


def is_step(version: int) -> Callable[[Record], bool]:
    return lambda r: r.kind is R.VERSION and r.trigger == "step" and r.train_version == version


def check_accounts(records: list[Record]) -> None:
    """The log is whole, and every batch that was admitted has come to exactly one end."""
    assert [record.seq for record in records] == list(range(len(records)))
    assert [record.t_ns for record in records] == sorted(record.t_ns for record in records)
    assert [record.kind for record in records].count(R.RUN_END) == 1
    assert records[-1].kind is R.RUN_END
    moves = [record for record in records if record.kind is R.TRANSITION]
    admitted = [record.batch_id for record in moves if record.machine == "rollout" and record.trigger == "admit"]
    ends = [record.batch_id for record in moves if record.machine == "batch" and record.dest in TERMINAL]
    assert sorted(ends) == sorted(admitted)  # type: ignore[type-var]
    issued = {r.seq for r in records if r.kind is R.COMMAND and C(r.trigger) not in NOTICES}
    completed = [r.cause_seq for r in records if r.kind is R.INPUT and r.cause_seq is not None]
    assert len(completed) == len(set(completed))
    assert set(completed) <= issued


CONFIGS = [
    SchedulerConfig(max_steps=12, admission=admission, workers=workers, engines=engines, max_staleness=2)
    for admission in ("paced", "greedy", "lockstep")
    for workers, engines in ((1, 1), (2, 2), (3, 2))
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.admission}-{c.workers}-{c.engines}")
def test_max_steps(config: SchedulerConfig) -> None:
    live = Live(config, fake(FakeBehaviour()))
    assert live.run() == "completed"
    assert (live.end.reason, live.end.message, live.end.train_version) == ("completed", "max_steps reached", 12)
    assert [c.version for c in live.dispatched if c.kind is C.SAVE] == [12]
    check_accounts(live.sink.records)


def test_the_log_is_flushed_and_synced_where_it_must_be() -> None:
    live = Live(SchedulerConfig(max_steps=3), fake(FakeBehaviour()))
    live.run()
    records = live.sink.records
    safe = sorted(live.sink.flushes + live.sink.syncs)
    for train in (r.seq for r in records if r.kind is R.COMMAND and r.trigger == "train"):
        assert any(train < count <= train + 20 for count in safe)
    assert live.sink.syncs[-1] == len(records)


def test_prompts_exhausted() -> None:
    live = Live(SchedulerConfig(workers=2, max_staleness=2), fake(FakeBehaviour(batches=7)))
    assert live.run() == "completed"
    assert (live.end.message, live.end.train_version) == ("prompts exhausted", 7)
    check_accounts(live.sink.records)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_stop_finishes_what_is_in_flight_and_saves(number: signal.Signals) -> None:
    live = Live(SchedulerConfig(workers=2, max_staleness=2), fake(FakeBehaviour()))
    live.react = lambda records: signal.raise_signal(number) if any(map(is_step(3), records)) else None
    assert live.run() == "interrupted"
    check_accounts(live.sink.records)
    stop = next(r.seq for r in live.sink.records if r.trigger == "stop" and r.kind is R.INPUT)
    assert not [r for r in live.sink.records[stop:] if r.trigger == "admit"], "nothing new is admitted"
    ends = [r.dest for r in live.sink.records if r.machine == "batch" and r.dest in TERMINAL]
    assert set(ends) == {"trained"}, "what was admitted is trained"
    assert live.dispatched[-1].kind in (C.SAVE, C.RELEASE_SNAPSHOT)
    assert [c.version for c in live.dispatched if c.kind is C.SAVE] == [live.end.train_version]


def test_a_second_stop_ends_at_once_even_a_hanging_generation() -> None:
    hang = Fault(C.GENERATE, Effect.HANG, batch_id=4)
    live = Live(SchedulerConfig(workers=2, max_staleness=2), fake(FakeBehaviour(faults=[hang])))

    def react(records: Sequence[Record]) -> None:
        if any((r.kind, r.trigger, r.batch_id) == (R.COMMAND, C.GENERATE, 4) for r in records):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    live.react = react
    assert live.run() == "interrupted"
    check_accounts(live.sink.records)
    assert C.ABORT in [c.kind for c in live.dispatched]


@pytest.mark.parametrize("kind", [kind for kind in C if kind not in NOTICES])
@pytest.mark.parametrize("nth", [1, 3])
def test_an_operation_that_raises_fails_the_run_and_is_named(kind: CommandKind, nth: int) -> None:
    if nth > 1 and kind in (C.START_TRAINER, C.START_ENGINE):
        nth = 1
    config = SchedulerConfig(max_steps=8, workers=2, engines=1, max_staleness=2, save_interval=2)
    live = Live(config, fake(FakeBehaviour(faults=[Fault(kind, Effect.RAISE, nth=nth, message="the disk is on fire")])))
    assert live.run() == "failed"
    assert live.end.reason == "failed"
    assert f"{kind.value}" in (live.end.message or "")
    assert "RuntimeError: the disk is on fire" in (live.end.message or "")
    assert live.loop.error == live.end.message
    check_accounts(live.sink.records)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(C.TRAIN, Effect.NAN, nth=3), "FloatingPointError"),
        (Fault(C.TRAIN, Effect.WRONG_VERSION, nth=3), "reports 4 optimiser steps after batch 2, expected 3"),
        (Fault(C.LOAD_WEIGHTS, Effect.WRONG_VERSION, version=2), "reports version 3 after loading version 2"),
        (Fault(C.GENERATE, Effect.WRONG_VERSION, batch_id=2), "for batch 2"),
        (Fault(C.GENERATE, Effect.DIE, batch_id=2), "engine-0 died"),
        (Fault(C.LOAD_WEIGHTS, Effect.DIE, version=2), "engine-0 died"),
    ],
)
def test_a_fault_fails_the_run_and_is_named(fault: Fault, message: str) -> None:
    """In lockstep, where the engine loads every version."""
    live = Live(SchedulerConfig(max_steps=8, admission="lockstep"), fake(FakeBehaviour(faults=[fault])))
    assert live.run() == "failed"
    assert message in (live.end.message or "")
    check_accounts(live.sink.records)


def test_batches_without_a_step_are_no_failure() -> None:
    faults = [Fault(C.TRAIN, Effect.NO_STEP, batch_id=2), Fault(C.REWARD, Effect.DEGENERATE, batch_id=5)]
    live = Live(SchedulerConfig(max_steps=8), fake(FakeBehaviour(faults=faults)))
    assert live.run() == "completed"
    drops = {r.batch_id: r.reason for r in live.sink.records if r.kind is R.DROP}
    assert drops == {2: "no_step", 5: "degenerate"}
    assert live.end.train_version == 8


LIMITS = Deadlines(*[float(seconds) for seconds in (11, 12, 13, 14, 15, 16, 17)], queue_s=1000)


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [(C.START_TRAINER, 11), (C.START_ENGINE, 11), (C.LOAD_PROMPTS, 12), (C.GENERATE, 13), (C.REWARD, 14), (C.TRAIN, 15)]
    + [(C.EXPORT, 16), (C.LOAD_WEIGHTS, 16), (C.SAVE, 17)],
)
def test_an_operation_that_hangs_past_its_deadline_fails_the_run(kind: CommandKind, seconds: int) -> None:
    durations = {C.GENERATE: 1.0, C.TRAIN: 0.5}
    nth = 1 if kind in (C.START_TRAINER, C.START_ENGINE) else 2
    config = SchedulerConfig(max_steps=8, save_interval=2, deadlines=LIMITS)
    run = VirtualRun(config, FakeBehaviour(durations, faults=[Fault(kind, Effect.HANG, nth=nth)]))
    result = run.run()
    assert result.outcome == "failed"
    assert f"{kind.value}" in (result.error or "")
    assert f"took longer than {seconds} s" in (result.error or "")
    assert result.records[-1].message == result.error
    check_accounts(result.records)


def test_a_hang_that_ignores_its_abort_does_not_keep_the_run() -> None:
    release = threading.Event()

    class Deaf(FakeOperations):
        def execute(self, command: Command) -> Input:
            if command.kind is C.GENERATE and command.batch_id == 2:
                live.clock.jump(101, live.inbox.put)
                release.wait()
            return super().execute(command)

    config = SchedulerConfig(max_steps=8, deadlines=Deadlines(generate_s=100))
    live = Live(config, lambda _: Deaf(FakeBehaviour()))
    assert live.loop.run() == "failed"
    assert "generate of batch 2 took longer than 100 s" in (live.end.message or "")
    assert "rollout-0" in live.lanes.stuck(), "others may not have put down yet what they have told"
    check_accounts(live.sink.records)
    release.set()
    assert live.lanes.close(30) == []


class Hosted(FakeOperations):
    """A rollout engine in a process of its own; everything else as in FakeOperations."""

    def __init__(self, behaviour: FakeBehaviour, post: Callable[[Input], None]) -> None:
        super().__init__(FakeBehaviour(), post=post)
        self.hosts: list[ProcessHost] = []
        self._engine = partial(FakeRolloutEngine, behaviour)
        self._tell = post

    def execute(self, command: Command) -> Input:
        if command.kind is C.START_ENGINE:
            self.hosts.append(ProcessHost(self._engine, "engine-0"))
            self.hosts[0].on_death(lambda death: self._tell(Input(K.ENGINE_DIED, engine=0, message=str(death))))
            self.hosts[0].submit("start").result()
        elif command.kind is C.LOAD_WEIGHTS:
            assert command.version is not None
            loaded: Loaded = self.hosts[0].submit("load_weights", Snapshot(command.version, "", 0)).result()
            return Input(K.WEIGHTS_LOADED, rollout_version_last=loaded.version)
        elif command.kind is C.GENERATE:
            return self._generate(command)
        return super().execute(command)

    def _generate(self, command: Command) -> Input:
        assert command.batch_id is not None
        future = self.hosts[0].submit("generate", RolloutRequest(command.batch_id, ((1, 2),), command.batch_id))
        if command.batch_id == 2:
            self.strike()
        rollout = future.result()
        return Input(
            K.GENERATED, rollout_version_first=rollout.version_first, rollout_version_last=rollout.version_last
        )

    def strike(self) -> None:
        """What befalls the engine while it generates batch 2."""


def test_an_engine_in_its_own_process_serves_a_whole_run() -> None:
    live = Live(SchedulerConfig(max_steps=6), lambda live: Hosted(FakeBehaviour(), live.inbox.put))
    assert live.run() == "completed"
    live.operations.hosts[0].close(30)  # type: ignore[attr-defined]
    check_accounts(live.sink.records)


def test_an_engine_process_killed_by_kill_9_fails_the_run_and_is_named() -> None:
    class Killed(Hosted):
        def strike(self) -> None:
            os.kill(self.hosts[0].pid, signal.SIGKILL)

    hang = FakeBehaviour(faults=[Fault(C.GENERATE, Effect.HANG, batch_id=2)])
    live = Live(SchedulerConfig(max_steps=6), lambda live: Killed(hang, live.inbox.put))
    assert live.run() == "failed"
    pid = live.operations.hosts[0].pid  # type: ignore[attr-defined]
    # Its gate may have been closed by then for the next sync.
    told = rf"engine-0 died in state (open|draining): engine process engine-0 \(pid {pid}\) was killed by SIGKILL"
    assert re.fullmatch(told, live.end.message or "")
    check_accounts(live.sink.records)


def test_an_engine_process_that_exits_fails_the_run_and_is_named() -> None:
    die = FakeBehaviour(faults=[Fault(C.GENERATE, Effect.DIE, batch_id=3)])
    live = Live(SchedulerConfig(max_steps=6), lambda live: Hosted(die, live.inbox.put))
    assert live.run() == "failed"
    assert "exited with code 13" in (live.end.message or "")
    check_accounts(live.sink.records)


def test_a_log_that_fails_fails_the_run_and_nothing_unlogged_happens() -> None:
    live = Live(SchedulerConfig(max_steps=12, workers=2, max_staleness=2), fake(FakeBehaviour()), fail_at=150)
    assert live.run() == "failed"
    assert "the event log cannot be written: no space left for row 150" in (live.loop.error or "")
    assert len(live.sink.records) == 150
    work = [command for command in live.dispatched if command.kind not in NOTICES]
    assert max(command.op for command in work) < 150


@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
def test_a_log_may_fail_at_any_row(admission: str) -> None:
    config = SchedulerConfig(max_steps=4, workers=2, engines=2, admission=admission, max_staleness=2, save_interval=2)
    behaviour = FakeBehaviour({C.GENERATE: 1.0, C.TRAIN: 0.5, C.REWARD: 0.1, C.LOAD_WEIGHTS: 0.1})
    whole = VirtualRun(config, behaviour).run()
    for row in range(len(whole.records)):
        sink = MemorySink(fail_at=row)
        run = VirtualRun(config, behaviour, sink=sink)
        assert run.run().outcome == "failed"
        assert run.world.in_flight() == []
        assert sink.records == whole.records[:row]


@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
def test_a_stop_or_a_failure_may_come_at_any_moment(admission: str) -> None:
    config = SchedulerConfig(max_steps=5, workers=2, engines=2, admission=admission, max_staleness=2, save_interval=2)
    behaviour = FakeBehaviour({C.GENERATE: 1.0, C.TRAIN: 0.5, C.REWARD: 0.1, C.LOAD_WEIGHTS: 0.1, C.START_ENGINE: 0.3})
    stop, error = Input(K.STOP, reason="user"), Input(K.FAILED, reason="OSError", message="metrics")
    died = Input(K.ENGINE_DIED, engine=1, message="killed")
    for tenth in range(60):
        at = tenth / 10 + 0.05
        for events in ([(at, stop)], [(at, stop), (at + 0.3, stop)], [(at, error)], [(at, died)]):
            run = VirtualRun(config, behaviour, events=events)
            result = run.run()
            assert result.outcome in ("completed", "interrupted" if events[0][1] is stop else "failed")
            # The scheduler gives up the operations of a dead engine; everything else it awaits.
            assert [c for c in run.world.in_flight() if events[0][1] is not died or c.engine != 1] == []
            check_accounts(result.records)
