"""How `fsm-replay watch` shows a snapshot of a run: a panel for terminals, plain lines elsewhere."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fsm_trainer.cli.replay_args import number

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_BAR = 24
Snapshot = dict[str, Any]


def panel(s: Snapshot, path: str) -> Group:
    """The whole view."""
    machines = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("machine", "state", "for", "batch", "waits"):
        machines.add_column(name, justify="right" if name in ("for", "batch") else "left", no_wrap=name != "waits")
    for row in s["machines"]:
        style = "dim" if row["cause"] else "red" if row["state"] in ("failed", "broken") else ""
        machines.add_row(*machine_cells(row), style=style)
    parts: list[Any] = [Text(clean(f"{path}  {outcome(s)}"), style="bold")]
    if s["max_steps"]:
        # Alone it would end without a line break.
        bar = Table.grid()
        bar.add_row(ProgressBar(total=s["max_steps"], completed=s["step"], width=60))
        parts.append(bar)
    parts += [Text(line) for line in figures(s)]
    parts += [Text(""), machines, Text(""), *(Text(line) for line in histogram(s)), *(Text(t) for t in events(s))]
    return Group(*parts)


def plain(s: Snapshot, path: str) -> str:
    """The same without a terminal."""
    rows = [machine_cells(row) for row in s["machines"]]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    lines = [clean(f"{path}  {outcome(s)}"), *figures(s)]
    lines += ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows]
    return "\n".join([*lines, *histogram(s), *events(s)])


def outcome(s: Snapshot) -> str:
    """How it stands, or how it ended."""
    if s["outcome"] is not None:
        return f"{s['outcome']}: {s['message']}" if s["message"] else str(s["outcome"])
    return "crashed: the log has no run_end" if s["state"] == "crashed" else str(s["run"])


def figures(s: Snapshot) -> list[str]:
    """Steps, rates, queue, versions and batches, a line each."""
    of = f" of {s['max_steps']}" if s["max_steps"] else ""
    metrics = "".join(f"  {name.removesuffix('_mean')} {number(value)}" for name, value in s["metrics"].items())
    versions = ", ".join(f"engine-{engine} {version}" for engine, version in s["rollout_versions"].items())
    batches = ", ".join(f"{count} {state}" for state, count in s["batches"].items())
    lines = [
        f"step {s['step']}{of}  {duration(s['elapsed_s'])}  newest minute: {s['steps_per_s']:.3g} steps/s, "
        f"{s['tokens_per_s']:.0f} generated tokens/s{metrics}",
        f"queue {s['queue']['length']} of {s['queue']['size']}  versions: trainer {s['train_version']}, "
        f"{versions or 'no engine'}",
        f"batches: {batches or 'none'}",
    ]
    if s["problem"] is not None:
        lines.append(clean(f"log: {s['problem']}"))
    return lines


def machine_cells(row: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """Name, state, since when, batch, and what it waits for."""
    batch = "" if row["batch"] is None else f"{row['batch']}"
    waits = "" if row["waits"] is None else f"waits {row['waits']}"
    # A stopped machine stays so: nothing to wait for.
    since = "" if row["state"] == "stopped" else duration(row["for_s"])
    return row["machine"], row["state"], since, batch, waits


def histogram(s: Snapshot) -> list[str]:
    """Trained batches by staleness."""
    most = max(s["staleness"].values(), default=0)
    return [
        f"staleness {value:>3}  {'#' * max(1, round(_BAR * count / most)):<{_BAR}}  {count}"
        for value, count in s["staleness"].items()
    ]


def events(s: Snapshot) -> list[str]:
    """The newest drops and errors."""
    drops = [
        f"drop   {d['at_s']:9.3f} s  batch {d['batch']}, {d['reason']}, staleness {d['staleness']}" for d in s["drops"]
    ]
    errors = [
        clean(f"error  {e['at_s']:9.3f} s  {e['what']} {e['reason'] or ''} {e['message'] or ''}") for e in s["errors"]
    ]
    return [*drops, *errors]


def duration(seconds: float) -> str:
    """Short: 0.42 s, 12.3 s, 5:07, 1:02:03."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def clean(text: str) -> str:
    """One line that cannot steer the terminal."""
    return _CONTROL.sub(lambda match: repr(match.group())[1:-1], text)[:500]
