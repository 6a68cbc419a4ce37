"""`fsm-replay export`: a run's numbers for TensorBoard, W&B or trackio, or its frames as Parquet or CSV."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fsm_trainer.cli.output import writing
from fsm_trainer.cli.replay_args import DIVERGED, OK, add_command, tell_problem

_FORMATS = ("tensorboard", "wandb", "trackio", "parquet", "csv")


def add(commands: Any) -> None:
    """Add the subcommand."""
    export = add_command(commands, "export", _export, "write a run's numbers for another tool")
    export.add_argument("--to", required=True, choices=_FORMATS, help="the tool, or the kind of file")
    export.add_argument("-o", "--output", metavar="DIR", help="folder to write to (default: RUN/export/TO)")


def _export(args: argparse.Namespace) -> int:
    from fsm_trainer.eventlog.reader import find_log, read_log
    from fsm_trainer.tracking.export import export_log

    folder = find_log(args.run).parent / "export" / args.to if args.output is None else _folder(args.output)
    log = read_log(args.run)
    with writing(folder, "folder with -o DIR"):
        done = export_log(log, args.to, folder)
    print(json.dumps(done, indent=2) if args.json else _text(done))
    tell_problem(log)
    return DIVERGED if log.damaged else OK


def _folder(given: str) -> Path:
    path = Path(given)
    if not given or (path.exists() and not path.is_dir()):
        raise ValueError(f"-o is {given[:200]!r}, expected a folder to write to")
    return path


def _text(done: dict[str, Any]) -> str:
    if "rows" in done:
        files = ", ".join(f"{name} ({rows} rows)" for name, rows in done["rows"].items())
        return f"{done['folder']}: {files}"
    look = {
        "tensorboard": f"tensorboard --logdir {done['folder']}",
        "wandb": f"wandb sync {done['folder']}/wandb/offline-run-*",
        "trackio": f"TRACKIO_DIR={done['folder']} trackio show --project fsm_trainer",
    }
    return f"{done['folder']}: {done['points']} steps; look at them with: {look[done['to']]}"
