"""`fsm-replay watch`: a live view of a run, from its log as it grows. Reads only; the run does not notice."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fsm_trainer.cli.replay_args import DIVERGED, OK, add_command

if TYPE_CHECKING:
    from fsm_trainer.analysis.live import LiveRun
    from fsm_trainer.eventlog.follow import LogFollower

_FASTEST_S = 0.05
Show = Callable[[dict[str, Any]], None]


def add(commands: Any) -> None:
    """Add the subcommand."""
    text = "a live view of a running or finished run, until it ends or Ctrl-C: who does what, who waits for what"
    watch = add_command(commands, "watch", _watch, text)
    watch.add_argument("--once", action="store_true", help="show the moment and end; --json does so as well")
    watch.add_argument(
        "--interval", type=_seconds, default=0.5, metavar="S", help="seconds between looks (default: 0.5)"
    )


def _watch(args: argparse.Namespace) -> int:
    from fsm_trainer.analysis.live import COLUMNS, LiveRun
    from fsm_trainer.eventlog.follow import LogFollower
    from fsm_trainer.eventlog.schema import CONFIG_KEY

    follower = LogFollower(args.run, COLUMNS)
    run = LiveRun(json.loads(follower.metadata[CONFIG_KEY]))
    once = args.once or args.json
    with _display(str(follower.path), as_json=args.json, once=once) as show:
        try:
            watch(follower, run, show, wait=lambda: time.sleep(args.interval), now_ns=time.monotonic_ns, once=once)
        except KeyboardInterrupt:
            return OK  # the way to leave it
    return OK if follower.problem is None else DIVERGED


def watch(
    follower: LogFollower, run: LiveRun, show: Show, *, wait: Callable[[], None], now_ns: Callable[[], int], once: bool
) -> None:
    """Look, show and wait, until the run has ended or crashed, or after one look."""
    grown_ns, events = now_ns(), -1
    while True:
        writing = follower.writing
        for rows in follower.new_rows():
            run.take(rows)
        if run.events != events:
            events, grown_ns = run.events, now_ns()
        going = writing and not follower.complete and follower.problem is None
        # The run's clock is not ours; since its last row as much time has gone by there as here.
        moment = run.last_ns + (now_ns() - grown_ns if going else 0)
        state = "ended" if follower.complete else "running" if writing else "crashed"
        show({**run.snapshot(moment), "state": state, "problem": follower.problem})
        if once or not going:
            return
        wait()


@contextmanager
def _display(path: str, *, as_json: bool, once: bool) -> Iterator[Show]:
    """A panel that is drawn anew on a terminal; elsewhere lines, or one JSON object."""
    from fsm_trainer.cli.watch_view import panel, plain

    if as_json:
        yield lambda s: print(json.dumps(_finite({"path": path, **s}), indent=2))
    elif once or not sys.stdout.isatty():
        yield lambda s: print(plain(s, path), flush=True)
    else:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            yield lambda s: live.update(panel(s, path), refresh=True)


def _finite(value: Any) -> Any:
    """JSON has no such numbers."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not _FASTEST_S <= number <= 3600:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} given, expected seconds from {_FASTEST_S} to 3600")
    return number
