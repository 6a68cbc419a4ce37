"""Runs reward functions in processes of their own, which may hang, crash or leak: each is replaced when it dies.

A batch is cut into parts, a part goes to whichever process is free. What a death leaves out is done again, and what
failed in a call for many is scored by itself, so that each completion ends with its own value or failure.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from fsm_trainer.data.reward_batch import RewardBatch, RewardFailure, Value
from fsm_trainer.data.reward_board import CAPACITY
from fsm_trainer.data.reward_contracts import Contract, FunctionInfo
from fsm_trainer.data.reward_executor import RewardsAborted
from fsm_trainer.data.reward_output import Output
from fsm_trainer.data.reward_process import PartResult, RewardProcess
from fsm_trainer.data.reward_specs import Source

CLOSE_TIMEOUT_S = 3.0
"""How long what still runs may take when the pool is closed."""
_MAX_EMPTY_DEATHS = 3
"""Deaths in a row outside any call after which the first completion of a part is blamed."""


def inspect_sources(sources: Sequence[Source]) -> list[FunctionInfo]:
    """What the functions are, found in a process of its own; ValueError for what cannot be used."""
    process = RewardProcess()
    try:
        return process.load(sources)
    finally:
        process.close()


@dataclass
class _Ticket:
    """One batch being scored: its parts that are open, and what is known so far."""

    batch: RewardBatch
    infos: Sequence[FunctionInfo]
    first_failure_ends: bool
    values: list[list[Value]]
    open_parts: int = 0
    over: bool = False
    error: BaseException | None = None
    bodies: dict[tuple[int, int], bytes] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, part: _Part, values: Sequence[tuple[int, Value]]) -> None:
        with self.changed:
            for index, value in values:
                self.values[part.function][part.start + index] = value
                self.over = self.over or (self.first_failure_ends and isinstance(value, RewardFailure))
            self.changed.notify_all()

    def body(self, start: int, stop: int) -> bytes:
        """A part, pickled once for all functions."""
        if (start, stop) not in self.bodies:
            try:
                self.bodies[start, stop] = pickle.dumps(self.batch.part(start, stop).packed(), pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # whatever a row's own pickling raises
                raise ValueError(
                    f"a row of the dataset cannot be sent to a reward process ({type(error).__name__}: {error}); give "
                    f"--reward-executor thread"
                ) from error
        return self.bodies[start, stop]

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.over = True
            self.changed.notify_all()

    def closed(self) -> None:
        """One part is done with."""
        with self.changed:
            self.open_parts -= 1
            self.changed.notify_all()

    def wait(self) -> list[list[Value]]:
        """Until all is scored or the batch is over; then a call that still runs is waited for by nobody."""
        with self.changed:
            self.changed.wait_for(lambda: self.over or self.open_parts == 0)
        if self.error is not None:
            raise self.error
        return self.values


@dataclass
class _Part:
    """Some completions for one function."""

    ticket: _Ticket
    function: int
    start: int
    stop: int
    empty_deaths: int = 0


class ProcessRewards:
    """Reward functions in `workers` processes, each replaced when it dies. Nothing starts before `start`."""

    def __init__(
        self, sources: Sequence[Source], infos: Sequence[FunctionInfo], *, workers: int, call_limit_s: float | None
    ) -> None:
        """`infos` as `inspect_sources` gives them; `call_limit_s` is the longest that one call may take."""
        self.infos = infos
        self._sources = list(sources)
        self._limit_s = call_limit_s
        self._parts: SimpleQueue[_Part | None] = SimpleQueue()
        self._workers = workers
        self._threads: list[threading.Thread] = []
        self._processes: dict[int, RewardProcess] = {}
        self._lock = threading.Lock()
        self._aborted = False
        self._output: Output | None = None

    def start(self, output: Path | None = None) -> None:
        """Start the processes, without waiting for them."""
        self._output = Output(output)
        for number in range(self._workers):
            thread = threading.Thread(target=self._serve, args=(number,), name=f"fsm-reward-pool-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def score(self, batch: RewardBatch, *, first_failure_ends: bool) -> list[list[Value]]:
        """Hand the batch's parts to the workers and wait."""
        if self._aborted:
            raise RewardsAborted("scoring aborted")
        if not self._threads:
            self.start()
        values: list[list[Value]] = [[None] * len(batch.completions) for _ in self.infos]
        ticket = _Ticket(batch, self.infos, first_failure_ends, values)
        parts = [
            _Part(ticket, number, start, stop)
            for number, info in enumerate(self.infos)
            for start, stop in info.parts(batch, self._workers, CAPACITY)
        ]
        self._queue(parts)
        return ticket.wait()

    def abort(self) -> None:
        """Kill the processes; what they were doing raises."""
        with self._lock:
            self._aborted = True
            processes = list(self._processes.values())
        for process in processes:
            process.kill()

    def close(self) -> None:
        """End processes and threads."""
        for _ in self._threads:
            self._parts.put(None)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self.abort()  # a call that nobody waits for any more
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._output is not None:
            self._output.close()

    def _queue(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            with part.ticket.changed:
                part.ticket.open_parts += 1
        for part in parts:
            self._parts.put(part)

    def _serve(self, number: int) -> None:
        """A worker's thread: it starts the process, which must not outlive it, and speaks to it."""
        self._start_early(number)
        while (part := self._parts.get()) is not None:
            try:
                self._do(number, part)
            except BaseException as error:
                part.ticket.fail(error)
            finally:
                part.ticket.closed()
            del part  # not to keep its batch until the next one comes
        with self._lock:
            process = self._processes.pop(number, None)
        if process is not None:
            process.close()

    def _start_early(self, number: int) -> None:
        with suppress(Exception):  # the first part will try again and tell
            self._process(number)

    def _process(self, number: int) -> RewardProcess:
        process = self._processes.get(number)
        if process is None:
            assert self._output is not None
            process = RewardProcess(self._output.fd)
            with self._lock:
                self._processes[number] = process
                aborted = self._aborted
            if aborted:
                process.kill()
            try:
                process.load(self._sources)
            except BaseException:
                with self._lock:
                    del self._processes[number]
                process.close(0.0)
                raise
        return process

    def _do(self, number: int, part: _Part) -> None:
        ticket = part.ticket
        if self._aborted:
            raise RewardsAborted("scoring aborted")
        if ticket.over:
            return
        info = self.infos[part.function]
        body = ticket.body(part.start, part.stop)
        # An asynchronous function's limit is kept in the child, call by call, unless its loop is blocked.
        patience_s = 0.25 * self._limit_s + 0.25 if self._limit_s is not None and info.is_async else 0.0
        count = part.stop - part.start
        result = self._process(number).score(part.function, body, count, self._limit_s, patience_s)
        if result.death is not None:
            with self._lock:
                del self._processes[number]
            if self._aborted:
                raise RewardsAborted("scoring aborted")
        self._settle(part, info, result)

    def _settle(self, part: _Part, info: FunctionInfo, result: PartResult) -> None:
        """Keep what is known; do again what a death left out, and by itself what failed together."""
        failed, again = _open_ends(part, info, result)
        alone = [] if part.ticket.first_failure_ends else _alone(part, info, result, failed)
        retried = {index for start, stop in alone for index in range(start, stop)}
        part.ticket.put(part, [(i, v) for i, v in (*result.values, *failed) if part.start + i not in retried])
        self._queue([*again, *[_Part(part.ticket, part.function, start, stop) for start, stop in alone]])


def _open_ends(part: _Part, info: FunctionInfo, result: PartResult) -> tuple[list[tuple[int, Value]], list[_Part]]:
    """The failures that a death means, and the part to be done again."""
    if result.death is None:
        return [], []
    death = result.death._replace(message=f"{info.name}: {result.death.message}")
    blamed, empty_deaths = result.blamed, 0
    if not blamed:
        # It died between two calls, as by a thread left running: tried again, but not for ever.
        empty_deaths = 0 if result.values else part.empty_deaths + 1
        if empty_deaths >= _MAX_EMPTY_DEATHS:
            blamed = result.untold if info.scores_parts_whole else result.untold[:1]
    failed: list[tuple[int, Value]] = [(index, death) for index in blamed]
    left = [index for index in result.untold if index not in set(blamed)]
    if not left:
        return failed, []
    return failed, [_Part(part.ticket, part.function, part.start + left[0], part.start + left[-1] + 1, empty_deaths)]


def _alone(
    part: _Part, info: FunctionInfo, result: PartResult, failed: Sequence[tuple[int, Value]]
) -> list[tuple[int, int]]:
    """The units, counted in the batch, to be scored by themselves because they failed in a call of several."""
    if not info.scores_parts_whole:
        return []
    # An asynchronous function of one record fails by itself as long as its process lives.
    together = [] if info.contract is Contract.RECORD else result.values
    wrong = {part.start + i for i, v in (*failed, *together) if isinstance(v, RewardFailure)}
    units = info.units(part.ticket.batch, part.start, part.stop)
    return [(a, b) for a, b in units if not wrong.isdisjoint(range(a, b))] if len(units) > 1 else []
