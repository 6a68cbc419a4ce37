"""Random configurations, completion orders, stops and faults: every run ends, and its history keeps the invariants.

The exhaustive counterpart is the explorer; this is the quick net. A failure prints the seed, which reproduces it.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import NON_FINITE, Command, CommandKind, Input, InputKind, RecordKind
from tests.core.driver import MAX_EVENTS, Driver, World

RUNS_PER_TEST = 100


def random_config(rng: random.Random, admission: str) -> SchedulerConfig:
    workers = rng.randint(1, 3)
    interval = rng.randint(1, 3)
    return SchedulerConfig(
        admission=admission,
        workers=workers,
        engines=rng.randint(1, workers),
        queue_size=rng.randint(1, 3),
        prefetch=rng.randint(0, 2),
        max_staleness=rng.randint(interval - 1 if admission == "lockstep" else 0, 3),
        sync_interval=interval,
        max_steps=rng.choice([None, 7, 12]),
        save_interval=rng.choice([0, 3]),
        max_no_step_batches=30,
        sync_mode="drain" if admission == "lockstep" else rng.choice(["drain", "inflight"]),
        on_engine_failure="fail" if admission == "lockstep" else rng.choice(["fail", "restart"]),
        max_engine_restarts=2,
    )


def random_world(rng: random.Random, config: SchedulerConfig) -> World:
    share = rng.choice([0.0, 0.3])
    return World(
        prompts=rng.choice([0, 1, 12]) if config.max_steps is None else rng.choice([None, 0, 9]),
        degenerate={i for i in range(200) if rng.random() < share},
        no_step={i for i in range(200) if rng.random() < share},
    )


def complete(driver: Driver, command: Command, rng: random.Random) -> None:
    """A generation comes with any versions that the engine may have had meanwhile."""
    event = driver.completion(command)
    if command.kind is CommandKind.GENERATE and driver.config.inflight:
        assert command.version is not None and command.engine is not None
        state = driver.scheduler.state
        first = rng.randint(command.version, state.newest_on(state.engines[command.engine]))
        last = rng.randint(first, state.newest_on(state.engines[command.engine]))
        event = replace(event, rollout_version_first=first, rollout_version_last=last)
    driver.pending.remove(command)
    driver.feed(event)


def disturb(driver: Driver, rng: random.Random) -> None:
    """One stop, death, failure, late tick, or completion that nobody waits for."""
    choice = rng.randrange(6)
    if choice == 0:
        driver.feed(Input(InputKind.STOP, reason="sigterm"))
    elif choice == 1:
        death = Input(InputKind.ENGINE_DIED, engine=rng.randrange(driver.config.engines), message="killed")
        for _ in range(rng.choice([1, 1, 2])):
            if not driver.scheduler.finished:
                driver.feed(death)
    elif choice == 2:
        command = rng.choice(driver.pending)
        driver.fail(
            command,
            reason=NON_FINITE if command.kind is CommandKind.TRAIN else rng.choice(["ValueError", "EngineLost"]),
        )
    elif choice == 3:
        deadline = driver.scheduler.next_deadline_ns
        late = [c for c in driver.pending if driver.scheduler.state.ops[c.op].deadline_ns == deadline]
        driver.feed(Input(InputKind.TICK), at_ns=deadline)
        for command in late:
            driver.complete(command) if not driver.scheduler.finished else driver.pending.remove(command)
    else:
        event = driver.completion(rng.choice(driver.pending))
        driver.feed(Input(event.kind, op=event.op if choice == 4 else 10**6, train_version=event.train_version))


def run(seed: str, admission: str, disturbances: int) -> Driver:
    rng = random.Random(seed)
    config = random_config(rng, admission)
    driver = Driver(config, random_world(rng, config)).begin()
    moments = {rng.randint(1, 80) for _ in range(disturbances)}
    while not driver.scheduler.finished:
        assert driver.pending, f"deadlock in seed {seed}: {driver.scheduler.status()}"
        assert driver.events < MAX_EVENTS, f"livelock in seed {seed}"
        if driver.events in moments:
            moments.discard(driver.events)
            disturb(driver, rng)
        else:
            command = rng.choice(driver.pending)
            aborted = driver.scheduler.state.ops[command.op].aborted
            driver.fail(command) if aborted and rng.random() < 0.5 else complete(driver, command, rng)
        driver.pending = [c for c in driver.pending if c.op in driver.scheduler.state.ops]
    return driver.check_end()


@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
@pytest.mark.parametrize("block", range(4))
def test_undisturbed_runs_complete(admission: str, block: int) -> None:
    for i in range(RUNS_PER_TEST):
        driver = run(f"{admission}-{block}-{i}", admission, 0)
        assert driver.scheduler.outcome == "completed", (block, i, driver.scheduler.error)
        if driver.config.max_steps is not None and driver.world.prompts is None:
            assert driver.scheduler.state.train_version == driver.config.max_steps


@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
@pytest.mark.parametrize("block", range(4))
def test_disturbed_runs_end_with_everything_accounted_for(admission: str, block: int) -> None:
    for i in range(RUNS_PER_TEST):
        run(f"disturbed-{admission}-{block}-{i}", admission, 1 + i % 3)


def test_every_edge_is_taken() -> None:
    from fsm_trainer.core.machines import TABLES

    taken: set[tuple[str | None, str | None, str | None]] = set()
    for i in range(400):
        for admission in ("paced", "greedy", "lockstep"):
            rows = run(f"edges-{admission}-{i}", admission, i % 4).kinds(RecordKind.TRANSITION)
            taken |= {(r.machine, r.trigger, r.source) for r in rows}
    missing = {
        (name, e.trigger, e.source.value)
        for name, (_, _, edges) in TABLES.items()
        for e in edges
        if (name, e.trigger, e.source.value) not in taken
    }
    # Stale batches under the raise policy and a parked worker's timeout have tests of their own.
    assert missing <= {("batch", "fail", "queued"), ("trainer", "fail", "checking"), ("batch", "fail", "rewarded")}


def test_the_same_inputs_give_the_same_records() -> None:
    first, second = (run("twice-4", "paced", 0).records for _ in range(2))
    assert first == second
    assert any(r.trigger == CommandKind.TRAIN.value for r in first)
