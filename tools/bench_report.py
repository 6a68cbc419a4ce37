"""Size and time to build of `fsm-replay report` and `timeline`, and their peak memory, for runs of so many steps.

The logs are those of `tools/bench_analysis.py`: two workers, heavy-tailed rollouts, twenty metrics a step. Usage:

    python tools/bench_report.py --steps 1000 100000
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_analysis import EVENTS_PER_STEP, make_log

COMMANDS = {"report": "report.html", "timeline": "trace.json.gz"}
"""What is measured, and the file it writes."""


def measure(run: Path, command: str) -> dict[str, float]:
    """Run the command on a log in a process of its own: seconds, memory, MB written, MB of data in it."""
    output = run / COMMANDS[command]
    arguments = [command, str(run), "-o", str(output)]
    script = f"import sys; from fsm_trainer.cli.replay import main; sys.exit(main({arguments!r}))"
    before = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - before
    assert status == 0, status
    peak = usage.ru_maxrss / 1024
    size = output.stat().st_size
    data = (
        len(output.read_text(encoding="utf-8").split('id="charts">')[1].split("<")[0]) if command == "report" else size
    )
    cpu = usage.ru_utime + usage.ru_stime
    return {"seconds": seconds, "cpu_s": cpu, "peak_mib": peak, "mb": size / 1e6, "data_mb": data / 1e6}


def main() -> None:
    """Make a log for each number of steps, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--commands", nargs="+", choices=[*COMMANDS], default=[*COMMANDS])
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args()
    if not args.json:
        print("   steps   log MB command    seconds  cpu s  peak MiB  file MB of it data")
    for steps in sorted(args.steps):
        with tempfile.TemporaryDirectory() as folder:
            log = make_log(Path(folder), steps * EVENTS_PER_STEP)
            for command in args.commands:
                found = {"steps": steps, "log_mb": log.stat().st_size / 1e6, "command": command}
                found |= measure(Path(folder), command)
                print(json.dumps(found) if args.json else _line(found), flush=True)


def _line(found: dict[str, float | str]) -> str:
    head = "{steps:>8} {log_mb:>8.1f} {command:<9} {seconds:>8.1f} {cpu_s:>6.1f}".format(**found)
    return head + " {peak_mib:>9.0f} {mb:>8.2f} {data_mb:>10.3f}".format(**found)


if __name__ == "__main__":
    main()
