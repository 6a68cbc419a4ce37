"""What vLLM as the rollout engine costs: tokens a second, overhead, weight sync, start; and whether it says it lives.

    python tools/bench_rollout.py [--only throughput|overhead|sync|start|health] [--models tiny,smollm2,qwen3-0.6b]
                                  [--repeats 3] [--threads 1] [--json FILE] [--folder runs/bench-models]

Needs vLLM, so it runs in the environment that `make test-vllm` makes; SmolLM2 needs what examples/smollm2 installs.

- throughput: both engines draw the same batches in turn, each model in 1 process and with as many torch threads.
- overhead: the same requests through our engine and asked of AsyncLLM directly, in turn on one vLLM; the ratio of each
  pair, their median, and what the rollout's way through the pipe of an engine process adds.
- sync: publishing and loading by transport; the share of a training step; what generation loses to a load; on the way,
  the start of each server.
- start: seconds by part of an engine in a process of its own.
- health: milliseconds in which a server answers /health while it generates, scores and loads.

Models are made in --folder once and kept (2 GB). With --json, other parts and models already in the file stay there, so
that all can be measured bit by bit. docs/vllm.md shows its output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rollout_health import health
from rollout_models import MODELS
from rollout_speed import Row, Settings, overhead, throughput
from rollout_starts import start
from rollout_syncs import sync

PARTS: dict[str, Callable[[Settings], Iterator[tuple[str, Row]]]] = {
    "throughput": throughput,
    "overhead": overhead,
    "sync": sync,
    "start": start,
    "health": health,
}
"""Rows, and of which table."""


def written(value: object) -> str:
    """A cell."""
    if not isinstance(value, float):
        return "-" if value is None else str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(rows: Sequence[Row]) -> str:
    """Rows of the same columns, as Markdown."""
    lines = [list(rows[0]), *([written(row[name]) for name in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    return "\n".join([texts[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *texts[1:]])


def measure(part: str, settings: Settings) -> dict[str, list[Row]]:
    """One part's tables, printed; what is measured is told on standard error as it comes."""
    tables: dict[str, list[Row]] = {}
    for title, row in PARTS[part](settings):
        tables.setdefault(title, []).append(row)
        print(f"  {title}: {', '.join(f'{name} {written(value)}' for name, value in row.items())}", file=sys.stderr)
    for title, rows in tables.items():
        print(f"\n{title}\n\n{table(rows)}", flush=True)
    return tables


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be given again (default: all)")
    parser.add_argument("--models", default=",".join(MODELS), help="which of them (default: %(default)s)")
    repeats = "how often each figure is measured, whose median is shown; the overhead and the step of tiny ten times as"
    repeats += " often, a start once (default: 3)"
    parser.add_argument("--repeats", type=int, default=3, help=repeats)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each engine (default: 1)")
    parser.add_argument("--json", type=Path, help="keep the tables there")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-models"), help="where the models are")
    args = parser.parse_args(arguments)
    args.models = tuple(args.models.split(","))
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"--models has {', '.join(sorted(unknown))}, expected some of {', '.join(MODELS)}")
    if args.repeats < 1:
        parser.error(f"--repeats is {args.repeats}, expected at least 1")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    args = parse(sys.argv[1:] if arguments is None else arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    settings = Settings(args.folder, args.models, args.repeats, args.threads)
    found = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else {}
    for part in args.only or PARTS:
        machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        began = time.perf_counter()
        for title, rows in measure(part, settings).items():
            others = [row for row in found.get(title, ()) if row["model"] not in args.models]
            found[title] = others + [{**row, "machine": machine} for row in rows]
        print(f"\n({machine} as it began; {time.perf_counter() - began:.0f} s)", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
