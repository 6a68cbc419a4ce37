"""Sends a run's numbers to trackers while it goes (`--report-to`), each on a thread of its own.

The loop thread only puts rows into a queue, and only rows that the log took; so what a tracker gets is what
`fsm-replay export` would give it. A tracker that fails, or falls far behind, is told once as a warning and once in the
log, and then left alone: it never slows or fails the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

import structlog

from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.runtime.failures import describe
from fsm_trainer.runtime.loop import Sink
from fsm_trainer.tracking.points import KINDS, PointStream
from fsm_trainer.tracking.trackers import Tracker

CLOSE_TIMEOUT_S = 15.0
"""How long the end of a run waits for its trackers."""
MAX_BEHIND = 500_000
"""Rows that may wait for a tracker, some hundred megabytes; one that is further behind is given up."""

_log = structlog.get_logger("fsm_train")


class LiveTracking:
    """An observer of the loop, and a tap on its log. With no trackers it does nothing."""

    def __init__(self, trackers: Mapping[str, Callable[[], Tracker]], *, max_behind: int = MAX_BEHIND) -> None:
        """Start a thread for each; it makes its tracker itself, since that may take a network's time."""
        self._failed: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._feeds = [_Feed(name, make, self._on_failure, max_behind) for name, make in trackers.items()]

    def tap(self, log: Sink) -> Sink:
        """The log, with a copy of each row that it took for the trackers."""
        return _Tapped(log, self._feeds) if self._feeds else log

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        """The failures since the step before, as metric rows: the log says why a tracker has no more."""
        rows = []
        while not self._failed.empty():
            name, message = self._failed.get()
            kind = RecordKind.METRIC
            rows.append(Record(-1, 0, kind, machine="run", value=1.0, reason=f"tracker_failed/{name}", message=message))
        return rows

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """No more rows come; wait for the trackers to have sent what they have. Late ones are told of."""
        for feed in self._feeds:
            feed.end()
        deadline = time.monotonic() + timeout_s
        for feed in self._feeds:
            if not feed.ended(deadline - time.monotonic()):
                message = f"it has not ended {timeout_s:g} s after the run"
                _log.warning("tracker_left_behind", tracker=feed.name, message=message, hint=_hint(feed.name))
                feed.leave()

    def _on_failure(self, name: str, message: str) -> None:
        _log.warning("tracker_failed", tracker=name, message=message, hint=_hint(name))
        self._failed.put((name, message))


class _Feed:
    """One tracker, its thread, and the rows on their way to it."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], on_failure: Callable[[str, str], None], max_behind: int
    ) -> None:
        self.name = name
        self._make = make
        self._on_failure = on_failure
        self._max_behind = max_behind
        self._rows: SimpleQueue[Record | None] = SimpleQueue()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"fsm-tracker-{name}", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Take a row, on the loop thread."""
        if self._given_up.is_set():
            return
        if self._rows.qsize() >= self._max_behind:
            self._give_up(f"it is {self._max_behind} rows behind")
        else:
            self._rows.put(record)

    def end(self) -> None:
        """No more rows come."""
        self._rows.put(None)

    def leave(self) -> None:
        """Whatever becomes of it, nobody waits for it or hears of it any more."""
        self._given_up.set()

    def ended(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    def _give_up(self, message: str) -> None:
        if not self._given_up.is_set():
            self._given_up.set()
            self._on_failure(self.name, message)

    def _run(self) -> None:
        try:
            self._send()
        except (Exception, SystemExit) as error:  # a tracker's library may raise anything, and it is no part of the run
            failure = describe(error)
            self._give_up(f"{failure.type}: {failure.summary}")

    def _send(self) -> None:
        tracker = self._make()
        stream = PointStream()
        while (record := self._rows.get()) is not None and not self._given_up.is_set():
            for point in stream.take(record):
                tracker.log(point)
        for point in stream.close():
            tracker.log(point)
        tracker.close()


class _Tapped:
    """A log whose rows go to the feeds as well, once it took them."""

    def __init__(self, log: Sink, feeds: Sequence[_Feed]) -> None:
        self._log = log
        self._feeds = feeds
        self.flush = log.flush
        self.sync = log.sync

    def append(self, record: Record) -> None:
        """Take one row."""
        self._log.append(record)
        if record.kind in KINDS:
            for feed in self._feeds:
                feed.put(record)


def _hint(name: str) -> str:
    return f"the log has all numbers: fsm-replay export RUN --to {name}"
