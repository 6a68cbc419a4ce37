"""`fsm-replay compact`: turns a finished run's log into one small file that every command reads the same."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fsm_trainer.cli.replay_args import OK, add_command


def add(commands: Any) -> None:
    """Add the subcommand."""
    compact = add_command(commands, "compact", _compact, "turn the log of a run that ended into one small file")
    compact.add_argument(
        "--to", choices=["arrow", "parquet"], default="arrow", help="format of the file (default: arrow)"
    )


def _compact(args: argparse.Namespace) -> int:
    from fsm_trainer.eventlog.compact import compact

    done = compact(args.run, args.to)
    values = {
        "path": str(done.path),
        "events": done.events,
        "bytes_before": done.bytes_before,
        "bytes_after": done.bytes_after,
    }
    if args.json:
        print(json.dumps(values, indent=2))
    elif not done.bytes_before:
        print(f"nothing to compact: {done.path} holds {done.events} events in {done.bytes_after} bytes")
    else:
        each = done.bytes_after / max(done.events, 1)
        print(
            f"{done.events} events: {done.bytes_before} bytes are now {done.bytes_after} ({each:.1f} an event) "
            f"in {done.path}"
        )
    return OK
