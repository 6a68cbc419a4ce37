"""Single rules that whole runs do not show: which parked batch gets a slot, what is kept, and when a sync is no use."""

from __future__ import annotations

import pytest

from fsm_trainer.core.config import Deadlines, SchedulerConfig
from fsm_trainer.core.events import CommandKind, Input, InputKind, RecordKind
from fsm_trainer.core.state import State
from tests.core.driver import Driver, World

K = CommandKind


@pytest.mark.parametrize(("admission", "expected"), [("paced", 2), ("lockstep", 2), ("greedy", 3)])
def test_a_freed_slot_goes_to_the_oldest_or_in_greedy_to_the_first_that_finished(admission: str, expected: int) -> None:
    config = SchedulerConfig(admission=admission, max_staleness=4, workers=4, queue_size=1, max_steps=9)
    driver = Driver(config).begin()
    driver.until(K.GENERATE, 3, keep={K.GENERATE})
    generations = {c.batch_id: c for c in driver.pending if c.kind is K.GENERATE}
    for batch in (0, 1, 3, 2):
        driver.complete(generations[batch])
        driver.complete(driver.find(K.REWARD, batch))
    assert driver.find(K.TRAIN).batch_id == 0
    assert driver.scheduler.state.queue.items() == (1,)
    assert driver.scheduler.state.parked == [3, 2]
    driver.complete(driver.find(K.TRAIN, 0))
    driver.complete(driver.find(K.EXPORT))
    assert driver.find(K.TRAIN).batch_id == 1
    assert driver.kinds(RecordKind.QUEUE, "put")[-1].batch_id == expected
    driver.finish()


def test_the_run_is_up_only_when_every_engine_serves() -> None:
    driver = Driver(SchedulerConfig(workers=2, engines=2, max_steps=3)).begin()
    slow = next(c for c in driver.pending if c.kind is K.START_ENGINE and c.engine == 1)
    driver.complete_all_but(slow)
    assert driver.scheduler.status().run == "starting"
    assert driver.scheduler.state.next_id == 0
    driver.complete(slow)
    driver.finish()


def test_a_load_that_was_pending_when_prompts_ran_out_is_left_out() -> None:
    driver = Driver(SchedulerConfig(max_staleness=2), World(prompts=2)).begin()
    train = driver.until(K.TRAIN, 0)
    while not [c for c in driver.pending if (c.kind, c.batch_id) == (K.GENERATE, 1)]:
        driver.complete(next(c for c in driver.pending if c is not train and c.batch_id != 2))
    last = driver.find(K.GENERATE, 1)
    driver.complete(driver.find(K.TRAIN, 0))
    driver.complete(driver.find(K.EXPORT))
    assert driver.scheduler.status().engines == ("draining",)
    driver.complete(driver.find(K.LOAD_PROMPTS, 2))
    assert driver.scheduler.status().run == "draining"
    driver.complete(last)
    assert not [c for c in driver.pending if c.kind is K.LOAD_WEIGHTS]
    driver.finish()
    assert driver.trained() == [(0, 0), (1, 0)]


def test_greedy_does_not_refresh_while_a_fresh_batch_from_outside_is_under_way() -> None:
    config = SchedulerConfig(
        admission="greedy",
        external_rollouts=True,
        workers=2,
        max_staleness=1,
        sync_interval=4,
        prefetch=0,
        max_steps=9,
    )
    driver = Driver(config).begin()
    driver.until(K.GENERATE, 1, keep={K.GENERATE})
    for batch in (0, 1):
        driver.complete(driver.find(K.GENERATE, batch))
        driver.complete(driver.find(K.REWARD, batch))
    driver.complete(driver.find(K.LOAD_PROMPTS, 2))
    driver.complete(driver.find(K.TRAIN, 0))
    generate = driver.find(K.GENERATE, 2)
    driver.pending.remove(generate)
    driver.feed(Input(InputKind.GENERATED, op=generate.op, rollout_version_first=1, rollout_version_last=1))
    driver.complete(driver.find(K.TRAIN, 1))
    # The engine is two steps behind and may start nothing, but batch 2 will do at version 2.
    assert not [c for c in driver.pending if c.kind is K.EXPORT]
    driver.complete(driver.find(K.REWARD, 2))
    assert driver.find(K.TRAIN).batch_id == 2
    driver.finish()


