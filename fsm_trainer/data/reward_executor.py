"""What runs reward functions, and the plain kind: in threads of this process. The other kind is `reward_pool.py`.

Each completion ends with a value or a `RewardFailure`; what a failure means for the run is the caller's decision.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from fsm_trainer.data.reward_batch import RewardBatch, RewardFailure, Value
from fsm_trainer.data.reward_board import ListBoard, score_part
from fsm_trainer.data.reward_contracts import Contract, FunctionInfo, RewardFunction
from fsm_trainer.data.reward_specs import Source, load_functions

MOST_WORKERS = 64


class RewardsAborted(RuntimeError):
    """The run ended while rewards were computed."""


class RewardExecutor(Protocol):
    """Scores batches; `score` is called by several threads at once."""

    @property
    def infos(self) -> Sequence[FunctionInfo]:
        """The functions, in order."""

    def start(self, output: Path | None = None) -> None:
        """Begin to load the functions; what they print goes to `output`, where that can be kept apart."""

    def score(self, batch: RewardBatch, *, first_failure_ends: bool) -> list[list[Value]]:
        """For each function a value for each completion. With `first_failure_ends` what follows may be left out."""

    def abort(self) -> None:
        """Make running and later calls of `score` raise RewardsAborted."""

    def close(self) -> None:
        """Leave no process and no thread behind."""


def worker_count(infos: Sequence[FunctionInfo], asked: int | None, cores: int) -> int:
    """Workers asked for, or those that the functions ask for, or half the cores and at most eight."""
    wanted = max((info.parallel_workers or 0 for info in infos), default=0)
    return min(MOST_WORKERS, asked or wanted or max(1, min(8, cores // 2)))


class ThreadRewards:
    """Reward functions in this process: cheap, but a call that hangs or crashes takes the run with it.

    One worker scores in the caller's own thread.
    """

    def __init__(self, functions: Sequence[RewardFunction], *, workers: int = 1) -> None:
        self.infos = [function.info for function in functions]
        self._functions = list(functions)
        self.workers = workers
        self._aborted = threading.Event()

    @classmethod
    def load(cls, sources: Sequence[Source], *, workers: int | None, cores: int = 1) -> ThreadRewards:
        """Load the functions into this process."""
        functions = load_functions(sources)
        # Threads only help where a function waits, which it says by asking for workers.
        return cls(functions, workers=worker_count([function.info for function in functions], workers, cores))

    def start(self, output: Path | None = None) -> None:
        """Nothing to start; what the functions print is printed."""

    def score(self, batch: RewardBatch, *, first_failure_ends: bool) -> list[list[Value]]:
        """Score in threads of this process."""
        self._check()
        found = [self._score_one(function, batch, first_failure_ends) for function in self._functions]
        self._check()
        return found

    def abort(self) -> None:
        """Raise before the next call."""
        self._aborted.set()

    def close(self) -> None:
        """Nothing is left running."""

    def _check(self) -> None:
        if self._aborted.is_set():
            raise RewardsAborted("scoring aborted")

    def _score_one(self, function: RewardFunction, batch: RewardBatch, first_failure_ends: bool) -> list[Value]:
        values: list[Value] = [None] * len(batch.completions)
        todo = SimpleQueue[tuple[int, int]]()
        for part in function.info.parts(batch, self.workers, len(values)):
            todo.put(part)
        errors: list[BaseException] = []
        work = partial(self._work, function, batch, first_failure_ends, values, todo, errors)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.workers - 1)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return values

    def _work(
        self,
        function: RewardFunction,
        batch: RewardBatch,
        first_failure_ends: bool,
        values: list[Value],
        todo: SimpleQueue[tuple[int, int]],
        errors: list[BaseException],
    ) -> None:
        """Score parts until there are none left."""
        info = function.info
        while not errors:
            try:
                start, stop = todo.get_nowait()
            except Empty:
                return
            board = ListBoard(stop - start, self._check)
            try:
                score_part(function, batch.part(start, stop), board, first_failure_ends=first_failure_ends)
            except RewardsAborted as error:
                errors.append(error)
                return
            units = info.units(batch, start, stop)
            together = info.contract is Contract.LISTS and len(units) > 1
            if together and not first_failure_ends and any(isinstance(v, RewardFailure) for v in board.values):
                for unit in units:
                    todo.put(unit)
                continue
            values[start:stop] = board.values
