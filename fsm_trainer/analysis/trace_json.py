"""Writes the Chrome trace event format (JSON) as a stream: slices, instants, counters and flow arrows on tracks.

Times go in as nanoseconds and are written as microseconds with three decimals, without a float between, and slices as
a begin and an end (not as one event with a duration): so neighbours meet exactly, and a viewer nests no slice into its
neighbour, not even one that takes no time. Knows nothing of runs.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from typing import TextIO

_PID = 1
Args = tuple[tuple[str, int | str | None], ...]
"""Names and values of what a viewer shows of an event; None is left out."""


class TraceWriter:
    """One trace of one process, whose tracks are its threads. Call `close` at the end, or the JSON is not whole."""

    def __init__(self, out: TextIO, process: str, origin_ns: int) -> None:
        """`origin_ns` becomes time 0."""
        self._out = out
        self._origin_ns = origin_ns
        self._tids: dict[str, int] = {}
        self.counts: Counter[str] = Counter()
        """Events written, by what they are: slices, instants, counters, flows."""
        out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        out.write(self._meta("process_name", 0, "name", process))

    def track(self, name: str, place: int) -> None:
        """A track; those of a lower place are shown first."""
        tid = self._tids[name] = len(self._tids) + 1
        self._out.write(",\n" + self._meta("thread_name", tid, "name", name))
        self._out.write(",\n" + self._meta("thread_sort_index", tid, "sort_index", place))

    def begin(self, track: str, name: str, at_ns: int, args: Args = ()) -> None:
        """A slice begins; slices of one track nest or follow each other, and are written in that order."""
        self.counts["slices"] += 1
        self._out.write(
            f',\n{{"ph":"B","pid":{_PID},"tid":{self._tids[track]},"ts":{self._us(at_ns)},'
            f'"name":{_text(name)}{_args(args)}}}'
        )

    def end(self, track: str, at_ns: int) -> None:
        """The innermost slice of a track ends."""
        self._out.write(f',\n{{"ph":"E","pid":{_PID},"tid":{self._tids[track]},"ts":{self._us(at_ns)}}}')

    def instant(self, track: str, name: str, at_ns: int, args: Args = ()) -> None:
        """A moment on a track."""
        self.counts["instants"] += 1
        self._out.write(
            f',\n{{"ph":"i","s":"t","pid":{_PID},"tid":{self._tids[track]},"ts":{self._us(at_ns)},'
            f'"name":{_text(name)}{_args(args)}}}'
        )

    def counter(self, name: str, at_ns: int, value: float) -> None:
        """A value that holds from this moment on."""
        self.counts["counters"] += 1
        self._out.write(
            f',\n{{"ph":"C","pid":{_PID},"ts":{self._us(at_ns)},"name":{_text(name)},"args":{{"value":{value:g}}}}}'
        )

    def flow(self, number: int, name: str, from_track: str, from_ns: int, to_track: str, to_ns: int) -> None:
        """An arrow between the slices that begin at two moments on two tracks; both are written before."""
        self.counts["flows"] += 1
        head = f'"pid":{_PID},"cat":"batch","id":{number},"name":{_text(name)}'
        self._out.write(f',\n{{"ph":"s",{head},"tid":{self._tids[from_track]},"ts":{self._us(from_ns)}}}')
        self._out.write(f',\n{{"ph":"f","bp":"e",{head},"tid":{self._tids[to_track]},"ts":{self._us(to_ns)}}}')

    def close(self) -> None:
        """End the JSON."""
        self._out.write("\n]}\n")

    def _us(self, at_ns: int) -> str:
        return _decimal(at_ns - self._origin_ns)

    @staticmethod
    def _meta(what: str, tid: int, key: str, value: str | int) -> str:
        return json.dumps({"ph": "M", "pid": _PID, "tid": tid, "name": what, "args": {key: value}})


def _decimal(ns: int) -> str:
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


@lru_cache(maxsize=4096)
def _text(value: str) -> str:
    return json.dumps(value)


def _args(args: Args) -> str:
    if not args:
        return ""
    parts = [
        f'"{name}":{_text(value) if isinstance(value, str) else value}' for name, value in args if value is not None
    ]
    return f',"args":{{{",".join(parts)}}}'
