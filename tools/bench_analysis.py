"""Time and peak memory of reading a log and of each frame of `fsm_trainer.analysis`, each in a process of its own.

The log is that of a simulated run: two workers, heavy-tailed rollouts, twenty metrics a step. Usage:

    python tools/bench_analysis.py --events 10000000
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.engines.fake_behaviour import FakeBehaviour
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.simulate.durations import Durations, Lognormal
from fsm_trainer.simulate.virtual import VirtualRun

EVENTS_PER_STEP = 60
"""About what this configuration logs, twenty of them metrics."""
FRAMES = ("batches_frame", "steps_frame", "residency_frame", "staleness_frame", "sync_frame")
METRICS = ("reward_mean", "loss", "ratio_mean", "approx_kl", *(f"metric_{number}" for number in range(16)))


class _Metrics:
    """Twenty numbers a step, as a live run logs them."""

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        """Rows for each optimiser step."""
        return [row for r in records if r.kind is RecordKind.VERSION and r.trigger == "step" for row in _rows(r)]


def _rows(step: Record) -> list[Record]:
    version = step.train_version or 0
    row = Record(-1, step.t_ns, RecordKind.METRIC, machine="trainer", cause_seq=step.seq, train_version=version)
    return [row._replace(reason=name, value=version / (1 + place)) for place, name in enumerate(METRICS)]


def make_log(folder: Path, events: int) -> Path:
    """Simulate a run of about so many events into the folder; the log's file."""
    config = SchedulerConfig(max_steps=max(events // EVENTS_PER_STEP, 1), workers=2, max_staleness=2)
    durations = Durations.of(rollout_s=Lognormal(0.6, 0.7), train_s=0.5, reward_s=0.05, sync_s=0.02)
    behaviour = FakeBehaviour(durations.operations, durations.tokens)
    with EventLogWriter(folder / LOG_NAME, metadata=log_metadata(config, {"simulated": True})) as log:
        run = VirtualRun(config, behaviour, sink=log, observers=[_Metrics()], max_inputs=10 * events)
        assert run.run().outcome == "completed"
    return folder / LOG_NAME


def measure(log: Path, what: str) -> str:
    """Run one part in a process of its own; its line."""
    command = [sys.executable, __file__, "--log", str(log), "--part", what]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run_part(log: Path, what: str) -> None:
    """Do one part and print what it took."""
    import fsm_trainer.analysis as analysis

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begin = time.perf_counter()
    if what in FRAMES:
        rows = len(getattr(analysis, what)(log))
    else:
        events = analysis.load_events(log)
        rows = len(events)
        for name in FRAMES if what == "load_events and all five" else ():
            getattr(analysis, name)(events)
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what:<26} {rows:>12,} {seconds:>9.1f} {peak:>10,.0f} {peak - before:>10,.0f}")


def main() -> None:
    """Make the log unless one is given, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="about how many the log has")
    parser.add_argument("--log", type=Path, help="measure this log")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        run_part(args.log, args.part)
        return
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        log = args.log or make_log(Path(folder), args.events)
        made = time.perf_counter() - begin
        print(f"log of {log.stat().st_size / 2**20:,.0f} MiB, made in {made:.0f} s")
        print(f"{'part':<26} {'rows':>12} {'seconds':>9} {'peak MiB':>10} {'of it own':>10}")
        for what in ("load_events", *FRAMES, "load_events and all five"):
            print(measure(log, what), flush=True)


if __name__ == "__main__":
    main()
