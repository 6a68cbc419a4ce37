"""In-flight sync: engines load while they generate, and batches say which versions they were made with."""

from __future__ import annotations

from typing import Any

import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Command, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.core.invariants import InvariantViolation, check_state
from fsm_trainer.core.machines import EngineState
from fsm_trainer.core.monitor import Monitor
from tests.core.driver import Driver

K = CommandKind


def begun(**config: Any) -> Driver:
    return Driver(SchedulerConfig(**{"sync_mode": "inflight", "max_steps": 9, "prefetch": 0, **config})).begin()


def generated(driver: Driver, command: Command, first: int, last: int) -> list[Record]:
    driver.pending.remove(command)
    stamp = {"rollout_version_first": first, "rollout_version_last": last}
    return driver.feed(Input(InputKind.GENERATED, op=command.op, tokens=10, **stamp))


def loading_while_generating(**config: Any) -> Driver:
    """Batch 1 is generated with version 0 while version 1 is being loaded; batch 0 was trained on."""
    driver = begun(workers=2, max_staleness=3, **config)
    driver.until(K.GENERATE, 1, keep={K.GENERATE})
    driver.complete(driver.find(K.GENERATE, 0))
    driver.complete(driver.find(K.REWARD, 0))
    driver.complete(driver.find(K.TRAIN, 0))
    return driver


def test_a_load_begins_at_once_though_the_engine_generates() -> None:
    driver = loading_while_generating()
    assert driver.scheduler.status().engines == ("open",), "an export closes no gate"
    driver.complete(driver.find(K.EXPORT))
    assert driver.find(K.LOAD_WEIGHTS).version == 1
    assert driver.scheduler.status().engines == ("loading",)
    assert driver.scheduler.state.engines[0].generating >= {1}
    driver.finish()
    assert not [r for r in driver.kinds(RecordKind.TRANSITION) if r.dest == "draining" and r.machine == "engine"]


def test_an_export_stops_no_generation_but_a_load_keeps_new_ones_from_starting() -> None:
    driver = loading_while_generating()
    driver.complete(driver.find(K.LOAD_PROMPTS, 2))
    assert driver.find(K.GENERATE, 2).version == 0, "while the export goes on"
    driver.complete(driver.find(K.EXPORT))
    driver.complete(driver.find(K.GENERATE, 1))
    driver.complete(driver.find(K.REWARD, 1))
    driver.complete(driver.find(K.LOAD_PROMPTS, 3))
    assert not [c for c in driver.pending if c.kind is K.GENERATE and c.batch_id == 3]
    assert driver.kinds(RecordKind.WAIT)[-1].reason == "weight_sync"
    driver.complete(driver.find(K.LOAD_WEIGHTS))
    assert driver.find(K.GENERATE, 3).version == 1
    driver.finish()


def test_a_load_waits_for_an_export_in_flight() -> None:
    driver = loading_while_generating()
    driver.complete(driver.find(K.EXPORT))
    load = driver.find(K.LOAD_WEIGHTS)
    driver.complete(driver.find(K.GENERATE, 1))
    driver.complete(driver.find(K.REWARD, 1))
    driver.complete(driver.find(K.TRAIN, 1))
    export = driver.find(K.EXPORT)
    driver.complete(load)
    assert not [c for c in driver.pending if c.kind is K.LOAD_WEIGHTS], "version 2 is on its way"
    driver.complete(export)
    assert driver.find(K.LOAD_WEIGHTS).version == 2
    driver.finish()


@pytest.mark.parametrize(("first", "last"), [(0, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("loaded", [False, True])
def test_any_version_that_the_engine_had_meanwhile_is_a_right_stamp(first: int, last: int, loaded: bool) -> None:
    driver = loading_while_generating()
    driver.complete(driver.find(K.EXPORT))
    if loaded:  # otherwise the engine may be through with it before its completion is taken in
        driver.complete(driver.find(K.LOAD_WEIGHTS))
    generated(driver, driver.find(K.GENERATE, 1), first, last)
    assert driver.scheduler.error is None
    ended = [r for r in driver.kinds(RecordKind.TRANSITION, "generated") if r.machine == "batch"][-1]
    assert (ended.rollout_version_first, ended.rollout_version_last) == (first, last)
    driver.finish()
    assert (1, first) in driver.trained(), "staleness counts from the first token"


@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 2), (1, 0), (-1, 0), (-1, 1)])
def test_a_version_that_the_engine_cannot_have_had_fails_the_run(first: int, last: int) -> None:
    driver = loading_while_generating()
    driver.complete(driver.find(K.EXPORT))
    generated(driver, driver.find(K.GENERATE, 1), first, last)
    expected = f"engine-0 reports rollout versions {first} to {last} for batch 1, but versions 0 to 1 were loaded"
    assert expected in str(driver.scheduler.error)


