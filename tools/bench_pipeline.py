"""How much of the possible overlap the asynchronous pipeline reaches, on the quickstart's tiny recipe.

    python tools/bench_pipeline.py [--repeats 3] [--steps 80]

Runs `grpo` and `async-grpo` in turn and prints medians over the repeats: ms per step of both, the limit of the overlap
(T_rollout + T_train + T_sync) / max(T_rollout, T_train + T_sync) from the synchronous run's own durations, the share of
it reached, the event loop's own cost per batch, and the log's cost per event. docs/performance.md shows its output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fsm_trainer import TrainConfig
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog.schema import log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.presets import preset_settings
from fsm_trainer.trainers import build_trainer
from fsm_trainer.trainers.prepare import prepare

WARM_UP_STEPS = 10
"""Left out of every figure: first calls are slower, and the pipeline has to fill."""


@dataclass(frozen=True)
class Measured:
    """One run, seconds a step."""

    step_s: float
    rollout_s: float
    train_s: float
    sync_s: float
    loop_ms_per_batch: float

    @property
    def limit(self) -> float:
        """Speed-up that perfect overlap of these durations would give."""
        train_side = self.train_s + self.sync_s
        return (self.rollout_s + train_side) / max(self.rollout_s, train_side)


def measure(algo: str, steps: int, seed: int, folder: Path) -> Measured:
    """Train `steps` steps and read the run's metrics."""
    settings = {**preset_settings("quickstart"), "preset": "quickstart", "algo": algo, "seed": seed}
    settings.update(max_steps=steps, output_dir=str(folder), log_samples="none", progress="none", save_interval=0)
    result = build_trainer(prepare(TrainConfig.build(settings))).fit()
    if result.outcome != "completed":
        raise SystemExit(f"the run to measure {result.message}")
    lines = [json.loads(line) for line in result.run.metrics.read_text().splitlines()]
    kept = lines[WARM_UP_STEPS:]
    span_s = kept[-1]["time_s"] - lines[WARM_UP_STEPS - 1]["time_s"]

    def median(*names: str) -> float:
        return statistics.median(sum(line[name] for name in names) for line in kept)

    return Measured(
        step_s=span_s / len(kept),
        rollout_s=median("rollout_s", "reward_s", "materialize_s"),
        train_s=median("train_s"),
        sync_s=median("sync_s"),
        loop_ms_per_batch=result.loop_busy_ns / 1e6 / len(lines),
    )


def log_us_per_event(events: int = 50_000) -> float:
    """Microseconds a row costs the thread that appends it, a step's worth at a time as in a run."""
    row = Record(
        seq=0, t_ns=1, kind=RecordKind.TRANSITION, machine="rollout", entity="rollout-0", trigger="start",
        source="ready", dest="generating", cause_seq=0, batch_id=1, engine=0, train_version=1, reason="because",
    )  # fmt: skip
    rows_per_step = 60
    with tempfile.TemporaryDirectory() as folder:
        log = EventLogWriter(Path(folder) / "events.arrows", metadata=log_metadata(SchedulerConfig(), {}))
        spent_ns = 0
        for start in range(0, events, rows_per_step):
            begin = time.perf_counter_ns()
            for seq in range(start, start + rows_per_step):
                log.append(row._replace(seq=seq))
            log.flush()
            spent_ns += time.perf_counter_ns() - begin
        log.close()
    return spent_ns / 1e3 / events


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default: 3)")
    parser.add_argument("--steps", type=int, default=80, help="optimiser steps a run (default: 80)")
    args = parser.parse_args()
    if args.steps <= WARM_UP_STEPS + 1:
        parser.error(f"--steps is {args.steps}, expected more than {WARM_UP_STEPS + 1}")
    sync_runs, async_runs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(args.repeats):
            sync_runs.append(measure("grpo", args.steps, i, Path(folder) / f"sync-{i}"))
            async_runs.append(measure("async-grpo", args.steps, i, Path(folder) / f"async-{i}"))
    report(sync_runs, async_runs)


def report(sync_runs: list[Measured], async_runs: list[Measured]) -> None:
    """Print the medians; ratios are taken pair by pair, so that they hold when the machine's speed drifts."""

    def ms(runs: list[Measured], name: str) -> float:
        return statistics.median(getattr(run, name) for run in runs) * 1e3

    speedups = [s.step_s / a.step_s for s, a in zip(sync_runs, async_runs, strict=True)]
    shares = [speedup / s.limit for speedup, s in zip(speedups, sync_runs, strict=True)]
    rows = [
        ("synchronous", f"{ms(sync_runs, 'step_s'):.1f} ms a step"),
        ("  rollout + reward", f"{ms(sync_runs, 'rollout_s'):.1f} ms"),
        ("  train", f"{ms(sync_runs, 'train_s'):.1f} ms"),
        ("  sync", f"{ms(sync_runs, 'sync_s'):.1f} ms"),
        ("asynchronous", f"{ms(async_runs, 'step_s'):.1f} ms a step"),
        ("  rollout + reward", f"{ms(async_runs, 'rollout_s'):.1f} ms"),
        ("  train", f"{ms(async_runs, 'train_s'):.1f} ms"),
        ("  sync", f"{ms(async_runs, 'sync_s'):.1f} ms"),
        ("speed-up", f"{statistics.median(speedups):.2f}x"),
        ("limit of the overlap", f"{statistics.median(s.limit for s in sync_runs):.2f}x"),
        ("share of the limit", f"{statistics.median(shares):.1%}"),
        ("event loop", f"{statistics.median(r.loop_ms_per_batch for r in async_runs):.2f} ms a batch"),
        ("event log", f"{log_us_per_event():.1f} us an event"),
    ]
    for name, value in rows:
        print(f"{name:<22} {value}")


if __name__ == "__main__":
    main()
