"""The event loop: one thread that feeds inputs to the scheduler, logs what it decides, then hands the commands out.

Records precede their commands, always. The loop decides nothing; it knows the scheduler only by its interface, so the
same loop runs live and in virtual time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from fsm_trainer.core.events import NOTICES, Command, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.runtime.clock import Clock
from fsm_trainer.runtime.failures import describe
from fsm_trainer.runtime.inbox import Inbox

_IRREVOCABLE = frozenset({CommandKind.TRAIN, CommandKind.SAVE})
"""Commands that change what outlives them (weights, files): a kill after they began must find them in the log."""
_DURABLE = frozenset({RecordKind.SYNC, RecordKind.CHECKPOINT, RecordKind.RUN_END})
LOG_FAILURE = "EventLogError"
"""Reason of the failure that a sink's error becomes."""
_log = structlog.get_logger(__name__)


class Decider(Protocol):
    """The scheduler, as the loop sees it."""

    @property
    def next_deadline_ns(self) -> int | None:
        """Earliest moment at which a TICK must come."""

    @property
    def finished(self) -> bool:
        """Whether the run is over and nothing is in flight."""

    @property
    def outcome(self) -> str | None:
        """How it ended: completed, interrupted or failed."""

    @property
    def error(self) -> str | None:
        """Why it failed."""

    def step(self, event: Input) -> tuple[list[Record], list[Command]]:
        """Decide."""

    def annotate(self, record: Record) -> Record:
        """Number a metric row."""


class Sink(Protocol):
    """Where records go; raises OSError (EventLogError is one) when they cannot be kept."""

    def append(self, record: Record) -> None:
        """Take one row."""

    def flush(self) -> None:
        """After it, a kill of the process loses no row."""

    def sync(self) -> None:
        """Begin to bring every row to the storage; soon after it, a power cut loses none of them."""


class Observer(Protocol):
    """Follows the run: metrics, samples, the display."""

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        """See a step's records, already in the log; may return metric rows (`seq=-1`) to be logged after them.

        Rows returned for the step that ends the run are not logged: `run_end` is the last row. An exception fails the
        run.
        """


class EventLoop:
    """Owns the scheduler and the log; `run` returns when the run is over."""

    def __init__(
        self,
        scheduler: Decider,
        sink: Sink,
        inbox: Inbox,
        dispatch: Callable[[Command], None],
        clock: Clock,
        observers: Sequence[Observer] = (),
    ) -> None:
        """`dispatch` hands one command to its worker and returns at once (`Lanes.dispatch`)."""
        self._scheduler = scheduler
        self._sink = sink
        self._inbox = inbox
        self._dispatch = dispatch
        self._clock = clock
        self._observers = list(observers)
        self._last_ns = 0
        self._own_inputs: deque[Input] = deque()
        self.log_failure: OSError | None = None
        """Why the log ends early, if it does."""
        self.busy_ns = 0
        """Processor time of the loop's thread in `run`: deciding, logging, observing, dispatching; not waiting."""
        self.inputs = 0

    @property
    def outcome(self) -> str | None:
        """How the run ended; a run that could not be logged has failed."""
        return "failed" if self.log_failure is not None else self._scheduler.outcome

    @property
    def error(self) -> str | None:
        """Why it failed, in one line."""
        return self._scheduler.error or (None if self.log_failure is None else _log_message(self.log_failure))

    def run(self) -> str:
        """Feed inputs until the scheduler is finished; the outcome."""
        begin = time.thread_time_ns()
        self._feed(Input(InputKind.BEGIN))
        while not self._scheduler.finished:
            self._feed(self._next())
        self.busy_ns = time.thread_time_ns() - begin
        outcome = self.outcome
        assert outcome is not None
        return outcome

    def _next(self) -> Input:
        if self._own_inputs:
            return self._own_inputs.popleft()
        return self._inbox.get(self._scheduler.next_deadline_ns) or Input(InputKind.TICK)

    def _feed(self, event: Input) -> None:
        """One input: stamp, decide, log, tell, dispatch."""
        self._last_ns = max(self._last_ns, self._clock.now_ns())
        records, commands = self._scheduler.step(event.stamped(t_ns=self._last_ns))
        self._keep(records, commands)
        metrics = [row for observer in tuple(self._observers) for row in self._observe(observer, records)]
        self._keep_metrics(metrics)
        for command in commands:
            self._hand_out(command)
        self.inputs += 1

    def _keep(self, records: list[Record], commands: list[Command]) -> None:
        if self.log_failure is not None:
            return
        try:
            for record in records:
                self._sink.append(record)
            # The last rows are written here too: nobody would hear of a failure after the run.
            if self._scheduler.finished or not _IRREVOCABLE.isdisjoint(command.kind for command in commands):
                self._sink.flush()
            if not _DURABLE.isdisjoint(record.kind for record in records):
                self._sink.sync()
        except OSError as error:
            self._fail_log(error)

    def _keep_metrics(self, rows: list[Record]) -> None:
        if not rows or self.log_failure is not None or self._scheduler.finished:
            return
        try:
            for row in rows:
                self._sink.append(self._scheduler.annotate(row._replace(t_ns=self._last_ns)))
        except OSError as error:
            self._fail_log(error)

    def _fail_log(self, error: OSError) -> None:
        """Stop logging and fail the run, which still awaits everything in flight."""
        self.log_failure = error
        _log.error("event_log_failed", message=str(error))
        self._own_inputs.append(Input(InputKind.FAILED, reason=LOG_FAILURE, message=_log_message(error)))

    def _observe(self, observer: Observer, records: list[Record]) -> Sequence[Record]:
        try:
            return observer.on_step(records)
        except Exception as error:
            # It may fail again at every step, and the first time says it all.
            self._observers.remove(observer)
            failure = describe(error)
            _log.error("observer_failed", **failure.for_log)
            self._own_inputs.append(Input(InputKind.FAILED, reason=failure.type, message=failure.summary))
            return ()

    def _hand_out(self, command: Command) -> None:
        if self.log_failure is None or command.kind in NOTICES:
            self._dispatch(command)
        else:
            # Its record is not in the log, so it must not happen; the scheduler still counts on a completion.
            message = f"{command.kind.value} was not started: the event log cannot be written"
            self._own_inputs.append(Input(InputKind.FAILED, op=command.op, reason=LOG_FAILURE, message=message))


def _log_message(error: OSError) -> str:
    return f"the event log cannot be written: {error}"
