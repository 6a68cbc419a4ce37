"""`fsm-replay events`: the rows of a log, filtered, as text or JSON lines."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsm_trainer.cli.replay_args import DIVERGED, OK, add_command, one_of, tell_problem, whole_number

if TYPE_CHECKING:
    import pyarrow as pa

    from fsm_trainer.eventlog.reader import EventLog


def add(commands: Any) -> None:
    """Add the subcommand."""
    events = add_command(commands, "events", _events, "list the events")
    events.add_argument("--kind", action="append", default=[], help="only this kind of event; may be repeated")
    events.add_argument("--machine", help="only this machine (rollout, trainer, ...) or one of them (rollout-0)")
    events.add_argument("--batch", type=whole_number, metavar="ID", help="only events of this prompt batch")
    events.add_argument("--from", type=whole_number, dest="first", metavar="SEQ", help="only from this seq on")
    events.add_argument(
        "--to", type=whole_number, dest="last", metavar="SEQ", help="only up to this seq, itself included"
    )


def _events(args: argparse.Namespace) -> int:
    from fsm_trainer.eventlog.reader import read_log

    log = read_log(args.run)
    rows = _select(log.table, args)
    if not rows.num_rows:
        print("fsm-replay: note: no event is like that", file=sys.stderr)
    for line in _json_lines(rows) if args.json else _text_lines(rows, _origin_ns(log)):
        print(line)
    tell_problem(log)
    if not log.complete:
        print(f"fsm-replay: note: the log has no run_end: the run is {log.state}", file=sys.stderr)
    return DIVERGED if log.damaged else OK


def _select(table: pa.Table, args: argparse.Namespace) -> pa.Table:
    """The rows that pass all filters; ValueError for a value that cannot occur."""
    import pyarrow.compute as pc

    from fsm_trainer.core.events import RecordKind

    for kind in args.kind:
        one_of("--kind", kind, [known.value for known in RecordKind])
    if args.machine is not None:
        _check_machine(table, args.machine)
    if args.kind:
        table = table.filter(pc.field("kind").isin(args.kind))
    if args.machine is not None:
        table = table.filter((pc.field("machine") == args.machine) | (pc.field("entity") == args.machine))
    if args.batch is not None:
        table = table.filter(pc.field("batch_id") == args.batch)
    if args.first is not None:
        table = table.filter(pc.field("seq") >= args.first)
    if args.last is not None:
        table = table.filter(pc.field("seq") <= args.last)
    return table


def _check_machine(table: pa.Table, name: str) -> None:
    from fsm_trainer.core.machines import TABLES

    machines = {*TABLES, *table["machine"].unique().to_pylist()} - {None}
    if name not in table["entity"].unique().to_pylist():
        one_of("--machine", name, [*sorted(machines), "or one of them, such as rollout-0"])


def _origin_ns(log: EventLog) -> int:
    return int(log.table["t_ns"][0].as_py()) if log.table.num_rows else 0


def _json_lines(table: pa.Table) -> Iterator[str]:
    from fsm_trainer.eventlog.reader import records
    from fsm_trainer.replay.verify_text import filled

    for record in records(table):
        values = filled(record)
        assert values is not None
        for name in _FLOATS:
            if name in values and not math.isfinite(values[name]):
                values[name] = None  # JSON has no such number
        yield json.dumps(values)


def _text_lines(table: pa.Table, origin_ns: int) -> Iterator[str]:
    """Seq, seconds since the run began, kind, machine, and every other filled column."""
    from fsm_trainer.eventlog.reader import records
    from fsm_trainer.replay.verify_text import filled

    for record in records(table):
        values = filled(record)
        assert values is not None
        shown = {name: value for name, value in values.items() if name not in _LEADING}
        move = [f"{values.get('source')} -> {values['dest']}"] if "dest" in values else []
        rest = [f"{name}={value}" for name, value in shown.items() if "dest" not in values or name != "source"]
        who = record.entity or record.machine or "-"
        seconds = (record.t_ns - origin_ns) / 1e9
        yield " ".join([f"{record.seq:>7} {seconds:>12.6f} {values['kind']:<10} {who:<10}", *move, *rest])


_FLOATS = ("value", "numerator", "denominator")
_LEADING = frozenset({"seq", "t_ns", "kind", "machine", "entity", "dest"})
