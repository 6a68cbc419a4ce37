"""`fsm-replay report`: writes a run as one HTML file that works offline."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fsm_trainer.cli.output import output_file, whole_file
from fsm_trainer.cli.replay_args import DIVERGED, OK, add_command, tell_problem


def add(commands: Any) -> None:
    """Add the subcommand."""
    text = "write one HTML file with charts, figures, samples and advice in words; it works offline"
    report = add_command(commands, "report", _report, text)
    report.add_argument("-o", "--output", metavar="FILE", help="where to write it (default: RUN/report.html)")


def _report(args: argparse.Namespace) -> int:
    from fsm_trainer.eventlog.reader import read_log
    from fsm_trainer.report.build import build_report

    log = read_log(args.run)
    path = output_file(args.output, log.path.parent / "report.html")
    report = build_report(log)
    with whole_file(path) as file:
        file.write_text(report.html, encoding="utf-8")
    if args.json:
        found = {"path": str(path), "bytes": path.stat().st_size, "charts": report.charts}
        print(json.dumps({**found, "advice": report.advice.to_dict()}, indent=2))
    else:
        print("\n".join([*report.advice.sentences, f"{path}: {path.stat().st_size / 1e6:.1f} MB"]))
    tell_problem(log)
    return DIVERGED if log.damaged else OK
