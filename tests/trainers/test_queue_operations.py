"""Commands of a run whose batches come through a queue, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.core.batch import AsyncTrainBatch
from fsm_trainer.core.events import Command, CommandKind, Input, InputKind
from fsm_trainer.engines.base import Snapshot
from fsm_trainer.runtime.train_queue import AsyncTrainBatchQueue
from fsm_trainer.trainers.queue_operations import QueueOperations
from fsm_trainer.trainers.run_directory import RunDirectory
from tests.trainers.helpers import train_batch

C = CommandKind


class Trainer:
    """A train engine that only publishes."""

    def __init__(self) -> None:
        self.closed = False

    def export(self, version: int) -> Snapshot:
        return Snapshot(version, f"place-{version}", 8)

    def release(self, version: int) -> None: ...

    def close(self) -> None:
        self.closed = True


class Stage:
    def __init__(self, folder: Path, timeout_s: float | None = None) -> None:
        self.queue = AsyncTrainBatchQueue(4)
        self.told: list[Snapshot] = []
        self.engine = Trainer()
        self.operations = QueueOperations(
            queue=self.queue,
            on_weights=self.told.append,
            train_engine=self.engine,  # type: ignore[arg-type]
            run=RunDirectory(folder, folder),
            timeout_s=timeout_s,
        )

    def do(self, kind: CommandKind, **fields: Any) -> Input:
        return self.operations.execute(Command(1, kind, **fields))


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    stage = Stage(tmp_path)
    yield stage
    stage.operations.close(10)
    assert stage.engine.closed


def test_a_batch_goes_through_with_the_producers_stamp(stage: Stage) -> None:
    stage.queue.put(train_batch(40, version=6))
    assert stage.do(C.LOAD_PROMPTS, batch_id=0).kind is InputKind.LOADED
    generated = stage.do(C.GENERATE, batch_id=0, engine=0, worker=0)
    assert (generated.kind, generated.tokens) == (InputKind.GENERATED, 4)
    assert (generated.rollout_version_first, generated.rollout_version_last) == (6, 6)
    rewarded = stage.do(C.REWARD, batch_id=0, worker=0)
    assert (rewarded.kind, rewarded.tokens, rewarded.reason) == (InputKind.REWARDED, 10, None)


def test_a_closed_and_empty_queue_is_the_end(stage: Stage) -> None:
    stage.queue.put(train_batch(0, version=0))
    stage.queue.close()
    assert stage.do(C.LOAD_PROMPTS, batch_id=0).kind is InputKind.LOADED
    assert stage.do(C.LOAD_PROMPTS, batch_id=1).kind is InputKind.EXHAUSTED


def test_each_version_is_told_with_where_its_weights_are(stage: Stage) -> None:
    stage.do(C.EXPORT, version=3)
    loaded = stage.do(C.LOAD_WEIGHTS, engine=0, version=3)
    assert (loaded.kind, loaded.rollout_version_last) == (InputKind.WEIGHTS_LOADED, 3)
    assert stage.told == [Snapshot(3, "place-3", 8)]


@pytest.mark.parametrize("wrong", ["a text", 5, train_batch(0, 0, train_sequences=())])
def test_what_is_no_batch_is_refused(stage: Stage, wrong: AsyncTrainBatch) -> None:
    stage.queue.put(wrong)
    with pytest.raises(ValueError, match="expected an AsyncTrainBatch with at least one sequence"):
        stage.do(C.LOAD_PROMPTS, batch_id=0)


def test_producers_that_keep_the_run_waiting_are_named(tmp_path: Path) -> None:
    stage = Stage(tmp_path, timeout_s=0.0)
    with pytest.raises(TimeoutError, match="no producer put one"):
        stage.do(C.LOAD_PROMPTS, batch_id=0)
    stage.operations.close(10)


def test_an_error_of_a_producer_comes_out(stage: Stage) -> None:
    stage.queue.report_error(KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        stage.do(C.LOAD_PROMPTS, batch_id=0)


@pytest.mark.parametrize("how", ["close_source", "abort"])
def test_the_queue_is_closed_when_nothing_more_is_wanted(stage: Stage, how: str) -> None:
    if how == "abort":
        stage.operations.abort(Command(1, C.LOAD_PROMPTS, batch_id=0))
    else:
        stage.operations.close_source()
    assert stage.queue.closed
