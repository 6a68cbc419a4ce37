"""What the event log costs and gives: bytes an event, time to log, verify, summarize and compact, and memory.

The log is a simulated run's, written as a run writes it, with random durations and eight metrics a step.

python tools/bench_log.py [--events 1000000] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, InputKind, Record, RecordKind
from fsm_trainer.eventlog.compact import compact
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.replay.verify import verify
from fsm_trainer.runtime.loop import Sink
from fsm_trainer.testing import FakeBehaviour, Lognormal, MemorySink, VirtualRun

EVENTS_A_STEP = 50
METRICS = ("reward", "loss", "ratio", "kl", "grad_norm", "entropy", "gap", "tokens")
DURATIONS = {
    CommandKind.GENERATE: Lognormal(0.05, 0.3),
    CommandKind.REWARD: Lognormal(0.005, 0.3),
    CommandKind.TRAIN: Lognormal(0.1, 0.1),
    CommandKind.EXPORT: Lognormal(0.004, 0.1),
    CommandKind.LOAD_WEIGHTS: Lognormal(0.003, 0.1),
}


class Metrics:
    """Observes a run as its metrics do: some rows after each step."""

    def __init__(self) -> None:
        """With numbers of no meaning."""
        self._rng = random.Random(0)

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        """Rows for a train step that has ended."""
        if records[0].trigger != InputKind.TRAINED.value:
            return ()
        cause, version = records[0].seq, records[0].train_version
        return [
            Record(
                -1, 0, RecordKind.METRIC, "trainer", cause_seq=cause, train_version=version, value=value, reason=name
            )
            for name, value in ((name, self._rng.random()) for name in METRICS)
        ]


def run_into(sink: Sink | None, steps: int) -> VirtualRun:
    """A run of so many steps."""
    run = VirtualRun(
        SchedulerConfig(max_steps=steps),
        FakeBehaviour(durations=dict(DURATIONS)),
        sink=sink,
        observers=[Metrics()],
        max_inputs=100 * steps + 1000,
    )
    run.run()
    return run


def write_log_of(directory: Path, steps: int) -> None:
    """Write the log, and print what that costs a row."""
    config = SchedulerConfig(max_steps=steps)
    began = time.process_time()
    log = EventLogWriter(directory / LOG_NAME, metadata=log_metadata(config, {}))
    busy = run_into(log, steps).loop.busy_ns
    log.close()
    total = time.process_time() - began
    events = read_log(directory, columns=["seq"]).table.num_rows
    # A part is enough to know what the loop costs without a file, and its rows stay in memory.
    fewer = min(steps, 2000)
    kept = MemorySink()
    began = time.process_time()
    bare = run_into(kept, fewer).loop.busy_ns / len(kept.records)
    bare_total = (time.process_time() - began) / len(kept.records)
    size = (directory / LOG_NAME).stat().st_size
    print(f"events                      {events}")
    print(f"live log                    {size / 1e6:.1f} MB, {size / events:.0f} bytes an event")
    print(f"logging, the loop's thread  {(busy / events - bare) / 1e3:.1f} us an event")
    print(f"logging, all threads        {(total / events - bare_total) * 1e6:.1f} us an event")


def time_verify(directory: Path) -> None:
    """Print how fast the log is read and verified."""
    verify_began = time.process_time()
    result = verify(directory)
    spent = time.process_time() - verify_began
    assert result.ok and result.complete, result
    events = result.inputs + result.decisions + result.metrics
    began = time.process_time()
    read_log(directory)
    reading = time.process_time() - began
    print(f"read                        {events / reading:,.0f} events/s")
    print(f"verify                      {events / spent:,.0f} events/s, reading included")


# A child's peak as the system reports it to its parent includes the parent's own from before the child began.
_COMMAND = """
import resource, sys
from fsm_trainer.cli.replay import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
with open("/proc/self/status") as file:
    peak = next(line.split()[1] for line in file if line.startswith("VmHWM:"))
print(code, used.ru_utime + used.ru_stime, int(peak) / 1e3, file=sys.stderr)
"""


def time_command(name: str, directory: Path) -> None:
    """Print what a command takes as a user calls it, start of Python included."""
    began = time.perf_counter()
    command = [sys.executable, "-c", _COMMAND, name, str(directory)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True)
    wall = time.perf_counter() - began
    code, processor, peak = done.stderr.split()
    assert code == "0", done.stderr
    print(f"fsm-replay {name:<17}{wall:.2f} s, of the processor {float(processor):.2f} s, {float(peak):.0f} MB at most")


def time_compaction(directory: Path, form: str) -> None:
    """Print the size of a compacted copy, what it took, and a summary of it."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        shutil.copy(directory / LOG_NAME, folder)
        began = time.process_time()
        done = compact(folder, form)
        spent = time.process_time() - began
        each = done.bytes_after / done.events
        print(f"compacted to {form:<15}{done.bytes_after / 1e6:.1f} MB, {each:.1f} bytes an event, in {spent:.1f} s")
        if form == "arrow":
            time_command("summary", Path(folder))


def main() -> None:
    """Measure it all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="about so many (default: 1000000)")
    parser.add_argument("--keep", type=Path, help="leave the log in this new folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = args.keep or Path(folder) / "run"
        directory.mkdir(parents=True)
        write_log_of(directory, max(args.events // EVENTS_A_STEP, 1))
        time_verify(directory)
        for name in ("summary", "verify"):
            time_command(name, directory)
        for form in ("arrow", "parquet"):
            time_compaction(directory, form)


if __name__ == "__main__":
    main()