def test_nothing_is_awaited_of_an_engine_that_died() -> None:
    driver = Driver(SchedulerConfig(workers=2, engines=2, max_steps=3)).begin()
    driver.until(K.LOAD_WEIGHTS)
    load = next(c for c in driver.pending if c.kind is K.LOAD_WEIGHTS)
    driver.feed(Input(InputKind.ENGINE_DIED, engine=load.engine, message="killed"))
    driver.complete_all_but(load)
    assert driver.scheduler.finished
    driver.pending.remove(load)
    driver.check_end()


def test_nothing_is_admitted_while_draining() -> None:
    driver = Driver(SchedulerConfig(max_staleness=3, max_steps=9)).begin()
    driver.until(K.TRAIN, 0)
    driver.until(K.GENERATE, 1, keep={K.TRAIN})
    driver.feed(Input(InputKind.STOP, reason="sigint"))
    driver.complete(driver.find(K.GENERATE, 1))
    driver.complete(driver.find(K.REWARD, 1))
    assert driver.scheduler.status().workers == ("idle",)
    assert driver.scheduler.state.next_id == 2
    driver.finish()


def test_no_prompts_are_loaded_ahead_once_all_steps_are_under_way() -> None:
    driver = Driver(SchedulerConfig(workers=2, max_staleness=1, max_steps=2)).begin().finish()
    assert [r.batch_id for r in driver.kinds(RecordKind.COMMAND, "load_prompts")] == [0, 1]


def test_no_refresh_while_a_batch_can_be_admitted() -> None:
    config = SchedulerConfig(max_staleness=1, sync_interval=2, max_steps=9)
    driver = Driver(config, World(no_step={1})).begin()
    train = driver.until(K.TRAIN, 1)
    assert list(driver.scheduler.state.batches) == [1], "with a step in flight no further batch would be in time"
    driver.complete(train)
    assert not [c for c in driver.pending if c.kind is K.EXPORT]
    assert driver.scheduler.state.next_id == 3
    driver.finish()


def test_nothing_starts_in_the_step_that_fails_the_run() -> None:
    """Without its step, training leaves the engine fresh enough for the batch that is ready."""
    config = SchedulerConfig(admission="greedy", workers=2, max_staleness=0, max_no_step_batches=1, prefetch=0)
    driver = Driver(config, World(no_step={0})).begin()
    load = driver.until(K.LOAD_PROMPTS, 1)
    while not [c for c in driver.pending if c.kind is K.TRAIN]:
        driver.complete(next(c for c in driver.pending if c is not load))
    driver.complete(load)
    assert "ready" in driver.scheduler.status().workers
    driver.complete(driver.find(K.TRAIN, 0))
    assert not [c for c in driver.pending if c.kind is K.GENERATE]
    driver.finish() if not driver.scheduler.finished else driver.check_end()
    assert driver.scheduler.outcome == "failed"


def test_a_failure_aborts_what_it_cannot_use_and_awaits_the_rest() -> None:
    driver = Driver(SchedulerConfig(workers=3, max_staleness=3, max_steps=9)).begin()
    train = driver.until(K.TRAIN, 0)
    while len([c for c in driver.pending if c.kind is K.GENERATE]) < 2:
        driver.complete(next(c for c in driver.pending if c.kind not in (K.GENERATE, K.TRAIN)))
    useless = {c.op for c in driver.pending if c is not train}
    driver.feed(Input(InputKind.FAILED, reason="OSError", message="metrics"))
    assert {c.target for c in driver.notices if c.kind is K.ABORT} == useless
    assert driver.scheduler.state.queue.closed
    driver.complete(train)
    driver.finish()
    assert driver.scheduler.state.train_version == 1, "the step in flight counts"
    assert [r.train_version for r in driver.kinds(RecordKind.CHECKPOINT)] == [1]


