import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import structlog

from fsm_trainer.core.events import COMPLETIONS, NOTICES, Command, CommandKind, Input, InputKind
from fsm_trainer.runtime.clock import VirtualClock
from fsm_trainer.runtime.failures import EngineDied, EngineError
from fsm_trainer.runtime.lanes import Lanes, lane_of

TRAIN = Command(7, CommandKind.TRAIN, batch_id=2, version=4)


class Scripted:
    """Operations that do what they are given."""

    def __init__(self, execute: Callable[[Command], Any], notice: Callable[[Command], None] = lambda _: None) -> None:
        self.execute = execute
        self.notice = notice


def run_one(execute: Callable[[Command], Any], command: Command = TRAIN, clock: VirtualClock | None = None) -> Input:
    """Dispatch one command and return its completion."""
    inbox: SimpleQueue[Input] = SimpleQueue()
    lanes = Lanes(Scripted(execute), inbox.put, clock or VirtualClock())
    lanes.dispatch(command)
    done = inbox.get()
    assert lanes.close(10) == []
    assert inbox.empty()
    return done


@pytest.mark.parametrize(
    ("command", "lane"),
    [
        (Command(0, CommandKind.START_TRAINER), "trainer"),
        (Command(0, CommandKind.TRAIN, batch_id=1), "trainer"),
        (Command(0, CommandKind.EXPORT, version=1), "trainer"),
        (Command(0, CommandKind.SAVE, version=1), "trainer"),
        (Command(0, CommandKind.LOAD_PROMPTS, batch_id=1), "loader"),
        (Command(0, CommandKind.GENERATE, worker=2, engine=1), "rollout-2"),
        (Command(0, CommandKind.REWARD, worker=2), "reward-2"),
        (Command(0, CommandKind.START_ENGINE, engine=1), "engine-1"),
        (Command(0, CommandKind.LOAD_WEIGHTS, engine=1, version=3), "engine-1"),
    ],
)
def test_each_command_has_its_lane(command: Command, lane: str) -> None:
    assert lane_of(command) == lane
    seen: list[str] = []

    def execute(given: Command) -> Input:
        seen.append(threading.current_thread().name)
        return Input(next(iter(COMPLETIONS[given.kind])))

    run_one(execute, command)
    assert seen == [f"fsm-{lane}"]


def test_every_command_that_completes_has_a_lane() -> None:
    for kind in set(CommandKind) - NOTICES:
        assert lane_of(Command(0, kind, worker=0, engine=0))


def test_a_completion_carries_its_op_and_its_times() -> None:
    clock = VirtualClock(10)

    def execute(command: Command) -> Input:
        clock.advance_to(35)
        return Input(InputKind.TRAINED, train_version=5)

    done = run_one(execute, clock=clock)
    assert done == Input(InputKind.TRAINED, op=7, train_version=5, posted_ns=10, started_ns=10, finished_ns=35)


def test_lanes_run_beside_each_other_and_one_lane_in_order() -> None:
    both = threading.Barrier(2)
    order: list[int] = []

    def execute(command: Command) -> Input:
        if command.kind is CommandKind.LOAD_PROMPTS:
            order.append(command.op)
            return Input(InputKind.LOADED)
        both.wait(10)
        return Input(InputKind.GENERATED)

    inbox: SimpleQueue[Input] = SimpleQueue()
    lanes = Lanes(Scripted(execute), inbox.put, VirtualClock())
    for worker in (0, 1):
        lanes.dispatch(Command(worker, CommandKind.GENERATE, worker=worker, engine=0))
    for op in range(2, 12):
        lanes.dispatch(Command(op, CommandKind.LOAD_PROMPTS, batch_id=op))
    assert lanes.close(10) == []
    done = [inbox.get() for _ in range(12)]
    assert order == list(range(2, 12))
    assert {event.kind for event in done} == {InputKind.LOADED, InputKind.GENERATED}


def reward_fn(record: dict[str, int]) -> float:
    return record["answer"] / 0


