"""`fsm-replay timeline`: writes a run as a trace for the Perfetto UI or chrome://tracing."""

from __future__ import annotations

import argparse
import gzip
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO, cast

from fsm_trainer.cli.output import output_file, whole_file
from fsm_trainer.cli.replay_args import DIVERGED, OK, add_command, tell_problem


def add(commands: Any) -> None:
    """Add the subcommand."""
    timeline = add_command(commands, "timeline", _timeline, "write a Chrome/Perfetto trace of every machine")
    timeline.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="where to write it (default: RUN/trace.json); .gz compresses, which the Perfetto UI reads as well",
    )


def _timeline(args: argparse.Namespace) -> int:
    from fsm_trainer.analysis.timeline import COLUMNS, pick, write_timeline
    from fsm_trainer.eventlog.reader import read_log

    log = read_log(args.run, columns=COLUMNS, take=pick)
    path = output_file(args.output, log.path.parent / "trace.json")
    with whole_file(path) as file, ExitStack() as stack:
        counts = write_timeline(log, _open(file, stack))
    if args.json:
        print(json.dumps({"path": str(path), "bytes": path.stat().st_size, **counts}, indent=2))
    else:
        shown = ", ".join(f"{count} {name}" for name, count in counts.items())
        print(f"{path}: {shown}; open it at ui.perfetto.dev or chrome://tracing")
    tell_problem(log)
    return DIVERGED if log.damaged else OK


def _open(path: Path, stack: ExitStack) -> TextIO:
    if path.suffix == ".gz":
        return cast("TextIO", stack.enter_context(gzip.open(path, "wt", compresslevel=3, encoding="utf-8")))
    return stack.enter_context(path.open("w", encoding="utf-8", buffering=1 << 20))
