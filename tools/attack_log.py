"""Attacks the event log: bytes changed, batches and files swapped, disks that fill up, runs killed with -9.

Whatever happens, a true beginning of the log is read, what is lacking is said, and everything that was written before a
step or a save began is there. Exits 1 at the first breach.

python tools/attack_log.py [--kills 50] [--fills 20] [--edits 3000] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from log_edits import edit_files

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Command, CommandKind
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.eventlog.compact import compact, same_rows
from fsm_trainer.eventlog.layout import later_segments
from fsm_trainer.eventlog.reader import EventLog, read_log
from fsm_trainer.eventlog.recover import recover
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.replay.verify import verify
from fsm_trainer.runtime.loop import EventLoop
from fsm_trainer.testing import FakeBehaviour, VirtualClock, VirtualWorld

_ACKNOWLEDGED = (CommandKind.TRAIN, CommandKind.SAVE)
"""When one of these is handed out, its row and all before it are in the file."""


def write_run(directory: Path, steps: int, segment_bytes: int, tell: Callable[[int], None]) -> str:
    """Run fake engines in virtual time with a real log; `tell` gets the op of each command that needs its row.

    Returns the outcome. Raises OSError when the log cannot be closed.
    """
    config = SchedulerConfig(max_steps=steps, workers=2, engines=2, max_staleness=2, save_interval=7)
    clock = VirtualClock()
    world = VirtualWorld(FakeBehaviour(durations={CommandKind.GENERATE: 0.05}).fresh(), clock)

    def dispatch(command: Command) -> None:
        if command.kind in _ACKNOWLEDGED:
            tell(command.op)
        world.dispatch(command)

    log = EventLogWriter(directory / LOG_NAME, metadata=log_metadata(config, {}), segment_bytes=segment_bytes)
    with log:
        return EventLoop(Scheduler(config), log, world, dispatch, clock).run()


def child(directory: Path, steps: int, segment_bytes: int, file_limit: int) -> int:
    """A run in a process of its own, which writes each op that it tells of to standard output."""
    if file_limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    told = os.dup(sys.stdout.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where the loop's log lines go
    try:
        return write_run(directory, steps, segment_bytes, lambda op: _tell(told, op)) != "completed"
    except OSError:
        return 3


def _tell(fd: int, op: int) -> None:
    os.write(fd, f"{op}\n".encode())


def start(directory: Path, steps: int, segment_bytes: int, file_limit: int = 0) -> subprocess.Popen[bytes]:
    """Start `child`."""
    directory.mkdir(exist_ok=True)
    arguments = ["--child", str(directory), str(steps), str(segment_bytes), str(file_limit)]
    return subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE)


def kill_one(directory: Path, rng: random.Random) -> str:
    """Kill a run after some of its steps; what was found. AssertionError at a breach."""
    process = start(directory, steps=100_000, segment_bytes=rng.choice([0, 20_000, 60_000]))
    assert process.stdout is not None
    acknowledged = [int(process.stdout.readline()) for _ in range(rng.randrange(1, 80))]
    process.kill()
    acknowledged += [int(line) for line in process.stdout.read().split()]
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    return check_crashed(directory, acknowledged[-1])


def fill_one(directory: Path, rng: random.Random, *, file_limit: bool) -> str:
    """Let a run's disk fill up, by a limit on a file's size or because the file system is full."""
    segments = 0 if file_limit else rng.choice([0, 30_000])
    process = start(directory, 100_000, segments, rng.randrange(4_000, 300_000) if file_limit else 0)
    assert process.stdout is not None
    acknowledged = [int(line) for line in process.stdout.read().split()]
    process.stdout.close()
    assert process.wait() in (1, 3), "a run that cannot log fails"
    if not file_limit:
        (directory / "ballast").unlink(missing_ok=True)
    return check_crashed(directory, acknowledged[-1] if acknowledged else -1)


def check_crashed(directory: Path, acknowledged: int) -> str:
    """What is there is true, holds what was acknowledged, and recovers to a log that verifies and compacts."""
    try:
        log = read_log(directory)
    except ValueError:
        if acknowledged >= 0:
            raise
        return "no log yet"
    assert not log.damaged, log.problem
    assert not log.complete
    assert log.table.num_rows > acknowledged, (log.table.num_rows, acknowledged)
    rows = recover(directory).events
    assert rows == log.table.num_rows
    again = read_log(directory)
    assert again.problem is None, again.problem
    assert same_rows(again.table, log.table)
    result = verify(directory)
    assert result.ok, result.divergence
    compact(directory)
    assert same_rows(read_log(directory).table, log.table)
    return "torn" if log.problem is not None else "clean"


def check_edited(directory: Path, original: EventLog) -> str:
    """A log that was edited reads as a true beginning, or not at all; and is whole only if it is the same."""
    try:
        log = read_log(directory)
    except ValueError:
        return "refused"
    rows = log.table.num_rows
    assert same_rows(log.table, original.table.slice(0, rows)), "rows that were never written"
    assert log.metadata == original.metadata
    if log.problem is None:
        assert log.complete == (rows == original.table.num_rows)
        return "unchanged" if log.complete else "crashed"
    recover(directory, force=True)
    again = read_log(directory)
    assert again.problem is None, again.problem
    assert same_rows(again.table, log.table)
    return "damaged" if log.damaged else "torn"


def attack_by_edits(folder: Path, count: int, rng: random.Random) -> Counter[str]:
    """So many random edits of one log in several files."""
    whole = folder / "whole"
    whole.mkdir()
    write_run(whole, 12, 40_000, lambda op: None)
    original = read_log(whole)
    files = {path.name: path.read_bytes() for path in [original.path, *later_segments(original.path)]}
    assert len(files) > 3
    found: Counter[str] = Counter()
    target = folder / "edited"
    for _ in range(count):
        edited = dict(files)
        how = edit_files(edited, rng)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for name, data in edited.items():
            (target / name).write_bytes(data)
        found[f"{how}: {check_edited(target, original)}"] += 1
    return found


def attack_by_kills(folder: Path, count: int, rng: random.Random) -> Counter[str]:
    """So many runs killed with -9."""
    return Counter(kill_one(folder / f"kill-{number}", rng) for number in range(count))


def attack_by_full_disks(folder: Path, count: int, rng: random.Random) -> Counter[str]:
    """So many runs whose file may not grow, or whose file system (if one can be mounted here) is full."""
    found = Counter(fill_one(folder / f"fill-{number}", rng, file_limit=True) for number in range(count))
    mounted = folder / "small"
    mounted.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", mounted], capture_output=True).returncode:
        found["no file system could be mounted"] += 1
        return found
    try:
        for _ in range(count):
            for path in mounted.iterdir():
                shutil.rmtree(path)
            (mounted / "run").mkdir()
            # Freed before the log is recovered, which needs room for a copy.
            (mounted / "run" / "ballast").write_bytes(bytes(rng.randrange(300_000, 400_000)))
            found["file system: " + fill_one(mounted / "run", rng, file_limit=False)] += 1
    finally:
        subprocess.run(["umount", mounted], check=True)
    return found


def main() -> int:
    """Attack, and print how often what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="runs to kill (default: 50)")
    parser.add_argument("--fills", type=int, default=20, help="runs whose disk fills up (default: 20)")
    parser.add_argument("--edits", type=int, default=3000, help="edits of a log (default: 3000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(Path(args.child[0]), *map(int, args.child[1:]))
    rng = random.Random(args.seed)
    attacks = {"edits": attack_by_edits, "fills": attack_by_full_disks, "kills": attack_by_kills}
    with tempfile.TemporaryDirectory() as folder:
        for name, attack in attacks.items():
            count = getattr(args, name)
            found = attack(Path(folder), count, rng) if count else Counter()
            print(f"{name}: {count}, no breach")
            for what, times in sorted(found.items()):
                print(f"  {what:<28}{times:>6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
