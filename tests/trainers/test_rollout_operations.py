"""How a run that generates by itself ends its engines and its operations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fsm_trainer.core.events import Command, CommandKind, Input, InputKind
from fsm_trainer.runtime.clock import MonotonicClock
from fsm_trainer.runtime.failures import EngineDied, EngineError
from fsm_trainer.trainers.operations import OperationAborted
from fsm_trainer.trainers.rollout_operations import RolloutOperations
from fsm_trainer.trainers.run_directory import RunDirectory
from fsm_trainer.trainers.scoring import Scorer
from tests.trainers.helpers import prompt_batch, rollout

C = CommandKind


class Host:
    """An engine host whose calls end when the test says so."""

    def __init__(self, name: str, pid: int | None = 1) -> None:
        self.name = name
        self.pid = pid
        self.calls: list[str] = []
        self.results: dict[str, Future[Any]] = {}
        self.reached = threading.Event()
        self.close_error: Exception | None = None
        self.parts: dict[str, float] | None = None
        self.tell: Callable[[EngineDied], None] | None = None

    def submit(self, method: str, *_: Any) -> Future[Any]:
        self.calls.append(method)
        future: Future[Any] = self.results.setdefault(method, Future())
        if method == "start":
            future.set_result(self.parts)
        else:
            self.reached.set()
        return future

    def submit_urgent(self, method: str, *_: Any) -> Future[Any]:
        self.calls.append(f"urgent {method}")
        self.reached.set()
        return Future()

    def on_death(self, callback: Callable[[EngineDied], None]) -> None:
        self.tell = callback

    def close(self, timeout_s: float) -> None:
        self.calls.append("close")
        if self.close_error is not None:
            raise self.close_error

    def kill(self) -> None:
        self.calls.append("kill")
        self.reached.set()


class TrainEngine:
    closed = False

    def close(self) -> None:
        self.closed = True


class Source:
    def batch(self, batch_id: int) -> Any:
        return prompt_batch() if batch_id < 3 else None

    def close(self) -> None:
        pass


class Stage:
    def __init__(self, folder: Path) -> None:
        self.hosts: list[Host] = []
        self.posted: list[Input] = []
        self.engine = TrainEngine()
        self.operations = RolloutOperations(
            source=Source(),
            scorer=Scorer(None, lambda record: 0.0, None),  # type: ignore[arg-type]
            train_engine=self.engine,  # type: ignore[arg-type]
            make_host=self.make_host,  # type: ignore[arg-type]
            run=RunDirectory(folder, folder),
            seed=0,
            clock=MonotonicClock(),
            post=self.posted.append,
            always_steps=False,
        )
        for engine in range(3):
            self.do(C.START_ENGINE, engine=engine)

    def make_host(self, engine: int) -> Host:
        self.hosts.append(Host(f"engine-{engine}"))
        return self.hosts[-1]

    def do(self, kind: CommandKind, op: int = 1, **fields: Any) -> Input:
        return self.operations.execute(Command(op, kind, **fields))


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_one_engine_that_fails_to_close_keeps_no_other_from_it(stage: Stage) -> None:
    stage.hosts[1].close_error = EngineError("RuntimeError", "CUDA error")
    with pytest.raises(EngineError, match="CUDA error"):
        stage.operations.close(10)
    assert [host.calls[-1] for host in stage.hosts] == ["close"] * 3
    assert stage.engine.closed


def test_an_engine_whose_call_was_given_up_is_killed(stage: Stage) -> None:
    stage.do(C.LOAD_PROMPTS, batch_id=0)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(stage.do, C.GENERATE, 5, engine=1, batch_id=0, worker=0)
        assert stage.hosts[1].reached.wait(30)
        stage.operations.close(10)
        stage.hosts[1].results["generate"].set_result(rollout())
        assert pending.result(30).kind is InputKind.GENERATED
    assert [host.calls[-1] for host in stage.hosts] == ["close", "kill", "close"]
    assert "close" not in stage.hosts[1].calls


def test_a_death_is_posted(stage: Stage) -> None:
    tell = stage.hosts[2].tell
    assert tell is not None
    tell(EngineDied("engine-2", 123, -9))
    (event,) = stage.posted
    assert (event.kind, event.engine) == (InputKind.ENGINE_DIED, 2)
    assert event.message == "engine process engine-2 (pid 123) was killed by SIGKILL"
    stage.operations.close(10)


@pytest.mark.parametrize(
    ("kind", "method", "expected"),
    [(C.GENERATE, "generate", "urgent abort"), (C.LOAD_WEIGHTS, "load_weights", "kill")],
)
def test_abort_reaches_the_engine_of_the_operation(stage: Stage, kind: CommandKind, method: str, expected: str) -> None:
    stage.do(C.LOAD_PROMPTS, batch_id=0)
    stage.operations._snapshots[0] = None  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(stage.do, kind, 5, engine=1, batch_id=0, worker=0, version=0)
        assert stage.hosts[1].reached.wait(30)
        stage.hosts[1].reached.clear()
        stage.operations.notice(Command(6, C.ABORT, target=5))
        assert stage.hosts[1].reached.wait(30)
        stage.hosts[1].results[method].set_exception(EngineError("Aborted", "asked to"))
        with pytest.raises(EngineError):
            pending.result(30)
    assert expected in stage.hosts[1].calls
    assert stage.hosts[0].calls == stage.hosts[2].calls == ["start"]
    stage.operations.close(10)


def test_what_was_aborted_before_it_began_does_not_begin(stage: Stage) -> None:
    stage.do(C.LOAD_PROMPTS, batch_id=0)
    stage.operations.notice(Command(6, C.ABORT, target=5))
    with pytest.raises(OperationAborted, match="generate was aborted before it began"):
        stage.do(C.GENERATE, 5, engine=1, batch_id=0, worker=0)
    stage.operations.close(10)
    assert [host.calls for host in stage.hosts] == [["start", "close"]] * 3


def test_what_is_aborted_before_it_reaches_its_engine_does_not_reach_it(stage: Stage) -> None:
    stage.do(C.LOAD_PROMPTS, batch_id=0)
    find = stage.operations._hosts.of

    def of(command: Command) -> Any:
        stage.operations.notice(Command(6, C.ABORT, target=5))
        return find(command)

    stage.operations._hosts.of = of  # type: ignore[method-assign]
    with pytest.raises(OperationAborted, match="generate was aborted before it reached its engine"):
        stage.do(C.GENERATE, 5, engine=1, batch_id=0, worker=0)
    stage.operations.close(10)
    assert "generate" not in stage.hosts[1].calls


def test_the_abort_of_a_lost_generation_does_not_touch_the_new_engine(stage: Stage) -> None:
    stage.do(C.LOAD_PROMPTS, batch_id=0)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(stage.do, C.GENERATE, 5, engine=1, batch_id=0, worker=0)
        assert stage.hosts[1].reached.wait(30)
        stage.do(C.START_ENGINE, 7, engine=1)
        stage.operations.notice(Command(6, C.ABORT, target=5))
        stage.hosts[1].results["generate"].set_exception(EngineError("Aborted", "asked to"))
        with pytest.raises(EngineError):
            pending.result(30)
    stage.operations.close(10)
    assert stage.hosts[1].calls[:3] == ["start", "generate", "kill"]
    assert stage.hosts[3].calls == ["start", "close"]


def test_the_seconds_of_a_start_are_told(stage: Stage) -> None:
    def make_host(engine: int) -> Host:
        host = Host(f"engine-{engine}")
        host.parts = {"import_s": 12.345}
        return host

    stage.operations._hosts._make = make_host  # type: ignore[assignment]
    with capture_logs() as told:
        stage.do(C.START_ENGINE, 5, engine=3)
    (line,) = told
    assert (line["event"], line["engine"], line["import_s"]) == ("engine_started", 3, 12.35)
    assert line["total_s"] >= 0
    stage.operations.close(10)


def test_an_abort_while_the_host_is_made_kills_it(stage: Stage) -> None:
    def make_host(engine: int) -> Host:
        stage.operations.notice(Command(6, C.ABORT, target=5))
        return stage.make_host(engine)

    stage.operations._hosts._make = make_host  # type: ignore[assignment]
    stage.do(C.START_ENGINE, 5, engine=3)
    assert "kill" in stage.hosts[3].calls
    stage.operations.close(10)


def test_an_abort_of_what_has_ended_does_nothing(stage: Stage) -> None:
    stage.operations.notice(Command(6, C.ABORT, target=5))
    stage.operations.close(10)
    assert [host.calls for host in stage.hosts] == [["start", "close"]] * 3


def test_the_end_of_the_prompts(stage: Stage) -> None:
    assert stage.do(C.LOAD_PROMPTS, batch_id=2).kind is InputKind.LOADED
    assert stage.do(C.LOAD_PROMPTS, batch_id=3).kind is InputKind.EXHAUSTED
    stage.operations.close(10)
