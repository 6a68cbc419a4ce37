"""`fsm-replay diff`: where two runs first decided differently, then how their figures and settings differ."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fsm_trainer.cli.replay_args import DIVERGED, OK, add_command

if TYPE_CHECKING:
    from fsm_trainer.eventlog.reader import EventLog
    from fsm_trainer.replay.diff import DecisionDiff, Side


def add(commands: Any) -> None:
    """Add the subcommand."""
    text = "the first decision in which two runs differ, then their figures and settings; exits 1 if decisions differ"
    diff = add_command(commands, "diff", _diff, text)
    diff.add_argument("other", metavar="RUN_B", help="the run to compare with")


def _diff(args: argparse.Namespace) -> int:
    from fsm_trainer.analysis.compare import compare_figures, compare_settings
    from fsm_trainer.replay.diff import diff_decisions

    one, other = _read(args.run), _read(args.other)
    decisions = diff_decisions(one, other)
    figures, settings = compare_figures(one, other), compare_settings(one, other)
    if args.json:
        print(json.dumps(_as_json(one, other, decisions, figures, settings), indent=2, default=str))
    else:
        print("\n".join(_lines(one, other, decisions, figures, settings)))
    return OK if decisions.equal and not (one.damaged or other.damaged) else DIVERGED


def _read(run: str) -> EventLog:
    """One log; the system's refusal names the run it is about."""
    from fsm_trainer.eventlog.reader import read_log

    try:
        return read_log(run)
    except OSError as error:
        raise ValueError(f"{run[:80]} cannot be read: {error.strerror or error}") from error


def _as_json(
    one: EventLog, other: EventLog, decisions: DecisionDiff, figures: dict[str, Any], settings: dict[str, Any]
) -> dict[str, Any]:
    first = None
    if decisions.first is not None:
        first = {"columns": decisions.columns, "a": asdict(decisions.first[0]), "b": asdict(decisions.first[1])}
    return {
        "a": str(one.path),
        "b": str(other.path),
        "equal": decisions.equal,
        "same_decisions": decisions.same,
        "decisions": dict(zip("ab", decisions.decisions, strict=True)),
        "first_difference": first,
        "figures": {name: dict(zip("ab", pair, strict=True)) for name, pair in figures.items()},
        "settings": {name: dict(zip("ab", pair, strict=True)) for name, pair in settings.items()},
    }


def _lines(
    one: EventLog, other: EventLog, decisions: DecisionDiff, figures: dict[str, Any], settings: dict[str, Any]
) -> list[str]:
    lines = [f"A  {one.path}", f"B  {other.path}"]
    for name, log in (("A", one), ("B", other)):
        if not log.complete:
            lines.append(f"note: {name} has no run_end: the run is {log.state}; compared as far as it goes")
    if decisions.first is None:
        lines.append(f"decisions: all {decisions.same} are the same")
    else:
        what = f": {', '.join(decisions.columns)} differ" if decisions.columns else ": one run has ended"
        lines.append(f"decisions: the first {decisions.same} are the same, then they differ{what}")
        lines.extend(f"  {name}  {_side(side)}" for name, side in zip("AB", decisions.first, strict=True))
    differing = {name: pair for name, pair in figures.items() if pair[0] != pair[1]}
    lines += ["", *_table("figures", differing, "all figures are the same")]
    return [*lines, "", *_table("settings", settings, "all settings are the same", changes=False)]


def _side(side: Side) -> str:
    if side.decision is None:
        return "nothing more was decided"
    d = side.decision
    names = [n for n in d if n not in ("seq", "t_ns", "cause_seq", "kind", "machine")]
    text = f"seq {d['seq']}: {d['kind']} " + " ".join(f"{name}={d[name]}" for name in names)
    if side.input is None:
        return text
    i = side.input
    about = "" if i.get("cause_seq") is None else f" of op {i['cause_seq']}"
    return f"{text}  (after input {i['trigger']}{about} at seq {i['seq']})"


def _table(title: str, pairs: dict[str, Any], none: str, *, changes: bool = True) -> list[str]:
    if not pairs:
        return [f"{title}: {none}"]
    rows = [(name, _shown(a), _shown(b), _change(name, a, b) if changes else "") for name, (a, b) in pairs.items()]
    widths = [max(len(row[i]) for row in [*rows, (title, "A", "B", "")]) for i in range(3)]
    head = f"{title:<{widths[0]}}  {'A':>{widths[1]}}  {'B':>{widths[2]}}"
    body = [f"{n:<{widths[0]}}  {a:>{widths[1]}}  {b:>{widths[2]}}  {c}".rstrip() for n, a, b, c in rows]
    return [head, *body]


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _change(name: str, a: object, b: object) -> str:
    """B against A where both are numbers: a share in points, anything else in per cent if A is not 0."""
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)) or isinstance(a, bool):
        return ""
    if name.endswith("(share)"):
        return f"{100 * (b - a):+.1f} points"
    return f"{100 * (b - a) / abs(a):+.1f} %" if a else ""