def test_an_exception_becomes_failed_and_names_the_users_line() -> None:
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "/ 0" in text)
    with structlog.testing.capture_logs() as logs:
        done = run_one(lambda _: reward_fn({"answer": 1}))
    assert (done.kind, done.op, done.reason) == (InputKind.FAILED, 7, "ZeroDivisionError")
    assert done.message == f"division by zero (test_lanes.py:{line})"
    (entry,) = logs
    assert entry["log_level"] == "error"
    assert entry["command"] == "train"
    assert 'return record["answer"] / 0' in entry["exception"]


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit("gone"), KeyboardInterrupt("key")])
def test_what_would_end_a_thread_becomes_failed_too(error: BaseException) -> None:
    def execute(command: Command) -> Input:
        raise error

    done = run_one(execute)
    assert (done.kind, done.reason) == (InputKind.FAILED, type(error).__name__)
    assert str(error) in (done.message or "")


def test_sys_exit_in_user_code_fails_the_run_only() -> None:
    assert run_one(lambda _: sys.exit("reward gave up")).message.startswith("reward gave up (test_lanes.py:")  # type: ignore[union-attr]


def test_an_engines_own_exception_is_told_by_its_own_name() -> None:
    def execute(command: Command) -> Input:
        raise EngineError("FloatingPointError", "loss is nan", "Traceback of the child", "loss.py:3")

    with structlog.testing.capture_logs() as logs:
        done = run_one(execute)
    assert (done.reason, done.message) == ("FloatingPointError", "loss is nan (loss.py:3)")
    assert logs[0]["exception"] == "Traceback of the child"


def test_a_dead_engine_is_named() -> None:
    def execute(command: Command) -> Input:
        raise EngineDied("engine-0", 41, -9)

    done = run_one(execute)
    assert (done.reason, done.message) == ("EngineDied", "engine process engine-0 (pid 41) was killed by SIGKILL")


@pytest.mark.parametrize("wrong", [None, Input(InputKind.GENERATED), Input(InputKind.TICK)])
def test_a_completion_of_the_wrong_kind_is_a_failure(wrong: Input | None) -> None:
    done = run_one(lambda _: wrong)
    assert (done.kind, done.reason) == (InputKind.FAILED, "TypeError")
    assert "expected an Input of kind trained" in (done.message or "")


def test_an_operation_may_report_its_failure_itself() -> None:
    done = run_one(lambda _: Input(InputKind.FAILED, reason="Custom", message="why"))
    assert (done.kind, done.reason, done.message, done.op) == (InputKind.FAILED, "Custom", "why", 7)


def test_notices_are_delivered_at_once_on_the_callers_thread() -> None:
    seen: list[tuple[int, str]] = []

    def notice(command: Command) -> None:
        seen.append((command.op, threading.current_thread().name))

    lanes = Lanes(Scripted(lambda _: None, notice), lambda _: None, VirtualClock())
    for op, kind in enumerate(sorted(NOTICES)):
        lanes.dispatch(Command(op, kind))
    assert seen == [(op, threading.current_thread().name) for op in range(len(NOTICES))]
    assert lanes.close(0) == []


def test_a_failing_notice_fails_the_run() -> None:
    def notice(command: Command) -> None:
        raise LookupError("unknown snapshot")

    posted: list[Input] = []
    lanes = Lanes(Scripted(lambda _: None, notice), posted.append, VirtualClock())
    lanes.dispatch(Command(3, CommandKind.RELEASE_SNAPSHOT, version=1))
    (event,) = posted
    assert (event.kind, event.op, event.reason) == (InputKind.FAILED, None, "LookupError")


def test_a_hung_operation_is_named_and_does_not_hold_up_the_close() -> None:
    begun, release = threading.Event(), threading.Event()

    def execute(command: Command) -> Input:
        begun.set()
        release.wait()
        return Input(InputKind.TRAINED, train_version=5)

    posted: SimpleQueue[Input] = SimpleQueue()
    lanes = Lanes(Scripted(execute), posted.put, VirtualClock())
    lanes.dispatch(TRAIN)
    begun.wait()
    assert lanes.stuck() == ["trainer"]
    assert lanes.close(0) == ["trainer"]
    release.set()
    assert posted.get().kind is InputKind.TRAINED
    assert lanes.close(10) == []
    assert lanes.stuck() == []


def test_a_log_that_cannot_be_written_hides_no_failure() -> None:
    def broken(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    def fail(_: Command) -> Input:
        raise KeyError("answer")

    structlog.configure(processors=[broken])
    try:
        done = run_one(fail)
    finally:
        structlog.reset_defaults()
    assert (done.kind, done.reason) == (InputKind.FAILED, "KeyError")