def test_an_engine_waits_for_an_export_instead_of_loading_what_is_about_to_be_old() -> None:
    driver = Driver(SchedulerConfig(workers=2, max_staleness=3, max_steps=9)).begin()
    driver.until(K.GENERATE, 1, keep={K.GENERATE})
    slow = driver.find(K.GENERATE, 1)
    driver.complete(driver.find(K.GENERATE, 0))
    driver.complete(driver.find(K.REWARD, 0))
    while not driver.scheduler.state.queue.items():
        driver.complete(next(c for c in driver.pending if c is not slow and c.kind is not K.TRAIN))
    for version in (1, 2):
        driver.complete(driver.find(K.TRAIN))
        export = driver.find(K.EXPORT)
        assert export.version == version
        if version == 1:
            driver.complete(export)
    driver.complete(driver.find(K.GENERATE, 3))
    driver.complete(slow)
    assert driver.scheduler.status().engines == ("draining",)
    driver.complete(export)
    assert driver.find(K.LOAD_WEIGHTS).version == 2
    driver.finish()


def test_a_load_settles_the_sync() -> None:
    driver = Driver(SchedulerConfig(max_steps=3)).begin()
    records = driver.complete(driver.until(K.LOAD_WEIGHTS))
    assert [r.trigger for r in records if r.machine == "engine" and r.kind is RecordKind.TRANSITION] == ["open"]
    driver.finish()


def test_saves_come_at_their_interval_without_a_sync_too() -> None:
    config = SchedulerConfig(sync_interval=3, max_staleness=2, save_interval=1, max_steps=4)
    driver = Driver(config).begin().finish()
    assert [r.train_version for r in driver.kinds(RecordKind.CHECKPOINT)] == [1, 2, 3, 4]


@pytest.mark.parametrize(("interval", "saved"), [(0, []), (2, [2])])
def test_the_last_step_is_saved_only_if_asked(interval: int, saved: list[int]) -> None:
    driver = Driver(SchedulerConfig(save_last=False, save_interval=interval, max_steps=3)).begin().finish()
    assert [r.train_version for r in driver.kinds(RecordKind.CHECKPOINT)] == saved


def test_an_engine_that_ends_a_batch_with_other_weights_is_not_trusted() -> None:
    driver = Driver(SchedulerConfig(max_steps=3)).begin()
    generate = driver.until(K.GENERATE)
    driver.pending.remove(generate)
    driver.feed(Input(InputKind.GENERATED, op=generate.op, rollout_version_first=0, rollout_version_last=1))
    driver.finish()
    assert "reports rollout versions 0 to 1 for batch 0, but version 0 was loaded" in str(driver.scheduler.error)


@pytest.mark.parametrize(("no_step", "outcome"), [({0, 2, 4}, "completed"), ({1, 2}, "failed")])
def test_a_step_ends_the_count_of_batches_without_one(no_step: set[int], outcome: str) -> None:
    config = SchedulerConfig(max_steps=4, max_no_step_batches=2)
    driver = Driver(config, World(no_step=no_step)).begin().finish()
    assert driver.scheduler.outcome == outcome
    if outcome == "failed":
        assert driver.scheduler.error == "2 batches in a row gave no optimiser step (2 no_step)"


def test_idle_workers_are_chosen_by_load_then_weights_then_number() -> None:
    driver = Driver(SchedulerConfig(workers=4, engines=2, max_staleness=3)).begin()
    driver.until(K.GENERATE)
    admissions = [(r.entity, r.engine) for r in driver.kinds(RecordKind.TRANSITION, "admit")]
    assert admissions[:4] == [("rollout-0", 0), ("rollout-1", 1), ("rollout-2", 0), ("rollout-3", 1)]
    state = State(SchedulerConfig(workers=4, engines=2))
    assert [w.index for w in state.idle_workers()] == [0, 1, 2, 3]
    state.engines[1].version = 3
    assert [w.index for w in state.idle_workers()] == [1, 3, 0, 2]
    state.workers[1].batch = 0
    assert [w.index for w in state.idle_workers()] == [0, 2, 1, 3]


