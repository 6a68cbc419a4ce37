"""Writes the golden logs of this version: small runs that every later version must still read and verify.

They go into tests/golden/VERSION. Until that version is released they may be made anew; after that never, for they
stand for the logs that users have.

python tools/make_golden.py [--into tests/golden]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.eventlog.compact import compact
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter, write_log
from fsm_trainer.testing import Durations, Effect, Fault, Happening, Lognormal, SimResult, simulate

SLOW = Durations.of(rollout_s=Lognormal(1.0, 1.0), train_s=0.5, reward_s=0.1, sync_s=0.05)
THREE_STEPS = ["--preset", "quickstart", "--max-steps", "3", "--log-samples", "none", "--progress", "none"]


def write(result: SimResult, directory: Path, segment_bytes: int = 0) -> None:
    """Write a simulated run's log as a run would."""
    directory.mkdir()
    metadata = log_metadata(result.config, {"simulated": True, "seed": result.seed})
    with EventLogWriter(directory / LOG_NAME, metadata=metadata, segment_bytes=segment_bytes) as log:
        for record in result.records:
            log.append(record)
            if record.seq % 40 == 39:
                log.flush()


def make_paced(root: Path) -> None:
    """Several workers and engines, checkpoints; the log in several files."""
    config = SchedulerConfig(workers=3, engines=2, max_staleness=2, sync_interval=2, save_interval=3, max_steps=8)
    write(simulate(config, seed=1, durations=SLOW), root / "paced", segment_bytes=60_000)


def make_greedy(root: Path) -> None:
    """Batches dropped as stale, as degenerate, and for want of a step."""
    config = SchedulerConfig(admission="greedy", workers=3, engines=3, max_steps=5)
    faults = [Fault(CommandKind.REWARD, Effect.DEGENERATE, batch_id=2)]
    faults += [Fault(CommandKind.TRAIN, Effect.NO_STEP, batch_id=number) for number in (5, 6, 7)]
    result = simulate(config, seed=3, durations=SLOW, faults=faults)
    assert set(result.drops) == {"stale", "degenerate", "no_step"}, result.drops
    write(result, root / "greedy")


def make_lockstep(root: Path) -> None:
    """Compacted to Arrow. Without checkpoints, at which lockstep does more."""
    config = SchedulerConfig(
        admission="lockstep", workers=2, max_staleness=2, sync_interval=2, max_steps=8, save_last=False
    )
    write(simulate(config, seed=4, durations=SLOW), root / "lockstep")
    compact(root / "lockstep", "arrow")


def make_failure(root: Path) -> None:
    """An engine's call fails, and the run with it."""
    config = SchedulerConfig(workers=2, max_steps=8)
    result = simulate(config, seed=5, durations=SLOW, faults=[Fault(CommandKind.GENERATE, Effect.RAISE, batch_id=3)])
    assert result.outcome == "failed"
    write(result, root / "failure")


def make_stop(root: Path) -> None:
    """Stopped twice. Compacted to Parquet."""
    config = SchedulerConfig(workers=2, max_steps=50)
    stops = [Happening(at, Input(InputKind.STOP, reason="sigint")) for at in (25, 27)]
    result = simulate(config, seed=6, durations=SLOW, faults=stops)
    assert result.outcome == "interrupted"
    write(result, root / "stop")
    compact(root / "stop", "parquet")


def make_real(root: Path) -> None:
    """A real run of the quickstart, with metrics."""
    command = [sys.executable, "-m", "fsm_trainer.cli.train", *THREE_STEPS, "--output-dir", "run"]
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        subprocess.run(command, cwd=folder, check=True)
        (root / "real").mkdir()
        shutil.copy(Path(folder, "run", LOG_NAME), root / "real" / LOG_NAME)


def make_edited(root: Path) -> None:
    """`paced` with one decision changed and all checksums right: it must diverge there."""
    log = read_log(root / "paced")
    rows = list(records(log.table))
    at = next(row.seq for row in rows if row.kind is RecordKind.TRANSITION and row.dest == "trained" and row.batch_id)
    edited: list[Record] = [*rows[:at], rows[at]._replace(dest="dropped"), *rows[at + 1 :]]
    (root / "edited").mkdir()
    write_log(root / "edited" / LOG_NAME, edited, log.metadata)


def main() -> None:
    """Make them all anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[1] / "tests" / "golden")
    root = parser.parse_args().into / version("fsm-trainer")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for make in (make_paced, make_greedy, make_lockstep, make_failure, make_stop, make_real, make_edited):
        make(root)
    print(f"{sum(path.stat().st_size for path in root.rglob('*') if path.is_file())} bytes in {root}")


if __name__ == "__main__":
    main()
