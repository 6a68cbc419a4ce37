"""`fsm-replay`: looks at a finished, running or crashed run through its event log. Run `fsm-replay --help`.

Each subcommand is a module `replay_*.py` with `add(commands)`; only these print. Exit codes: 0 all is well, 1 the log
diverges or is damaged, 2 bad usage or no run. Everything heavy is imported by the subcommand that needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from fsm_trainer.cli import (
    replay_compact,
    replay_diagram,
    replay_diff,
    replay_events,
    replay_export,
    replay_recover,
    replay_report,
    replay_samples,
    replay_staleness,
    replay_summary,
    replay_timeline,
    replay_watch,
    replay_whatif,
)
from fsm_trainer.cli.replay_args import INTERRUPTED, OK, USAGE, Parser
from fsm_trainer.cli.streams import open_closed_streams

COMMANDS = (
    replay_summary,
    replay_events,
    replay_samples,
    replay_report,
    replay_staleness,
    replay_timeline,
    replay_watch,
    replay_diff,
    replay_diagram,
    replay_whatif,
    replay_recover,
    replay_compact,
    replay_export,
)
"""In the order of `--help`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the process's exit code."""
    if argv is None:
        open_closed_streams()
    args = _parser().parse_args(argv)
    try:
        code: int = args.handler(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone, as with `| head`. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except ValueError as error:
        print(f"fsm-replay: error: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"fsm-replay: error: {args.run[:80]} cannot be read: {error.strerror or error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parser() -> Parser:
    parser = Parser(prog="fsm-replay", description="Look at a run through its event log.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
