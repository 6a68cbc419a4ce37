"""`fsm-replay diagram`: the state machines as mermaid; of a run, with how often it took each edge."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from fsm_trainer.cli.replay_args import DIVERGED, OK, one_of, sentence, tell_problem

if TYPE_CHECKING:
    from fsm_trainer.eventlog.reader import EventLog


def add(commands: Any) -> None:
    """Add the subcommand."""
    text = "the state machines as mermaid; with RUN, edges weighted by how often they were taken"
    parser = commands.add_parser("diagram", help=text, description=sentence(text))
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run directory, or its events.arrows (default: none)")
    parser.add_argument("--machine", metavar="NAME", help="only rollout, trainer, engine, batch or run")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=_diagram)


def _diagram(args: argparse.Namespace) -> int:
    from fsm_trainer.core.machines import TABLES

    if args.machine is not None:
        one_of("--machine", args.machine, list(TABLES))
    names = [args.machine] if args.machine else list(TABLES)
    log = _read(args.run)
    print(json.dumps(_as_json(names, log), indent=2) if args.json else _as_text(names, log, alone=bool(args.machine)))
    if log is None:
        return OK
    tell_problem(log)
    return DIVERGED if log.damaged else OK


def _read(run: str | None) -> EventLog | None:
    if run is None:
        return None
    from fsm_trainer.eventlog.reader import read_log
    from fsm_trainer.replay.edge_counts import COLUMNS

    return read_log(run, columns=COLUMNS)


def _as_text(names: list[str], log: EventLog | None, *, alone: bool) -> str:
    """One machine as bare mermaid; several as Markdown, since a mermaid text holds one diagram."""
    from fsm_trainer.replay.diagrams import diagram

    if log is None:
        texts = {name: diagram(name) for name in names}
    else:
        from fsm_trainer.replay.edge_counts import edge_counts, weighted_diagram

        counts = edge_counts(log.table)
        texts = {name: weighted_diagram(name, counts[name]) for name in names}
    if alone:
        return texts[names[0]]
    return "\n\n".join(f"## {name}\n\n```mermaid\n{text}\n```" for name, text in texts.items())


def _as_json(names: list[str], log: EventLog | None) -> dict[str, Any]:
    """Every edge, with `count` where there is a run."""
    from fsm_trainer.core.machines import TABLES

    found: dict[str, Any] = {}
    counts = None
    if log is not None:
        from fsm_trainer.replay.edge_counts import edge_counts

        counts = edge_counts(log.table)
    for name in names:
        found[name] = []
        for edge in TABLES[name][2]:
            row = {"trigger": edge.trigger, "source": edge.source.value, "dest": edge.dest.value}
            if counts is not None:
                row["count"] = counts[name][edge.trigger, edge.source.value, edge.dest.value]
            found[name].append({**row, "meaning": edge.meaning})
    return {"run": None if log is None else str(log.path), "machines": found}
