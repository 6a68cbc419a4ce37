"""The three admissions on hand-made schedules."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, Input, InputKind, RecordKind
from tests.core.driver import Driver, World

K = CommandKind


def start(world: World | None = None, **config: Any) -> Driver:
    """A begun run, driven to the moment its first generation is pending."""
    driver = Driver(SchedulerConfig(**config), world or World()).begin()
    driver.until(K.GENERATE)
    return driver


def operations(driver: Driver) -> list[tuple[str | None, int | None, int | None]]:
    """(command, batch, version) of generations and steps in the order they were issued."""
    rows = driver.kinds(RecordKind.COMMAND)
    return [(r.trigger, r.batch_id, r.train_version) for r in rows if r.trigger in ("generate", "train")]


@pytest.mark.parametrize("admission", ["paced", "lockstep"])
@pytest.mark.parametrize("seed", range(5))
def test_staleness_zero_is_the_synchronous_sequence(admission: str, seed: int) -> None:
    config = SchedulerConfig(admission=admission, max_staleness=0, max_steps=6, queue_size=2, workers=2)
    driver = Driver(config).begin().finish(random.Random(seed))
    expected = [step for i in range(6) for step in (("generate", i, i), ("train", i, i))]
    assert operations(driver) == expected


def test_paced_overlaps_generation_with_training_within_the_bound() -> None:
    driver = start(max_staleness=1, max_steps=4)
    driver.complete(driver.find(K.GENERATE, 0))
    driver.complete(driver.find(K.REWARD, 0))
    train = driver.find(K.TRAIN, 0)
    driver.until(K.GENERATE, 1)
    assert train in driver.pending, "batch 1 is generated while batch 0 is trained"
    driver.complete(driver.find(K.GENERATE, 1))
    driver.complete(driver.find(K.REWARD, 1))
    assert not [c for c in driver.pending if c.kind in (K.GENERATE, K.TRAIN) and c.batch_id == 2]
    driver.finish()
    assert driver.trained()[:2] == [(0, 0), (1, 0)]


def test_paced_waits_for_an_older_batch_rather_than_letting_it_go_stale() -> None:
    driver = start(max_staleness=1, workers=2, max_steps=4)
    driver.until(K.GENERATE, 1)
    driver.complete(driver.find(K.GENERATE, 1))
    driver.complete(driver.find(K.REWARD, 1))
    # Both batches have deadline 1: the younger may go first, since the older still fits after it.
    driver.complete(driver.find(K.TRAIN, 1))
    driver.until(K.LOAD_PROMPTS, 3)
    assert not [c for c in driver.pending if c.kind is K.TRAIN], "batch 0 must be next, whatever is finished"
    driver.finish()
    assert [b for b, _ in driver.trained()][:2] == [1, 0]
    assert not driver.kinds(RecordKind.DROP)


def test_paced_takes_an_older_batch_from_its_worker_past_a_full_queue() -> None:
    driver = start(max_staleness=4, workers=3, queue_size=1, max_steps=6)
    driver.until(K.GENERATE, 2, keep={K.GENERATE})
    generations = {c.batch_id: c for c in driver.pending if c.kind is K.GENERATE}
    for batch in (2, 1, 0):
        driver.complete(generations[batch])
        driver.complete(driver.find(K.REWARD, batch))
    assert driver.find(K.TRAIN).batch_id == 2
    assert driver.scheduler.state.queue.items() == (1,)
    assert driver.scheduler.state.parked == [0]
    driver.complete(driver.find(K.TRAIN, 2))
    driver.complete(driver.find(K.EXPORT))
    assert driver.find(K.TRAIN).batch_id == 0, "same deadline, lower id"
    assert driver.kinds(RecordKind.QUEUE, "take_parked")
    driver.finish()


def test_greedy_fills_the_queue_and_drops_what_went_stale() -> None:
    driver = Driver(SchedulerConfig(admission="greedy", max_staleness=0, queue_size=2, max_steps=3)).begin()
    driver.until(K.TRAIN, 0)
    train = driver.find(K.TRAIN, 0)
    driver.complete(train)
    driver.finish()
    assert [version for _, version in driver.trained()] == [0, 1, 2]


def test_greedy_produces_while_the_trainer_is_busy() -> None:
    driver = Driver(SchedulerConfig(admission="greedy", max_staleness=2, queue_size=2, workers=2, max_steps=9)).begin()
    train = driver.until(K.TRAIN, 0)
    driver.complete_all_but(train)
    assert len(driver.scheduler.state.queue) == 2
    assert len(driver.scheduler.state.parked) == 2, "both workers are parked at the full queue"
    assert [w.machine.cause for w in driver.scheduler.state.workers] == ["queue_full", "queue_full"]
    driver.finish()
    drops = driver.kinds(RecordKind.DROP)
    assert drops
    assert all(r.reason == "stale" and r.staleness is not None and r.staleness > 2 for r in drops)


def test_stale_batches_fail_the_run_when_they_may_not_be_dropped() -> None:
    config = SchedulerConfig(
        admission="greedy", max_staleness=2, queue_size=2, workers=2, max_steps=9, drop_stale=False
    )
    driver = Driver(config).begin()
    train = driver.until(K.TRAIN, 0)
    driver.complete_all_but(train)
    driver.finish()
    assert driver.scheduler.outcome == "failed"
    assert "is stale: staleness 3 > max_staleness 2" in str(driver.scheduler.error)


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("interval", [1, 2])
def test_lockstep_gives_one_sequence_whatever_the_order_of_completions(staleness: int, interval: int) -> None:
    def sequence(seed: int) -> list[tuple[int | None, int | None]]:
        config = SchedulerConfig(
            admission="lockstep",
            workers=3,
            engines=2,
            max_staleness=staleness,
            sync_interval=interval,
            max_steps=12,
            queue_size=1,
        )
        world = World(degenerate={3, 4}, no_step={6})
        return Driver(config, world).begin().finish(random.Random(seed)).trained()

    assert len({tuple(sequence(seed)) for seed in range(12)}) == 1


def test_lockstep_alias_needs_no_transfer() -> None:
    config = SchedulerConfig(admission="lockstep", max_staleness=0, max_steps=3)
    driver = Driver(config, World(degenerate={1})).begin().finish()
    assert [r.train_version for r in driver.kinds(RecordKind.SYNC, "alias")] == [1]
    assert driver.trained() == [(0, 0), (2, 1), (3, 2)]


@pytest.mark.parametrize("admission", ["paced", "greedy"])
def test_refresh_publishes_when_generation_would_stop(admission: str) -> None:
    config = SchedulerConfig(admission=admission, max_staleness=0, sync_interval=3, max_steps=4)
    driver = Driver(config).begin().finish()
    assert [v for _, v in driver.trained()] == [0, 1, 2, 3]


def test_max_steps_is_met_exactly_and_no_work_is_thrown_away() -> None:
    config = SchedulerConfig(max_staleness=3, workers=3, max_steps=5)
    driver = Driver(config).begin().finish(random.Random(3))
    assert driver.scheduler.state.train_version == 5
    assert driver.scheduler.state.counts == {"admitted": 5, "trained": 5, "dropped": 0, "failed": 0, "cancelled": 0}


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("prompts", [0, 1, 5])
def test_exhausted_prompts_end_the_run_with_every_batch_trained(prefetch: int, prompts: int) -> None:
    config = SchedulerConfig(max_staleness=2, workers=2, prefetch=prefetch)
    driver = Driver(config, World(prompts=prompts)).begin().finish(random.Random(1))
    assert driver.scheduler.outcome == "completed"
    assert driver.scheduler.state.counts["trained"] == prompts


def test_prefetch_loads_ahead_of_admission_and_no_further() -> None:
    driver = start(prefetch=2, max_staleness=0)
    driver.complete_all_but(driver.find(K.GENERATE))
    assert driver.scheduler.state.prompts == {1: True, 2: True}


def test_a_sync_closes_the_gate_and_waits_for_the_engines_own_work() -> None:
    driver = start(max_staleness=2, workers=2, max_steps=9)
    running = driver.until(K.GENERATE, 1, keep={K.GENERATE})
    driver.complete(driver.find(K.GENERATE, 0))
    driver.until(K.EXPORT, keep={K.GENERATE})
    engine = driver.scheduler.state.engines[0]
    assert engine.machine.state.value == "draining", "the gate closes when the sync is due"
    driver.complete_all_but(running)
    assert (engine.machine.state.value, engine.version) == ("draining", 0)
    assert engine.machine.cause == "generating"
    newest = driver.scheduler.state.newest_publication
    driver.complete(running)
    assert driver.find(K.LOAD_WEIGHTS).version == newest > 0, "older snapshots are skipped"
    driver.finish()


def test_engines_do_not_wait_for_each_other() -> None:
    driver = start(max_staleness=3, workers=2, engines=2, max_steps=9)
    running = driver.until(K.GENERATE, 1, keep={K.GENERATE})
    driver.complete_all_but(running)
    first, second = driver.scheduler.state.engines
    assert first.version > second.version == 0
    driver.finish()


def test_snapshots_are_released_once_nobody_needs_them() -> None:
    driver = Driver(SchedulerConfig(max_steps=5)).begin().finish()
    exported = [r.train_version for r in driver.kinds(RecordKind.COMMAND, "export")]
    released = [c.version for c in driver.notices if c.kind is K.RELEASE_SNAPSHOT]
    assert sorted(released) == exported


@pytest.mark.parametrize(("staleness", "interval"), [(1, 1), (3, 2), (4, 2)])
def test_lockstep_keeps_few_publications(staleness: int, interval: int) -> None:
    config = SchedulerConfig(
        admission="lockstep", max_staleness=staleness, sync_interval=interval, workers=2, max_steps=15
    )
    driver = Driver(config).begin()
    rng = random.Random(0)
    most = 0
    while not driver.scheduler.finished:
        driver.complete(driver.pending[rng.randrange(len(driver.pending))])
        most = max(most, len(driver.scheduler.state.held))
    assert most <= staleness // interval + 1


def test_checkpoints_come_at_the_interval_and_the_last_step_is_always_saved() -> None:
    driver = Driver(SchedulerConfig(max_steps=7, save_interval=3)).begin().finish()
    assert [r.train_version for r in driver.kinds(RecordKind.CHECKPOINT)] == [3, 6, 7]


def test_batches_without_a_step_are_limited() -> None:
    world = World(degenerate=range(2, 100))
    driver = Driver(SchedulerConfig(max_steps=50, max_no_step_batches=4), world).begin().finish()
    assert driver.scheduler.outcome == "failed"
    assert driver.scheduler.error == (
        "4 batches in a row gave no optimiser step (4 degenerate); degenerate: within each prompt group all rewards "
        "were equal, so there is nothing to prefer"
    )
    assert [r.train_version for r in driver.kinds(RecordKind.CHECKPOINT)] == [2], "what was learnt is saved"


def test_external_rollouts_bring_their_own_stamps() -> None:
    config = SchedulerConfig(admission="greedy", external_rollouts=True, max_steps=3, max_staleness=1)
    driver = Driver(config).begin()
    for _ in range(3):
        generate = driver.until(K.GENERATE)
        driver.pending.remove(generate)
        driver.feed(Input(InputKind.GENERATED, op=generate.op, rollout_version_first=0, rollout_version_last=0))
        driver.complete(driver.until(K.REWARD))
        driver.until(K.GENERATE)
    assert [(r.batch_id, r.staleness) for r in driver.kinds(RecordKind.DROP)] == [(2, 2)]
    assert driver.trained() == [(0, 0), (1, 0)]


def test_external_rollouts_from_the_future_are_refused() -> None:
    driver = Driver(SchedulerConfig(external_rollouts=True, max_steps=3)).begin()
    generate = driver.until(K.GENERATE)
    driver.pending.remove(generate)
    driver.feed(Input(InputKind.GENERATED, op=generate.op, rollout_version_first=4, rollout_version_last=4))
    driver.finish()
    assert driver.scheduler.error == "batch 0 claims rollout version 4, but train_version is 0"
