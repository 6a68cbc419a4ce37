"""`fsm-replay samples`: prints completions for reading, or as JSON lines. Changes nothing."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsm_trainer.cli.replay_args import OK, add_command, count, number, whole_number

if TYPE_CHECKING:
    import pandas as pd

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def add(commands: Any) -> None:
    """Add the subcommand."""
    samples = add_command(commands, "samples", _samples, "print the kept completions with their rewards")
    samples.add_argument("--batch", type=whole_number, metavar="ID", help="only this prompt batch")
    samples.add_argument("--worst", type=count, metavar="K", help="the K of least reward, the worst first")
    samples.add_argument("--best", type=count, metavar="K", help="the K of most reward, the best first")
    samples.add_argument("--dropped", action="store_true", help="only those of batches that were dropped")


def _samples(args: argparse.Namespace) -> int:
    """Print what the options select, or say that it is nothing."""
    from fsm_trainer.analysis.samples import load_samples

    frame = _select(load_samples(args.run), args)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    if not rows:
        print("fsm-replay: note: no sample is like that", file=sys.stderr)
    for row in rows:
        print(json.dumps(_plain(row)) if args.json else "\n".join(_lines(row)) + "\n")
    return OK


def _select(frame: pd.DataFrame, args: argparse.Namespace) -> pd.DataFrame:
    import pandas as pd

    if args.batch is not None:
        frame = frame[frame["batch_id"] == args.batch]
    if args.dropped:
        frame = frame[frame["state"] == "dropped"]
    if args.worst is None and args.best is None:
        return frame
    # Equal rewards stay in the order of the run; samples without one are neither good nor bad.
    ranked = frame[frame["reward"].notna()].sort_values("reward", kind="stable")
    best = ranked.sort_values("reward", ascending=False, kind="stable").head(args.best or 0)
    chosen: pd.DataFrame = pd.concat([ranked.head(args.worst or 0), best])
    return chosen


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in row.items()}


def _lines(row: dict[str, Any]) -> Iterator[str]:
    """One sample: what it is and what it was worth, then the prompt and the completion."""
    state = row["state"] if row["reason"] is None else f"{row['state']} ({row['reason']})"
    versions = sorted({row["rollout_version_first"], row["rollout_version_last"]})
    yield (
        f"batch {row['batch_id']}  row {row['row']}  sample {row['sample']}  reward {number(row['reward'])}  "
        f"advantage {number(row['advantage'])}  {state}"
    )
    parts = [f"{name[7:]} {number(value)}" for name, value in row.items() if name.startswith("reward_")]
    length = len(row["tokens"]) - row["prompt_len"]
    about = f"version {'-'.join(map(str, versions))}, {length} tokens{_spans(row)}, finish {row['finish_reason']}"
    yield "  " + "; ".join([about, *parts])
    for name in ("prompt", "completion"):
        yield from _block(name, row[name])


def _spans(row: dict[str, Any]) -> str:
    """Which version drew how many of the tokens; files of older runs do not say, and most samples have one version."""
    spans = row.get("version_spans")
    if spans is None or len(spans) < 2:
        return ""
    return " (" + ", then ".join(f"{span['tokens']} of version {span['version']}" for span in spans) + ")"


def _block(name: str, text: str) -> Iterator[str]:
    # A completion may hold anything, and must not steer the terminal.
    shown = _CONTROL.sub(lambda match: repr(match.group())[1:-1], text)
    yield f"  {name}:"
    yield from (f"  | {line}" for line in shown.split("\n"))
