"""`fsm-replay staleness`: how stale the consumed batches were, why, what it cost, and what dropping did to the rest."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_trainer.cli.output import output_file, whole_file
from fsm_trainer.cli.replay_args import DIVERGED, OK, add_command, count, number, tell_problem

if TYPE_CHECKING:
    import pandas as pd

    from fsm_trainer.analysis.staleness_report import StalenessReport

_BAR = 24
"""Characters of the longest bar."""
_EFFECTS = {"reward_mean": "reward", "ratio_mean": "ratio", "ratio_max": "max", "approx_kl": "KL", "logprob_gap": "gap"}
_LEGEND = (
    "reward: mean; ratio, max: mean and largest importance ratio; gap: trainer's to rollout's logprobs, nats a token",
    "KL: of the policy that sampled to the trained one, nats a token (approx_kl); - where nothing was trained",
    "note: staleness goes with time (the first batch is fresh), so rows differ in more than it: compare near steps",
)
_PARTS = {"staleness_in_flight": "in flight", "staleness_in_queue": "in queue"}


def add(commands: Any) -> None:
    """Add the subcommand."""
    staleness = add_command(commands, "staleness", _staleness, "how stale batches were, why, and what it cost")
    staleness.add_argument(
        "--by", choices=("step", "batch"), default="step", help="list steps (default), or every batch"
    )
    staleness.add_argument(
        "--rows", type=count, default=20, metavar="N", help="at most so many rows of steps (default: 20)"
    )
    staleness.add_argument("--plot", metavar="FILE", help="draw it, too, into a .png, .svg or .pdf file")


def _staleness(args: argparse.Namespace) -> int:
    from fsm_trainer.analysis.staleness_report import COLUMNS, staleness_report
    from fsm_trainer.eventlog.reader import read_log

    log = read_log(args.run, columns=COLUMNS)
    report = staleness_report(log, args.rows)
    if args.plot is not None:
        _plot(report, args.plot)
    print(json.dumps(report.to_dict(), indent=2) if args.json else "\n".join(_text(report, args.by)))
    tell_problem(log)
    return DIVERGED if log.damaged else OK


def _plot(report: StalenessReport, name: str) -> None:
    from fsm_trainer.analysis.staleness_plot import SUFFIXES, draw

    if Path(name).suffix not in SUFFIXES:
        raise ValueError(f"--plot is {name[:80]!r}, expected a file that ends in {', '.join(SUFFIXES)}")
    path = output_file(name, Path(name))
    with whole_file(path) as file:
        draw(report, file)
    print(f"fsm-replay: note: drawn into {path}", file=sys.stderr)


def _text(report: StalenessReport, by: str) -> Iterator[str]:
    frame = report.batches
    if frame.empty:
        yield "no batch was consumed"
        return
    states = ", ".join(f"{n} {state}" for state, n in frame["state"].astype(str).value_counts().items())
    parts = ", ".join(f"{frame[name].mean():.2f} {words}" for name, words in _PARTS.items())
    known = frame["staleness"]
    trained = known[frame["state"] == "trained"]
    of_trained = f", of the trained {trained.mean():.2f}" if len(trained) else ""
    yield f"{len(frame)} batches consumed: {states}"
    yield f"mean staleness of the consumed {known.mean():.2f} ({parts}){of_trained}"
    yield ""
    yield from _lines(_value_rows(report.by_value))
    yield from _LEGEND
    yield ""
    yield f"{'':{_BAR}}  █ in flight, ░ in queue"
    yield from _lines(_step_rows(report.by_step) if by == "step" else _batch_rows(frame))
    yield ""
    yield from _bias_text(report)


def _value_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    counts = ("staleness", "trained", "dropped")
    return [
        {
            **{name: str(row[name]) for name in counts},
            **{words: f"{row[name]:.2f}" for name, words in _PARTS.items()},
            **_effects(row),
        }
        for row in table.to_dict("records")
    ]


def _step_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    longest = float(table["staleness"].max())
    return [
        {
            "": _bar(row, longest),
            "steps": f"{row['first_step']}-{row['last_step']}",
            "staleness": f"{row['staleness']:.2f}",
            "max ": f"{row['staleness_max']:.0f}",
            "dropped": str(row["dropped"]),
            **_effects(row),
        }
        for row in table.to_dict("records")
    ]


def _batch_rows(frame: pd.DataFrame) -> list[dict[str, str]]:
    longest = float(frame["staleness"].max())
    plain = frame.astype(object).where(frame.notna(), None)
    return [
        {
            "": _bar(row, longest),
            "batch": str(row["batch_id"]),
            "step": "-" if row["step"] is None else str(row["step"]),
            "state": f"{row['state']} ({row['reason']})" if row["reason"] else str(row["state"]),
            "staleness": number(row["staleness"]),
            **_effects(row),
        }
        for row in plain.to_dict("records")
    ]


def _bar(row: Mapping[Any, Any], longest: float) -> str:
    """The two parts of a staleness, one after the other, to the scale of the longest."""
    flight, queue = (float(row[name] or 0.0) for name in _PARTS)
    scale = _BAR / longest if longest > 0 else 0.0
    solid = round(flight * scale)
    return ("█" * solid + "░" * (round((flight + queue) * scale) - solid)).ljust(_BAR)


def _effects(row: Mapping[Any, Any]) -> dict[str, str]:
    return {words: number(row[name]) for name, words in _EFFECTS.items()}


def _bias_text(report: StalenessReport) -> Iterator[str]:
    """What was trained on against what was generated and not trained on."""
    table = report.bias
    if not len(table):
        return
    length = "tokens of a sample" if report.samples_kept else "tokens of a batch"
    yield from _lines(
        [
            {
                "batches that were": row["group"],
                "count": str(row["batches"]),
                length: _with_z(row, "tokens"),
                "truncated": "-" if math.isnan(row["truncated"]) else f"{100 * row['truncated']:.1f} %",
                "reward ": _with_z(row, "reward"),
                "s to generate": _with_z(row, "generate_s"),
            }
            for row in table.to_dict("records")
        ]
    )
    if len(table) == 1:
        yield f"every batch that was generated was {table['group'].iloc[0]}"
    yield from report.findings


def _with_z(row: Mapping[Any, Any], name: str) -> str:
    z = row[f"{name}_z"]
    return number(row[name]) if math.isnan(z) else f"{number(row[name])} (z {z:+.1f})"


def _lines(rows: list[dict[str, str]]) -> list[str]:
    """The rows under their names, the first column to the left."""
    names = list(rows[0])
    widths = [max(len(name.strip()), *(len(row[name]) for row in rows)) for name in names]
    cells = [[name.strip() for name in names], *([row[name] for name in names] for row in rows)]
    return [
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
