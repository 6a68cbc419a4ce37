"""Simulated runs that between them take every way a batch, an engine and a run can go."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.engines.fake_behaviour import Effect, FakeBehaviour, Fault
from fsm_trainer.simulate.durations import Durations, Lognormal, Pareto
from fsm_trainer.simulate.virtual import VirtualRun

_TAILED = Durations.of(
    rollout_s=Pareto(0.4, 1.6), train_s=Lognormal(0.5, 0.3), reward_s=0.05, sync_s=0.1, tokens=[40, 90]
)
_FAULTS = (
    Fault(CommandKind.REWARD, Effect.DEGENERATE, nth=3),
    Fault(CommandKind.REWARD, Effect.DEGENERATE, nth=4),
    Fault(CommandKind.TRAIN, Effect.NO_STEP, nth=5),
)
_EXPORT = {**_TAILED.operations, CommandKind.EXPORT: 0.07, CommandKind.SAVE: 0.2, CommandKind.LOAD_PROMPTS: 0.01}

WORLDS: dict[str, tuple[SchedulerConfig, FakeBehaviour]] = {
    "paced": (SchedulerConfig(max_steps=40), FakeBehaviour(_EXPORT)),
    "paced, own engines, saves": (
        SchedulerConfig(max_steps=60, workers=3, engines=2, max_staleness=4, sync_interval=2, save_interval=9),
        FakeBehaviour(_EXPORT, faults=_FAULTS, seed=2),
    ),
    "greedy, drops": (
        SchedulerConfig(max_steps=60, workers=4, engines=4, queue_size=1, admission="greedy"),
        FakeBehaviour(_EXPORT, faults=_FAULTS, tokens=[40, 90, 300], seed=3),
    ),
    "lockstep": (
        SchedulerConfig(max_steps=50, workers=2, admission="lockstep", max_staleness=3, sync_interval=2, queue_size=1),
        FakeBehaviour(_EXPORT, faults=_FAULTS, seed=4),
    ),
    "fails": (
        SchedulerConfig(max_steps=50, workers=2, engines=2, max_staleness=2),
        FakeBehaviour(_EXPORT, faults=(Fault(CommandKind.GENERATE, Effect.RAISE, nth=17),), seed=5),
    ),
    "runs out of prompts": (
        SchedulerConfig(max_steps=50, workers=3, max_staleness=2),
        FakeBehaviour(_EXPORT, batches=20, seed=6),
    ),
    "goes on from version 7": (
        SchedulerConfig(max_steps=12, max_staleness=1, first_version=7, first_batch=11),
        FakeBehaviour(_EXPORT, seed=7),
    ),
}


class Measures:
    """An observer that logs metrics at each step, as a live run does: one of them not a number, one now and then."""

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        makers = {"step": _metrics, "load": _costs}
        told = [(r, makers[r.trigger or ""]) for r in records if r.kind is RecordKind.VERSION]
        return [row for r, make in told for row in make(r)]


def _costs(load: Record) -> list[Record]:
    """Of loads of odd versions, the bytes of some only."""
    version = load.rollout_version_last or 0
    values = {"sync_pause_s": version / 8, "sync_transfer_s": version / 4, "sync_resume_s": version / 16}
    values |= {"sync_bytes": 1000.0 * version} if version % 3 else {}
    common = {"machine": "engine", "cause_seq": load.seq, "engine": load.engine, "rollout_version_last": version}
    return [
        Record(-1, load.t_ns, RecordKind.METRIC, reason=name, value=value, **common)  # type: ignore[arg-type]
        for name, value in values.items()
        if version % 2
    ]


def _metrics(step: Record) -> list[Record]:
    version = step.train_version or 0
    values = {"reward_mean": version / 8, "tokens": 3.0 * version, "ratio_mean": 1.0 + version / 64}
    values |= {"approx_kl": float("nan")} if version == 3 else {"approx_kl": version / 1024}
    values |= {"eval/reward": -float(version)} if version % 5 == 0 else {}
    common = {"machine": "trainer", "cause_seq": step.seq, "train_version": version, "batch_id": step.batch_id}
    rows = [
        Record(-1, step.t_ns, RecordKind.METRIC, reason=name, value=value, **common)  # type: ignore[arg-type]
        for name, value in values.items()
    ]
    return [_as_rate(row, 1.0 + version % 3) if row.reason == "ratio_mean" else row for row in rows]


def _as_rate(row: Record, weight: float) -> Record:
    return row._replace(numerator=(row.value or 0.0) * weight, denominator=weight)


@cache
def records_of(name: str) -> tuple[SchedulerConfig, tuple[Record, ...]]:
    """The configuration and the log of one world."""
    config, behaviour = WORLDS[name]
    run = VirtualRun(config, behaviour, observers=[Measures()], events=_events(name))
    result = run.run()
    assert result.outcome == ("failed" if name == "fails" else "completed"), result.error
    return config, tuple(result.records)


def _events(name: str) -> list[tuple[float, Input]]:
    """Something nobody asked for, which must not shift a figure."""
    return [(3.0, Input(InputKind.TICK))] if name == "paced" else []
