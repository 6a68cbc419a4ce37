"""`fsm-replay summary` and `fsm-replay verify`: how a run went, and whether its decisions can be derived again."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fsm_trainer.cli.replay_args import DIVERGED, OK, add_command


def add(commands: Any) -> None:
    """Add the subcommands."""
    add_command(commands, "summary", _summary, "how it ended, its batches, staleness, and where the time went")
    add_command(commands, "verify", _verify, "derive every decision again from the logged inputs and compare")


def _summary(args: argparse.Namespace) -> int:
    from fsm_trainer.analysis.summary import COLUMNS, summarize_log
    from fsm_trainer.analysis.summary_text import render
    from fsm_trainer.eventlog.reader import read_log

    log = read_log(args.run, columns=COLUMNS)
    summary = summarize_log(log)
    print(json.dumps(summary.to_dict(), indent=2) if args.json else render(summary))
    return DIVERGED if log.damaged else OK


def _verify(args: argparse.Namespace) -> int:
    from fsm_trainer.replay.verify import verify
    from fsm_trainer.replay.verify_text import render, to_json

    result = verify(args.run)
    print(json.dumps(to_json(result), indent=2) if args.json else render(result))
    return OK if result.ok else DIVERGED