def test_starting_is_no_waiting_at_the_train_queue() -> None:
    driver = Driver(SchedulerConfig(max_steps=3, deadlines=Deadlines(queue_s=5, generate_s=0, start_s=0))).begin()
    assert driver.scheduler.next_deadline_ns is None, "nothing to wake up for"
    load = driver.until(K.LOAD_WEIGHTS)
    driver.t_ns += 100_000_000_000
    driver.complete(load)
    driver.feed(Input(InputKind.TICK))
    assert driver.scheduler.error is None
    assert driver.scheduler.next_deadline_ns is not None
    assert driver.scheduler.next_deadline_ns > driver.t_ns
    driver.finish()


def test_a_stopping_run_is_woken_only_for_its_own_deadlines() -> None:
    deadlines = Deadlines(queue_s=5, shutdown_s=30, train_s=0)
    driver = Driver(
        SchedulerConfig(admission="greedy", queue_size=1, max_staleness=3, max_steps=9, deadlines=deadlines)
    ).begin()
    train = driver.until(K.TRAIN, 0)
    driver.complete_all_but(train)
    driver.feed(Input(InputKind.FAILED, reason="OSError", message="metrics"))
    assert driver.scheduler.next_deadline_ns == driver.t_ns + 30_000_000_000
    driver.complete(train)
    driver.finish()


def test_a_batch_taken_from_its_worker_leaves_the_worker_free() -> None:
    driver = Driver(SchedulerConfig(max_staleness=2, workers=3, queue_size=1, max_steps=4)).begin()
    driver.until(K.GENERATE, 2, keep={K.GENERATE})
    generations = {c.batch_id: c for c in driver.pending if c.kind is K.GENERATE}
    for batch in (2, 1, 0):
        driver.complete(generations[batch])
        driver.complete(driver.find(K.REWARD, batch))
    assert driver.scheduler.status().workers == ("queued", "idle", "idle")
    driver.complete(driver.find(K.TRAIN, 2))
    driver.complete(driver.find(K.EXPORT))
    assert driver.find(K.TRAIN).batch_id == 0
    assert driver.scheduler.status().workers == ("idle", "idle", "idle")
    driver.finish()


def test_a_worker_parked_too_long_fails_with_its_batch() -> None:
    deadlines = Deadlines(queue_s=5, train_s=0)
    driver = Driver(SchedulerConfig(admission="greedy", queue_size=1, max_staleness=5, deadlines=deadlines)).begin()
    train = driver.until(K.TRAIN, 0)
    driver.complete_all_but(train)
    driver.feed(Input(InputKind.TICK), at_ns=driver.scheduler.next_deadline_ns)
    assert driver.scheduler.state.counts["failed"] == 1
    assert driver.scheduler.status().workers == ("failed",)
    driver.complete(train)
    driver.finish()


def test_what_hangs_at_the_end_of_a_good_run_makes_it_a_failed_one() -> None:
    driver = Driver(
        SchedulerConfig(max_steps=1, prefetch=2, deadlines=Deadlines(shutdown_s=3, load_prompts_s=0))
    ).begin()
    hung = driver.until(K.LOAD_PROMPTS, 1)
    driver.complete_all_but(hung)
    assert driver.scheduler.status().run == "stopping"
    driver.feed(Input(InputKind.TICK), at_ns=driver.scheduler.next_deadline_ns)
    driver.pending.remove(hung)
    driver.check_end()
    assert driver.scheduler.outcome == "failed"
    assert driver.scheduler.error == "gave up waiting at shutdown for loader: load_prompts of batch 1"


def test_each_further_stop_shortens_the_wait() -> None:
    deadlines = Deadlines(shutdown_s=30, interrupt_s=5, train_s=0, queue_s=0)
    driver = Driver(SchedulerConfig(max_steps=9, deadlines=deadlines)).begin()
    train = driver.until(K.TRAIN, 0)
    driver.complete_all_but(train)
    for _ in range(2):
        driver.feed(Input(InputKind.STOP, reason="sigint"))
    assert driver.scheduler.next_deadline_ns == driver.t_ns + 5_000_000_000
    driver = Driver(SchedulerConfig(max_steps=9, deadlines=deadlines)).begin()
    train = driver.until(K.TRAIN, 0)
    driver.complete_all_but(train)
    driver.feed(Input(InputKind.FAILED, reason="OSError", message="metrics"))
    assert driver.scheduler.next_deadline_ns == driver.t_ns + 30_000_000_000
    for _ in range(2):
        driver.feed(Input(InputKind.STOP, reason="sigint"))
    assert driver.scheduler.next_deadline_ns == driver.t_ns + 5_000_000_000
    driver.complete(train)
    driver.finish()


