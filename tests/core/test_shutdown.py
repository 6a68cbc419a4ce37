"""Every way a run ends: each is bounded, says who and why, and accounts for every batch."""

from __future__ import annotations

from typing import Any

import pytest

from fsm_trainer.core.config import Deadlines, SchedulerConfig
from fsm_trainer.core.events import REFUSED_STEP, CommandKind, Input, InputKind, RecordKind
from tests.core.driver import Driver, World

K = CommandKind
STOP = Input(InputKind.STOP, reason="sigint")
TICK = Input(InputKind.TICK)
SECOND = 1_000_000_000


def begun(**config: Any) -> Driver:
    return Driver(SchedulerConfig(**{"max_steps": 9, **config})).begin()


def end_of(driver: Driver) -> tuple[str | None, str | None]:
    """Reason and message of run_end."""
    assert driver.records[-1].kind is RecordKind.RUN_END
    return driver.records[-1].reason, driver.records[-1].message


def test_first_stop_finishes_what_is_in_flight_and_saves() -> None:
    driver = begun(workers=2, max_staleness=2)
    driver.until(K.TRAIN, 0)
    driver.feed(STOP)
    admitted = driver.scheduler.state.counts["admitted"]
    driver.finish()
    assert end_of(driver) == ("interrupted", "sigint")
    assert driver.scheduler.state.counts == {
        "admitted": admitted,
        "trained": admitted,
        "dropped": 0,
        "failed": 0,
        "cancelled": 0,
    }
    assert driver.kinds(RecordKind.CHECKPOINT)[-1].train_version == admitted


def test_second_stop_aborts_and_cancels() -> None:
    driver = begun(workers=2, max_staleness=2)
    driver.until(K.GENERATE, 1, keep={K.GENERATE})
    driver.feed(STOP)
    driver.feed(STOP)
    aborted = {c.target for c in driver.notices if c.kind is K.ABORT}
    assert aborted == {c.op for c in driver.pending}
    for command in list(driver.pending):
        driver.fail(command, "generation aborted")
    driver.check_end()
    assert end_of(driver) == ("interrupted", "sigint")
    assert driver.scheduler.state.counts["cancelled"] == 2
    assert driver.scheduler.error is None


def test_stop_before_the_run_is_up() -> None:
    driver = begun()
    driver.feed(STOP)
    driver.finish()
    assert end_of(driver)[0] == "interrupted"
    assert driver.scheduler.state.counts["admitted"] == 0


def test_stop_while_the_run_is_already_draining_changes_nothing() -> None:
    driver = begun(max_steps=1)
    driver.complete(driver.until(K.TRAIN, 0))
    assert driver.scheduler.state.run.state.value == "draining"
    driver.feed(STOP)
    driver.finish()
    assert end_of(driver)[0] == "completed"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (K.START_TRAINER, "trainer: start_trainer failed: ValueError: boom"),
        (K.START_ENGINE, "engine-0: start_engine failed: ValueError: boom"),
        (K.LOAD_PROMPTS, "loader: load_prompts of batch"),
        (K.GENERATE, "rollout-0: generate of batch 0 failed: ValueError: boom"),
        (K.REWARD, "rollout-0: reward of batch 0 failed: ValueError: boom"),
        (K.TRAIN, "trainer: train of batch 0 failed: ValueError: boom"),
        (K.EXPORT, "trainer: export failed: ValueError: boom"),
        (K.LOAD_WEIGHTS, "engine-0: load_weights failed: ValueError: boom"),
        (K.SAVE, "trainer: save failed: ValueError: boom"),
    ],
)
def test_each_operation_that_fails_ends_the_run(kind: CommandKind, text: str) -> None:
    driver = begun(save_interval=1)
    driver.fail(driver.until(kind))
    driver.finish()
    reason, message = end_of(driver)
    assert reason == "failed"
    assert str(message).startswith(text)


def test_the_first_error_wins_and_what_was_learnt_is_saved() -> None:
    driver = begun(workers=2, max_staleness=2)
    driver.complete(driver.until(K.TRAIN, 0))
    driver.fail(driver.until(K.REWARD), "first")
    train = [c for c in driver.pending if c.kind is K.GENERATE]
    for command in train:
        driver.fail(command, "second")
    driver.finish()
    assert "first" in str(end_of(driver)[1])
    assert driver.kinds(RecordKind.CHECKPOINT)[-1].train_version == 1


