"""`fsm-replay recover`: cuts off what a crash left at the end of a log, and says what was lost."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from fsm_trainer.cli.replay_args import OK, add_command

if TYPE_CHECKING:
    from fsm_trainer.eventlog.recover import Recovery


def add(commands: Any) -> None:
    """Add the subcommand."""
    recover = add_command(commands, "recover", _recover, "cut off what a crash left at the end of a log")
    recover.add_argument(
        "--force", action="store_true", help="cut even where the log is damaged, and lose the events after it"
    )


def _recover(args: argparse.Namespace) -> int:
    from fsm_trainer.eventlog.recover import recover

    done = recover(args.run, force=args.force)
    print(json.dumps(_values(done), indent=2) if args.json else "\n".join(_lines(done, force=args.force)))
    return OK


def _values(done: Recovery) -> dict[str, Any]:
    return {
        "path": str(done.path),
        "events": done.events,
        "complete": done.complete,
        "removed_bytes": done.removed_bytes,
        "copies": [str(copy) for copy in done.copies],
        "problem": done.problem,
    }


def _lines(done: Recovery, *, force: bool) -> list[str]:
    state = "the run ended" if done.complete else "the run crashed after them"
    if done.problem is None:
        return [f"nothing to recover: {done.events} events, all good; {state}"]
    copies = ", ".join(copy.name for copy in done.copies)
    lost = "all events after these" if force else "what was being written when the run died"
    return [
        f"cut off {done.removed_bytes} bytes, kept in {copies}: {done.problem}",
        f"{done.events} events are left; {state}; lost is {lost}"
        + ("" if force else " (a train step or a save begins only once the events before it are written)"),
    ]
