"""`fsm-replay`: looks at a finished, running or crashed run through its event log. Run `fsm-replay --help`.

Only this module prints and knows exit codes: 0 all is well, 1 the log diverges or is damaged, 2 bad usage or no run.
Everything heavy is imported by the subcommand that needs it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fsm_trainer.cli.streams import open_closed_streams

if TYPE_CHECKING:
    import pyarrow as pa

    from fsm_trainer.eventlog.reader import EventLog

OK, DIVERGED, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the process's exit code."""
    if argv is None:
        open_closed_streams()
    args = _parser().parse_args(argv)
    try:
        code: int = args.handler(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has gone, as with `| head`. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except ValueError as error:
        print(f"fsm-replay: error: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"fsm-replay: error: {args.run[:80]} cannot be read: {error.strerror or error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fsm-replay", description="Look at a run through its event log.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add(commands, "summary", _summary, "how it ended, its batches, staleness, and where the time went")
    _add(commands, "verify", _verify, "derive every decision again from the logged inputs and compare")
    events = _add(commands, "events", _events, "list the events")
    events.add_argument("--kind", action="append", default=[], help="only this kind of event; may be repeated")
    events.add_argument("--machine", help="only this machine (rollout, trainer, ...) or one of them (rollout-0)")
    events.add_argument("--batch", type=_whole_number, metavar="ID", help="only events of this prompt batch")
    events.add_argument("--from", type=_whole_number, dest="first", metavar="SEQ", help="only from this seq on")
    events.add_argument(
        "--to", type=_whole_number, dest="last", metavar="SEQ", help="only up to this seq, itself included"
    )
    samples = _add(commands, "samples", _samples, "print the kept completions with their rewards")
    samples.add_argument("--batch", type=_whole_number, metavar="ID", help="only this prompt batch")
    samples.add_argument("--worst", type=_count, metavar="K", help="the K of least reward, the worst first")
    samples.add_argument("--best", type=_count, metavar="K", help="the K of most reward, the best first")
    samples.add_argument("--dropped", action="store_true", help="only those of batches that were dropped")
    return parser


def _count(text: str) -> int:
    if (number := _whole_number(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} given, expected at least 1")
    return number


def _whole_number(text: str) -> int:
    """A number that a column of the log can hold."""
    if re.fullmatch(r"[+-]?[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} given, expected a whole number of at most 18 digits")
    return int(text)


def _add(commands: Any, name: str, handler: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.add_argument("run", metavar="RUN", help="a run directory, or its events.arrows")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(handler=handler)
    return parser


def _summary(args: argparse.Namespace) -> int:
    from fsm_trainer.analysis.report import render
    from fsm_trainer.analysis.summary import summarize_log
    from fsm_trainer.eventlog.reader import read_log

    log = read_log(args.run)
    summary = summarize_log(log)
    print(json.dumps(summary.to_dict(), indent=2) if args.json else render(summary))
    return DIVERGED if log.damaged else OK


def _verify(args: argparse.Namespace) -> int:
    from fsm_trainer.replay.report import render, to_json
    from fsm_trainer.replay.verify import verify

    result = verify(args.run)
    print(json.dumps(to_json(result), indent=2) if args.json else render(result))
    return OK if result.ok else DIVERGED


def _events(args: argparse.Namespace) -> int:
    from fsm_trainer.eventlog.reader import read_log

    log = read_log(args.run)
    rows = _select(log.table, args)
    if not rows.num_rows:
        print("fsm-replay: note: no event is like that", file=sys.stderr)
    for line in _json_lines(rows) if args.json else _text_lines(rows, _origin_ns(log)):
        print(line)
    if log.problem is not None:
        print(f"fsm-replay: note: {log.problem}; {log.dropped_bytes} bytes dropped", file=sys.stderr)
    if not log.complete:
        print(f"fsm-replay: note: the log has no run_end: the run is {log.state}", file=sys.stderr)
    return DIVERGED if log.damaged else OK


def _samples(args: argparse.Namespace) -> int:
    from fsm_trainer.cli.samples import print_samples

    return print_samples(args)


def _select(table: pa.Table, args: argparse.Namespace) -> pa.Table:
    """The rows that pass all filters; ValueError for a value that cannot occur."""
    import pyarrow.compute as pc

    from fsm_trainer.core.events import RecordKind

    for kind in args.kind:
        _one_of("--kind", kind, [known.value for known in RecordKind])
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
        _one_of("--machine", name, [*sorted(machines), "or one of them, such as rollout-0"])


def _one_of(option: str, value: str, allowed: list[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{option} is {value!r}, expected one of {', '.join(allowed)}")


def _origin_ns(log: EventLog) -> int:
    return int(log.table["t_ns"][0].as_py()) if log.table.num_rows else 0


def _json_lines(table: pa.Table) -> Iterator[str]:
    from fsm_trainer.eventlog.reader import records
    from fsm_trainer.replay.report import filled

    for record in records(table):
        values = filled(record)
        assert values is not None
        if record.value is not None and not math.isfinite(record.value):
            values["value"] = None  # JSON has no such number
        yield json.dumps(values)


def _text_lines(table: pa.Table, origin_ns: int) -> Iterator[str]:
    """Seq, seconds since the run began, kind, machine, and every other filled column."""
    from fsm_trainer.eventlog.reader import records
    from fsm_trainer.replay.report import filled

    for record in records(table):
        values = filled(record)
        assert values is not None
        shown = {name: value for name, value in values.items() if name not in _LEADING}
        move = [f"{values.get('source')} -> {values['dest']}"] if "dest" in values else []
        rest = [f"{name}={value}" for name, value in shown.items() if "dest" not in values or name != "source"]
        who = record.entity or record.machine or "-"
        seconds = (record.t_ns - origin_ns) / 1e9
        yield " ".join([f"{record.seq:>7} {seconds:>12.6f} {values['kind']:<10} {who:<10}", *move, *rest])


_LEADING = frozenset({"seq", "t_ns", "kind", "machine", "entity", "dest"})


if __name__ == "__main__":
    sys.exit(main())