@pytest.mark.parametrize(
    ("kind", "deadline", "text"),
    [
        (K.START_ENGINE, "start_s", "engine-0 in state starting: start_engine took longer than 7 s"),
        (K.GENERATE, "generate_s", "rollout-0 in state generating: generate of batch 0 took longer than 7 s"),
        (K.REWARD, "reward_s", "rollout-0 in state rewarding: reward of batch 0 took longer than 7 s"),
        (K.TRAIN, "train_s", "trainer in state training: train of batch 0 took longer than 7 s"),
        (K.LOAD_WEIGHTS, "sync_s", "engine-0 in state loading: load_weights took longer than 7 s"),
        (K.SAVE, "save_s", "trainer in state saving: save took longer than 7 s"),
    ],
)
def test_a_missed_deadline_names_the_machine_its_state_and_how_long(
    kind: CommandKind, deadline: str, text: str
) -> None:
    driver = begun(save_interval=1, deadlines=Deadlines(**{deadline: 7}))
    hung = driver.until(kind)
    # Others may be in flight too; they are well, only this one hangs.
    for command in [c for c in driver.pending if c is not hung and c.kind is not kind]:
        driver.complete(command)
    due = driver.scheduler.state.ops[hung.op].deadline_ns
    assert due is not None
    assert driver.scheduler.next_deadline_ns is not None
    assert driver.scheduler.next_deadline_ns <= due
    driver.feed(TICK, at_ns=due)
    driver.pending.remove(hung)
    driver.finish() if not driver.scheduler.finished else driver.check_end()
    assert end_of(driver)[0] == "failed"
    assert end_of(driver)[1] == text
    assert hung.op in {c.target for c in driver.notices if c.kind is K.ABORT}


def test_a_tick_before_the_deadline_changes_nothing() -> None:
    driver = begun(deadlines=Deadlines(generate_s=7))
    hung = driver.until(K.GENERATE)
    due = driver.scheduler.state.ops[hung.op].deadline_ns
    assert due is not None
    records = driver.feed(TICK, at_ns=due - 1)
    assert [r.kind for r in records] == [RecordKind.INPUT]
    driver.finish()
    assert driver.scheduler.outcome == "completed"


def test_a_completion_after_its_deadline_is_ignored() -> None:
    driver = begun(save_interval=1, max_staleness=2, deadlines=Deadlines(generate_s=7))
    save = driver.until(K.SAVE)
    hung = driver.until(K.GENERATE, keep={K.SAVE})
    driver.feed(TICK, at_ns=driver.scheduler.state.ops[hung.op].deadline_ns)
    driver.complete(hung)
    assert driver.kinds(RecordKind.IGNORED)[-1].reason == "late"
    driver.complete(save)
    driver.finish() if not driver.scheduler.finished else driver.check_end()


def test_an_empty_queue_past_the_timeout_names_who_did_not_deliver() -> None:
    driver = begun(deadlines=Deadlines(queue_s=5, generate_s=0))
    generate = driver.until(K.GENERATE)
    due = driver.scheduler.next_deadline_ns
    for command in [c for c in driver.pending if c is not generate]:
        driver.complete(command)
    assert due is not None
    driver.feed(TICK, at_ns=due)
    driver.fail(generate, "generation aborted")
    driver.check_end()
    message = str(end_of(driver)[1])
    assert message.startswith("trainer waited 5.0 s in state waiting (queue timeout 5 s): no batch came into the train")
    assert "rollout-0 is in generating (batch 0) since" in message


def test_a_full_queue_past_the_timeout_names_the_trainer() -> None:
    driver = begun(admission="greedy", queue_size=1, max_staleness=5, deadlines=Deadlines(queue_s=5, train_s=0))
    train = driver.until(K.TRAIN, 0)
    driver.complete_all_but(train)
    assert driver.scheduler.next_deadline_ns is not None
    driver.feed(TICK, at_ns=driver.scheduler.next_deadline_ns)
    driver.complete(train)
    driver.finish()
    message = str(end_of(driver)[1])
    assert message.startswith("rollout-0 waited 5.0 s in state queued (queue timeout 5 s): no free slot in the train")
    assert "(1 of 1 taken); trainer is in training (batch 0) since" in message
    assert driver.kinds(RecordKind.CHECKPOINT)[-1].train_version == 1


def test_an_engine_that_dies_ends_the_run() -> None:
    driver = begun()
    generate = driver.until(K.GENERATE)
    driver.feed(Input(InputKind.ENGINE_DIED, engine=0, message="process 4711 ended with signal 9"))
    driver.fail(generate, "engine died")
    driver.finish()
    assert end_of(driver) == ("failed", "engine-0 died in state open: process 4711 ended with signal 9")
    assert driver.scheduler.state.engines[0].machine.state.value == "broken"


