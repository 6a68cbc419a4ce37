"""Random configurations in random worlds: whatever happens, the run ends and its log accounts for every batch."""

import random
from typing import Any

import pytest

from fsm_trainer.core.config import Deadlines, SchedulerConfig
from fsm_trainer.core.events import NOTICES, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.testing import Effect, FakeBehaviour, Fault, Lognormal, Pareto, Uniform, VirtualRun

C, K, R = CommandKind, InputKind, RecordKind
KINDS = [kind for kind in C if kind not in NOTICES]
ONLY_ON = {
    Effect.NAN: [C.TRAIN],
    Effect.NO_STEP: [C.TRAIN],
    Effect.DEGENERATE: [C.REWARD],
    Effect.WRONG_VERSION: [C.GENERATE, C.LOAD_WEIGHTS, C.TRAIN],
}
STOP = Input(K.STOP, reason="user")


def random_config(rng: random.Random) -> SchedulerConfig:
    admission = rng.choice(["paced", "greedy", "lockstep"])
    staleness, workers = rng.randint(0, 4), rng.randint(1, 4)
    interval = rng.randint(1, staleness + 1 if admission == "lockstep" else 4)
    return SchedulerConfig(
        admission=admission,
        workers=workers,
        engines=rng.randint(1, workers),
        queue_size=rng.randint(1, 3),
        prefetch=rng.randint(0, 3),
        max_staleness=staleness,
        sync_interval=interval,
        max_steps=rng.choice([None, 1, 5, 12]),
        save_interval=rng.choice([0, 1, 3]),
        drop_stale=rng.random() < 0.8,
        save_last=rng.random() < 0.8,
        max_no_step_batches=rng.choice([3, 100]),
        deadlines=Deadlines(generate_s=rng.choice([8, 1800]), queue_s=rng.choice([6, 300]), shutdown_s=3),
    )


def random_behaviour(rng: random.Random, seed: int, max_steps: int | None) -> FakeBehaviour:
    faults = []
    for _ in range(rng.choice([0, 0, 1, 2, 4])):
        effect = rng.choice(list(Effect))
        faults.append(Fault(rng.choice(ONLY_ON.get(effect, KINDS)), effect, nth=rng.randint(1, 8)))
    amounts: list[Any] = [0.0, 1.0, Pareto(0.5, 1.2), Uniform(0, 2), Lognormal(1, 1)]
    batches = rng.choice([0, 1, 7, 15]) if max_steps is None else rng.choice([None, None, 3])
    return FakeBehaviour({kind: rng.choice(amounts) for kind in KINDS}, faults=faults, batches=batches, seed=seed)


def random_events(rng: random.Random, engines: int) -> list[tuple[float, Input]]:
    failed = Input(K.FAILED, reason="OSError", message="metrics")
    died = Input(K.ENGINE_DIED, engine=rng.randrange(engines), message="killed")
    return [(rng.uniform(0, 15), rng.choice([STOP, STOP, failed, died])) for _ in range(rng.choice([0, 0, 1, 2]))]


def check(records: list[Record]) -> None:
    assert [record.seq for record in records] == list(range(len(records)))
    assert [record.kind for record in records].count(R.RUN_END) == 1
    assert records[-1].kind is R.RUN_END
    moves = [record for record in records if record.kind is R.TRANSITION]
    admitted = [move.batch_id for move in moves if (move.machine, move.trigger) == ("rollout", "admit")]
    ended = [
        move.batch_id
        for move in moves
        if move.machine == "batch" and move.dest in ("trained", "dropped", "failed", "cancelled")
    ]
    assert sorted(ended) == sorted(admitted)  # type: ignore[type-var]
    assert len(set(admitted)) == len(admitted)


@pytest.mark.parametrize("block", range(4))
def test_every_run_ends_and_accounts_for_every_batch(block: int) -> None:
    outcomes = set()
    for seed in range(100 * block, 100 * block + 100):
        rng = random.Random(seed)
        config = random_config(rng)
        behaviour = random_behaviour(rng, seed, config.max_steps)
        result = VirtualRun(config, behaviour, events=random_events(rng, config.engines), max_inputs=20_000).run()
        check(result.records)
        outcomes.add(result.outcome)
        steps = [r for r in result.of_kind(R.VERSION) if r.trigger == "step"]
        if result.outcome == "completed" and config.max_steps is not None and behaviour.batches is None:
            assert len(steps) == config.max_steps
        if config.admission != "greedy":
            assert "stale" not in [r.reason for r in result.of_kind(R.DROP)]
    assert outcomes == {"completed", "interrupted", "failed"}
