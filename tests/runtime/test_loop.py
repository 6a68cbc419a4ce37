"""The loop's own promises, with a scheduler that decides what it is told to."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from fsm_trainer.core.events import Command, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.runtime.clock import VirtualClock
from fsm_trainer.runtime.loop import EventLoop

K, C, R = InputKind, CommandKind, RecordKind


class Scripted:
    """A scheduler whose n-th step makes the n-th given (record kinds, commands); a step of RUN_END ends the run."""

    def __init__(
        self, *steps: tuple[Sequence[RecordKind], Sequence[CommandKind]], deadline_ns: int | None = None
    ) -> None:
        self.steps = deque(steps)
        self.inputs: list[Input] = []
        self.next_deadline_ns = deadline_ns
        self.finished = False
        self.seq = 0
        self.outcome: str | None = None
        self.error: str | None = None

    def _record(self, kind: RecordKind, t_ns: int) -> Record:
        self.seq += 1
        return Record(self.seq - 1, t_ns, kind)

    def step(self, event: Input) -> tuple[list[Record], list[Command]]:
        self.inputs.append(event)
        kinds, commands = self.steps.popleft() if self.steps else ([R.RUN_END], [])
        records = [self._record(kind, event.t_ns) for kind in (R.INPUT, *kinds)]
        issued = []
        for kind in commands:
            records.append(self._record(R.COMMAND, event.t_ns))
            issued.append(Command(records[-1].seq, kind))
        self.finished = R.RUN_END in kinds
        self.outcome = "completed" if self.finished else None
        return records, issued

    def annotate(self, record: Record) -> Record:
        return record._replace(seq=self._record(R.METRIC, 0).seq)


class World:
    """Sink, inbox, dispatcher and clock in one, which write down what happens to them, in order."""

    def __init__(
        self, scheduler: Scripted, *inputs: Input | None, observers: Sequence[Any] = (), fail: str = ""
    ) -> None:
        self.trace: list[str] = []
        self.records: list[Record] = []
        self.deadlines: list[int | None] = []
        self.clock = VirtualClock(10)
        self._inputs = deque(inputs)
        self._fail = fail
        self.loop = EventLoop(scheduler, self, self, self.dispatch, self.clock, observers)

    def _note(self, what: str) -> None:
        if what == self._fail:
            raise OSError("disk full")
        self.trace.append(what)

    def append(self, record: Record) -> None:
        self._note(record.kind.value)
        self.records.append(record)

    def flush(self) -> None:
        self._note("FLUSH")

    def sync(self) -> None:
        self._note("SYNC")

    def put(self, event: Input) -> None:
        self._inputs.append(event)

    def get(self, deadline_ns: int | None) -> Input | None:
        self.deadlines.append(deadline_ns)
        return self._inputs.popleft() if self._inputs else None

    def dispatch(self, command: Command) -> None:
        self.trace.append(f"-> {command.kind.value}")


class Watcher:
    """An observer that returns what it is told to."""

    def __init__(self, *rows: Record, error: Exception | None = None) -> None:
        self.rows = rows
        self.error = error
        self.seen: list[list[RecordKind]] = []

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        self.seen.append([record.kind for record in records])
        if self.error is not None:
            raise self.error
        return self.rows


END = ([R.RUN_END], [])


def test_the_run_begins_with_begin_and_ends_when_the_scheduler_does() -> None:
    scheduler = Scripted(([], []), ([], []), END)
    world = World(scheduler, Input(K.STARTED, op=1), Input(K.STOP), Input(K.TRAINED))
    assert world.loop.run() == "completed"
    assert [event.kind for event in scheduler.inputs] == [K.BEGIN, K.STARTED, K.STOP]
    assert world.loop.inputs == 3
    assert world.loop.busy_ns > 0


def test_inputs_are_stamped_and_time_never_goes_back() -> None:
    class Unsteady:
        moments = deque([5, 9, 7, 12])

        def now_ns(self) -> int:
            return self.moments.popleft()

    scheduler = Scripted(([], []), ([], []), ([], []), END)
    world = World(scheduler, *[Input(K.STARTED, t_ns=99)] * 3)
    world.loop._clock = Unsteady()
    world.loop.run()
    assert [event.t_ns for event in scheduler.inputs] == [5, 9, 9, 12]


def test_a_deadline_that_comes_becomes_a_tick() -> None:
    scheduler = Scripted(([], []), ([], []), END, deadline_ns=50)
    world = World(scheduler, None, Input(K.STARTED))
    world.loop.run()
    assert [event.kind for event in scheduler.inputs] == [K.BEGIN, K.TICK, K.STARTED]
    assert world.deadlines == [50, 50]


def test_records_precede_their_commands() -> None:
    world = World(Scripted(([R.TRANSITION], [C.GENERATE, C.REWARD]), END))
    world.loop.run()
    assert world.trace[:6] == ["input", "transition", "command", "command", "-> generate", "-> reward"]


@pytest.mark.parametrize("kind", [C.TRAIN, C.SAVE])
def test_a_command_that_cannot_be_recomputed_finds_its_record_flushed(kind: CommandKind) -> None:
    world = World(Scripted(([], [C.GENERATE, kind]), END))
    world.loop.run()
    assert world.trace[:6] == ["input", "command", "command", "FLUSH", "-> generate", f"-> {kind.value}"]


@pytest.mark.parametrize("kind", sorted(set(C) - {C.TRAIN, C.EXPORT, C.SAVE}))
def test_other_commands_wait_for_no_disk(kind: CommandKind) -> None:
    world = World(Scripted(([], [kind]), END))
    world.loop.run()
    assert world.trace[:3] == ["input", "command", f"-> {kind.value}"]


@pytest.mark.parametrize("kind", [R.SYNC, R.CHECKPOINT])
def test_what_must_survive_a_power_cut_is_synced_before_its_commands(kind: RecordKind) -> None:
    world = World(Scripted(([kind], [C.EXPORT]), END))
    world.loop.run()
    assert world.trace[:5] == ["input", kind.value, "command", "SYNC", "-> export"]


def test_the_end_is_written_and_synced() -> None:
    world = World(Scripted(([R.RUN_END], [C.RELEASE_SNAPSHOT])))
    world.loop.run()
    assert world.trace == ["input", "run_end", "command", "FLUSH", "SYNC", "-> release_snapshot"]


@pytest.mark.parametrize("fail", ["run_end", "FLUSH", "SYNC"])
def test_a_run_whose_last_rows_cannot_be_written_has_failed(fail: str) -> None:
    world = World(Scripted(END), fail=fail)
    assert world.loop.run() == world.loop.outcome == "failed"
    assert world.loop.error == "the event log cannot be written: disk full"


def test_metric_rows_of_observers_are_numbered_stamped_and_logged() -> None:
    row = Record(-1, 0, R.METRIC, machine="reward_mean", value=0.5)
    watcher = Watcher(row, row)
    world = World(Scripted(([], [C.TRAIN]), END), observers=[watcher])
    world.loop.run()
    assert watcher.seen[0] == [R.INPUT, R.COMMAND]
    assert world.trace[:6] == ["input", "command", "FLUSH", "metric", "metric", "-> train"]
    assert world.records[2] == row._replace(seq=2, t_ns=10)
    assert [record.seq for record in world.records] == list(range(len(world.records)))


def test_run_end_is_the_last_row_whatever_an_observer_returns() -> None:
    watcher = Watcher(Record(-1, 0, R.METRIC))
    world = World(Scripted(END), observers=[watcher])
    world.loop.run()
    assert watcher.seen == [[R.INPUT, R.RUN_END]]
    assert world.records[-1].kind is R.RUN_END


def test_an_observer_that_fails_fails_the_run_and_is_heard_no_more() -> None:
    broken, other = Watcher(error=KeyError("no column")), Watcher()
    scheduler = Scripted(([], []), ([], []), END)
    world = World(scheduler, Input(K.STARTED), observers=[broken, other])
    world.loop.run()
    failed = scheduler.inputs[1]
    assert (failed.kind, failed.op, failed.reason) == (K.FAILED, None, "KeyError")
    assert (failed.message or "").startswith("'no column' (test_loop.py:")
    assert (len(broken.seen), len(other.seen)) == (1, 3)


@pytest.mark.parametrize("fail", ["transition", "command", "FLUSH"])
def test_what_could_not_be_logged_does_not_happen(fail: str) -> None:
    scheduler = Scripted(([], []), ([R.TRANSITION], [C.TRAIN, C.ABORT]), ([], []), ([], [C.SAVE]), END)
    world = World(scheduler, Input(K.STARTED), fail=fail)
    assert world.loop.run() == "failed"
    failures = [(event.kind, event.op, event.reason) for event in scheduler.inputs[2:]]
    # The failure itself, then one for each command that was refused: the scheduler counts on a completion.
    assert failures[0] == (K.FAILED, None, "EventLogError")
    assert failures[1][:2] == (K.FAILED, 3)
    assert len(failures) == 3
    assert [what for what in world.trace if what.startswith("->")] == ["-> abort"]
    assert "run_end" not in world.trace, "nothing is logged after a gap"
    assert str(world.loop.log_failure) == "disk full"
    assert world.loop.error == "the event log cannot be written: disk full"


def test_a_metric_row_that_cannot_be_logged_fails_the_run() -> None:
    scheduler = Scripted(([], []), ([], []), END)
    world = World(scheduler, fail="metric", observers=[Watcher(Record(-1, 0, R.METRIC))])
    assert world.loop.run() == "failed"
    assert scheduler.inputs[1].reason == "EventLogError"


def test_a_run_whose_end_cannot_be_logged_has_failed() -> None:
    world = World(Scripted(END), fail="run_end")
    assert world.loop.run() == "failed"
    assert world.loop.outcome == "failed"
    assert "disk full" in (world.loop.error or "")