def test_an_engine_that_reports_a_wrong_version_is_not_trusted() -> None:
    driver = begun()
    generate = driver.until(K.GENERATE)
    driver.pending.remove(generate)
    driver.feed(Input(InputKind.GENERATED, op=generate.op, rollout_version_first=3, rollout_version_last=3))
    driver.finish()
    assert "reports rollout versions 3 to 3 for batch 0, but version 0 was loaded" in str(end_of(driver)[1])
    driver = begun()
    load = driver.until(K.LOAD_WEIGHTS)
    driver.pending.remove(load)
    driver.feed(Input(InputKind.WEIGHTS_LOADED, op=load.op, rollout_version_last=5))
    driver.finish()
    assert "reports version 5 after loading version 0" in str(end_of(driver)[1])
    assert driver.scheduler.state.engines[0].machine.state.value == "broken"


def test_a_trainer_that_miscounts_its_steps_is_not_trusted() -> None:
    driver = begun()
    train = driver.until(K.TRAIN)
    driver.pending.remove(train)
    driver.feed(Input(InputKind.TRAINED, op=train.op, train_version=5))
    driver.finish()
    assert end_of(driver)[1] == "trainer reports 5 optimiser steps after batch 0, expected 1"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (Input(InputKind.TRAINED, op=999_999, train_version=1), "unknown"),
        (Input(InputKind.SAVED), "unknown"),
    ],
)
def test_completions_nobody_waits_for_are_recorded_and_ignored(event: Input, reason: str) -> None:
    driver = begun()
    driver.until(K.GENERATE)
    driver.feed(event)
    assert driver.kinds(RecordKind.IGNORED)[-1].reason == reason
    driver.finish()
    assert driver.scheduler.outcome == "completed"


def test_a_completion_counts_once() -> None:
    driver = begun()
    generate = driver.until(K.GENERATE, 0)
    event = driver.completion(generate)
    driver.complete(generate)
    before = dict(driver.scheduler.state.counts)
    driver.feed(event)
    assert driver.kinds(RecordKind.IGNORED)[-1].reason == "unknown"
    assert driver.scheduler.state.counts == before
    driver.finish()


def test_a_completion_of_another_kind_is_ignored() -> None:
    driver = begun()
    generate = driver.until(K.GENERATE, 0)
    driver.feed(Input(InputKind.REWARDED, op=generate.op))
    assert driver.kinds(RecordKind.IGNORED)[-1].reason == "not a completion of generate"
    driver.finish()
    assert driver.scheduler.outcome == "completed"


def test_shutdown_gives_up_on_what_never_ends() -> None:
    driver = begun(deadlines=Deadlines(shutdown_s=3, train_s=0))
    train = driver.until(K.TRAIN)
    generate = driver.until(K.GENERATE)
    driver.fail(generate)
    driver.complete_all_but(train)
    assert not driver.scheduler.finished
    assert driver.scheduler.next_deadline_ns is not None
    driver.feed(TICK, at_ns=driver.scheduler.next_deadline_ns)
    driver.pending.remove(train)
    driver.check_end()
    assert "generate of batch" in str(end_of(driver)[1]), "the first error is the one reported"
    failed = [r for r in driver.kinds(RecordKind.TRANSITION, "fail") if r.machine == "trainer"]
    assert "gave up waiting at shutdown for trainer in state training" in str(failed[0].message)


def test_a_log_that_cannot_be_written_fails_the_run() -> None:
    driver = begun()
    driver.until(K.GENERATE)
    driver.feed(Input(InputKind.FAILED, reason="EventLogError", message="disk full"))
    driver.finish()
    assert end_of(driver) == ("failed", "EventLogError: disk full")


def test_the_source_is_told_once_that_nothing_more_is_wanted() -> None:
    for world in (World(), World(prompts=3)):
        driver = Driver(SchedulerConfig(max_steps=9), world).begin().finish()
        assert sum(c.kind is K.CLOSE_SOURCE for c in driver.notices) == 1


@pytest.mark.parametrize("reason", sorted(REFUSED_STEP))
def test_a_refused_step_loses_nothing_learnt_before(reason: str) -> None:
    driver = begun(max_staleness=2)
    driver.complete(driver.until(K.TRAIN, 0))
    driver.fail(driver.until(K.TRAIN, 1), "no step", reason=reason)
    driver.finish()
    assert end_of(driver) == ("failed", f"trainer: train of batch 1 failed: {reason}: no step")
    assert driver.kinds(RecordKind.CHECKPOINT)[-1].train_version == 1
    assert driver.scheduler.state.trainer.state.value == "stopped"


def test_nothing_is_saved_after_a_second_stop_though_a_save_is_due() -> None:
    driver = begun(save_interval=1)
    train = driver.until(K.TRAIN, 0)
    driver.feed(STOP)
    driver.feed(STOP)
    driver.complete(train)
    assert not [c for c in driver.pending if c.kind is K.SAVE]
    driver.finish()
    assert not driver.kinds(RecordKind.CHECKPOINT)