def test_a_version_that_is_published_but_not_being_loaded_is_no_right_stamp() -> None:
    driver = loading_while_generating(engines=2)
    driver.complete(driver.find(K.EXPORT))
    loads = {c.engine: c for c in driver.pending if c.kind is K.LOAD_WEIGHTS}
    driver.complete(loads[1])
    driver.complete(loads[0])
    generated(driver, driver.find(K.GENERATE, 1), 0, 1)
    assert driver.scheduler.error is None
    driver = loading_while_generating()
    generated(driver, driver.find(K.GENERATE, 1), 0, 1)
    assert "but version 0 was loaded" in str(driver.scheduler.error), "version 1 is only being exported"


def test_staleness_counts_from_the_first_token() -> None:
    driver = begun(workers=2, max_staleness=1, max_steps=3)
    driver.until(K.GENERATE, 1, keep={K.GENERATE})
    driver.complete(driver.find(K.GENERATE, 0))
    driver.complete(driver.find(K.REWARD, 0))
    driver.complete(driver.find(K.TRAIN, 0))
    driver.complete(driver.find(K.EXPORT))
    driver.complete(driver.find(K.LOAD_WEIGHTS))
    generated(driver, driver.find(K.GENERATE, 1), 1, 1)
    state = driver.scheduler.state
    assert state.deadline_of(state.batches[1]) == 2
    driver.finish()
    rows = [r for r in driver.kinds(RecordKind.TRANSITION, "train") if r.machine == "batch"]
    assert [(r.batch_id, r.staleness) for r in rows][:2] == [(0, 0), (1, 0)]


def test_nothing_is_loaded_for_generations_that_began_if_none_can_begin_any_more() -> None:
    driver = begun(workers=2, max_staleness=3)
    driver.until(K.GENERATE, 1, keep={K.GENERATE})
    driver.complete(driver.find(K.GENERATE, 0))
    driver.complete(driver.find(K.REWARD, 0))
    for command in [c for c in driver.pending if c.kind is K.LOAD_PROMPTS]:
        driver.complete(command)
    for command in [c for c in driver.pending if c.kind is K.GENERATE and c.batch_id != 1]:
        driver.complete(command)
    driver.feed(Input(InputKind.STOP, reason="sigint"))
    driver.finish()
    assert [r.train_version for r in driver.kinds(RecordKind.COMMAND, "load_weights")] == [0]


def test_an_engine_that_serves_something_older_is_a_violation() -> None:
    driver = loading_while_generating()
    state = driver.scheduler.state
    driver.complete(driver.find(K.EXPORT))
    driver.complete(driver.find(K.LOAD_WEIGHTS))
    check_state(state)
    engine = state.engines[0]
    engine.publication = 0
    with pytest.raises(InvariantViolation, match="an in-flight engine loads what is published"):
        check_state(state)
    engine.publication, engine.machine.state = 1, EngineState.DRAINING
    with pytest.raises(InvariantViolation, match="an in-flight engine never drains"):
        check_state(state)


def test_the_monitor_holds_stamps_against_the_loads_and_the_mode() -> None:
    driver = loading_while_generating()
    driver.complete(driver.find(K.EXPORT))
    generated(driver, driver.find(K.GENERATE, 1), 0, 1)
    driver.finish()
    Monitor(driver.config).see_all(driver.records)
    with pytest.raises(InvariantViolation, match="no weights are loaded while the engine generates"):
        Monitor(SchedulerConfig()).see_all(driver.records)
    stamped = [
        r._replace(rollout_version_last=2) if r.rollout_version_last == 1 and r.trigger == "generated" else r
        for r in driver.records
    ]
    with pytest.raises(InvariantViolation, match="the engine had the versions that a batch is stamped with"):
        Monitor(driver.config).see_all(stamped)


@pytest.mark.parametrize("admission", ["paced", "greedy"])
def test_staleness_zero_is_the_synchronous_algorithm_in_either_mode(admission: str) -> None:
    def told(mode: str) -> list[Record]:
        config = SchedulerConfig(admission=admission, sync_mode=mode, max_staleness=0, queue_size=1, max_steps=4)
        rows = Driver(config).begin().finish().records
        return [r._replace(seq=0, cause_seq=0, t_ns=0) for r in rows if r.kind is RecordKind.COMMAND]

    assert told("inflight") == told("drain")