@pytest.mark.parametrize(("stops", "saved"), [(1, [1, 2]), (2, [])])
def test_what_was_learnt_is_saved_at_the_first_stop_and_not_at_the_second(stops: int, saved: list[int]) -> None:
    driver = Driver(SchedulerConfig(max_staleness=1, max_steps=9)).begin()
    driver.complete(driver.until(K.TRAIN, 0))
    train = driver.until(K.TRAIN, 1)
    for _ in range(stops):
        driver.feed(Input(InputKind.STOP, reason="sigint"))
    if stops == 2:
        assert driver.scheduler.status().trainer == "training", "a step in flight is awaited"
    driver.complete(train)
    driver.finish() if not driver.scheduler.finished else driver.check_end()
    checkpoints = [r.train_version for r in driver.kinds(RecordKind.CHECKPOINT)]
    assert checkpoints == saved[-1:]
    assert driver.scheduler.status().run == "stopped"


def test_a_busy_worker_is_stopped_only_once_its_generation_has_ended() -> None:
    driver = Driver(SchedulerConfig(max_steps=9)).begin()
    generate = driver.until(K.GENERATE)
    for _ in range(2):
        driver.feed(Input(InputKind.STOP, reason="sigint"))
    assert driver.scheduler.status().workers == ("generating",)
    assert driver.scheduler.status().engines == ("open",)
    driver.complete_all_but(generate)
    driver.fail(generate, "aborted")
    driver.check_end()
    assert driver.scheduler.status().workers == ("stopped",)


def test_a_failed_run_ends_in_its_failed_state() -> None:
    driver = Driver(SchedulerConfig(max_steps=9)).begin()
    driver.fail(driver.until(K.REWARD))
    driver.finish()
    assert driver.scheduler.status().run == "failed"


def test_no_batch_is_taken_once_the_run_has_failed() -> None:
    """The failed batch was the one the trainer waited for; without it the other could be trained on in time."""
    driver = Driver(SchedulerConfig(workers=2, engines=2, max_staleness=1, max_steps=9)).begin()
    driver.until(K.GENERATE, 1, keep={K.GENERATE})
    slow = driver.find(K.GENERATE, 0)
    driver.complete_all_but(slow)
    assert [b for b, _ in driver.trained()] == [1]
    assert driver.scheduler.state.queue.items() == (2,)
    driver.fail(slow)
    assert driver.scheduler.status().trainer != "training"
    driver.finish() if not driver.scheduler.finished else driver.check_end()
    assert driver.scheduler.state.counts["cancelled"] >= 1


def test_no_refresh_for_batches_that_are_all_generated() -> None:
    config = SchedulerConfig(admission="greedy", workers=2, max_staleness=0, sync_interval=3, prefetch=1)
    driver = Driver(config, World(prompts=2)).begin()
    driver.until(K.GENERATE, 1, keep={K.GENERATE})
    slow = driver.find(K.GENERATE, 1)
    driver.complete_all_but(slow)
    assert driver.scheduler.status().run == "draining"
    assert driver.scheduler.state.train_version == 1
    assert len(driver.kinds(RecordKind.COMMAND, "export")) == 1, "version 1 would serve nobody"
    driver.complete(slow)
    driver.finish()


def test_a_stop_empties_queue_and_parking() -> None:
    driver = Driver(SchedulerConfig(admission="greedy", queue_size=1, max_staleness=3, max_steps=9)).begin()
    train = driver.until(K.TRAIN, 0)
    driver.complete_all_but(train)
    state = driver.scheduler.state
    assert (state.queue.items(), state.parked) == ((1,), [2])
    driver.feed(Input(InputKind.FAILED, reason="OSError", message="metrics"))
    assert (state.queue.items(), state.parked) == ((), [])
    driver.complete(train)
    driver.finish()
