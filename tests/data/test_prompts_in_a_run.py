"""The prompt source under a real scheduler: any order of completions, drops and ends, and no deadlock."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Command, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.data.prompts import PromptBatch, PromptSource
from tests.core.driver import MAX_EVENTS, Driver, World
from tests.data.conftest import CharTokenizer

ENDED = {"trained", "dropped", "failed", "cancelled"}
Pair = tuple[int, int]


def make_source(rows: int, **changes: Any) -> PromptSource:
    options = {"batch_size": 2, "epochs": 2, "seed": 3, "max_prompt_tokens": 8, "may_come_back": True, **changes}
    return PromptSource([{"prompt": f"{i}="} for i in range(rows)], CharTokenizer(), **options)


class RunOnSource(Driver):
    """A scheduler whose prompts come from a source on one loader lane, told of every batch's end as in a run."""

    def __init__(self, config: SchedulerConfig, source: PromptSource, world: World) -> None:
        super().__init__(config, world)
        self.source = source
        self.served: dict[int, PromptBatch] = {}
        self.trained_on: Counter[Pair] = Counter()
        self.nothing: Counter[Pair] = Counter()
        self.given_up: Counter[Pair] = Counter()

    def feed(self, event: Input, *, at_ns: int | None = None) -> list[Record]:
        records = super().feed(event, at_ns=at_ns)
        for r in records:
            if r.kind is RecordKind.TRANSITION and r.machine == "batch" and r.dest in ENDED:
                self.tell(r)
        if any(c.kind is CommandKind.CLOSE_SOURCE for c in self.notices):
            self.source.close()
        return records

    def tell(self, r: Record) -> None:
        assert r.batch_id is not None
        batch = self.served.get(r.batch_id)
        pairs = [] if batch is None else [(batch.epoch, row) for row in batch.row_indices]
        if r.dest == "trained" or r.reason in ("degenerate", "no_step"):
            self.source.settle(r.batch_id)
            (self.trained_on if r.dest == "trained" else self.nothing).update(pairs)
        elif self.source.give_back(r.batch_id, str(r.reason), attempted=r.dest != "cancelled"):
            self.given_up.update(pairs)

    def completion(self, c: Command) -> Input:
        if c.kind is not CommandKind.LOAD_PROMPTS:
            return super().completion(c)
        assert c.batch_id is not None
        batch = self.source.batch(c.batch_id)
        if batch is None:
            return Input(InputKind.EXHAUSTED, op=c.op)
        self.served[c.batch_id] = batch
        return Input(InputKind.LOADED, op=c.op)

    def possible(self) -> list[Command]:
        """What could complete now: of the loader's lane only the first, and not while the source waits."""
        loads = [c for c in self.pending if c.kind is CommandKind.LOAD_PROMPTS]
        ready = [c for c in self.pending if c.kind is not CommandKind.LOAD_PROMPTS]
        return ready if self.source.would_wait else ready + loads[:1]

    def finish(self, rng: random.Random | None = None, stop_after: int | None = None) -> RunOnSource:
        assert rng is not None
        while not self.scheduler.finished:
            possible = self.possible()
            assert possible, f"deadlock: {self.scheduler.status()}"
            assert self.events < MAX_EVENTS, f"livelock: {self.scheduler.status()}"
            if self.events == stop_after:
                self.feed(Input(InputKind.STOP, reason="sigint"))
            else:
                self.complete(possible[rng.randrange(len(possible))])
        self.monitor.finish()
        return self


@settings(max_examples=250)
@given(
    rows=st.integers(2, 9),
    batch_size=st.integers(1, 3),
    drop_last=st.booleans(),
    epochs=st.integers(1, 2),
    max_attempts=st.integers(1, 3),
    admission=st.sampled_from(["greedy", "greedy", "greedy", "paced", "lockstep"]),
    workers=st.integers(1, 3),
    engines=st.integers(1, 2),
    queue_size=st.integers(1, 2),
    prefetch=st.integers(0, 3),
    staleness=st.integers(0, 2),
    interval=st.integers(1, 3),
    odd=st.integers(0, 9),
    limited=st.booleans(),
    stop_after=st.none() | st.integers(5, 80),
    seed=st.integers(0, 10_000),
)
def test_no_order_of_completions_loses_a_prompt_or_deadlocks(
    rows: int,
    batch_size: int,
    drop_last: bool,
    epochs: int,
    max_attempts: int,
    admission: str,
    workers: int,
    engines: int,
    queue_size: int,
    prefetch: int,
    staleness: int,
    interval: int,
    odd: int,
    limited: bool,
    stop_after: int | None,
    seed: int,
) -> None:
    batch_size = min(batch_size, rows)
    source = make_source(
        rows, batch_size=batch_size, drop_last=drop_last, epochs=epochs, max_attempts=max_attempts, seed=seed
    )
    config = SchedulerConfig(
        admission=admission,
        workers=max(workers, engines),
        engines=engines,
        queue_size=queue_size,
        prefetch=prefetch,
        max_staleness=max(staleness, interval - 1) if admission == "lockstep" else staleness,
        sync_interval=interval,
        max_steps=source.total_batches if limited else None,
    )
    world = World(degenerate={odd, odd + 2}, no_step={odd + 1})
    run = RunOnSource(config, source, world).begin()
    run.finish(random.Random(seed), stop_after)  # type: ignore[attr-defined]
    assert run.scheduler.outcome in ("completed", "interrupted")
    every = run.trained_on + run.nothing + run.given_up
    assert all(count == 1 for count in every.values())
    left = make_source(
        rows, batch_size=batch_size, drop_last=drop_last, epochs=epochs, max_attempts=max_attempts, seed=seed
    )
    left.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert left.batches_left == 0 or run.scheduler.outcome == "interrupted" or limited
    batch_id = 0
    while (batch := left.batch(batch_id)) is not None:
        left.settle(batch_id)
        every.update((batch.epoch, row) for row in batch.row_indices)
        batch_id += 1
    kept = rows - source.dropped_rows_per_epoch
    assert all(count == 1 for count in every.values())
    assert Counter(epoch for epoch, _ in every) == dict.fromkeys(range(epochs), kept)


def test_drops_do_happen_above() -> None:
    """Or the property would hold for nothing: fast rollouts on one worker overtake a slow trainer."""
    source = make_source(8, max_attempts=9)
    config = SchedulerConfig(admission="greedy", workers=3, queue_size=2, max_staleness=0, max_steps=8)
    run = RunOnSource(config, source, World()).begin()
    run.finish(random.Random(0))  # type: ignore[attr-defined]
    drops = [r for r in run.records if r.kind is RecordKind.DROP and r.reason == "stale"]
    again = [batch for batch in run.served.values() if batch.attempt > 1]
    assert len(drops) >= 3
    assert again
    assert run.scheduler.state.train_version == 8
    assert sum(run.trained_on.values()) == 16


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_last_batch_dropped_is_generated_again(prefetch: int) -> None:
    """The end of the data must not be told while the last batch can still come back."""
    source = make_source(4, epochs=1)
    config = SchedulerConfig(admission="greedy", workers=2, queue_size=2, prefetch=prefetch, max_staleness=0)
    run = RunOnSource(config, source, World()).begin()
    run.finish(random.Random(1))  # type: ignore[attr-defined]
    assert {batch.attempt for batch in run.served.values()} == {1, 2}
    assert sorted(run.trained_on) == [(0, row) for row in range(4)]
    assert run.scheduler.state.drain_reason == "prompts exhausted"
