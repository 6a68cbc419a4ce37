"""What each command of the scheduler does in a real run; here the trainer's side, shared by every kind of rollout.

Each method runs on the worker thread of its lane and raises on failure. Batches travel between the methods through one
dictionary by batch id; a batch's entry goes when the batch has ended.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsm_trainer.core.batch import AsyncTrainBatch
from fsm_trainer.core.events import Command, CommandKind, Input, InputKind, Record, RecordKind
from fsm_trainer.core.machines import TERMINAL, BatchState
from fsm_trainer.data.prompts import PromptBatch
from fsm_trainer.engines.base import Rollout, Snapshot, TrainEngine, TrainResult
from fsm_trainer.engines.logprob_gap import LogprobGap, LogprobMismatch
from fsm_trainer.trainers.mismatch import MismatchGate
from fsm_trainer.trainers.run_directory import RunDirectory
from fsm_trainer.trainers.saving import Saver

_ENDED = {state.value for state in TERMINAL}
_CONSUMED = {BatchState.TRAINED.value, BatchState.DROPPED.value}


class OperationAborted(RuntimeError):
    """The operation was told to end early."""


@dataclass
class BatchWork:
    """What is known of one open batch so far."""

    prompts: PromptBatch | None = None
    rollout: Rollout | None = None
    rollout_s: float = 0.0
    engine: int | None = None
    """Which one generated it."""
    rescored: LogprobGap | None = None
    """Of a few samples: the engine's own scores of them against what it recorded; None if that was not checked."""
    scoring: bool = False
    """Whether the reward operation has begun."""
    train_batch: AsyncTrainBatch | None = None
    reward_metrics: dict[str, float] = field(default_factory=dict)
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of its advantages, groups and lengths: numerator and denominator."""
    result: TrainResult | None = None


class RunOperations(ABC):
    """Carries out the commands of one run. Subclasses say where batches come from."""

    def __init__(
        self,
        *,
        train_engine: TrainEngine,
        run: RunDirectory,
        gate: MismatchGate | None = None,
        saver: Saver | None = None,
    ) -> None:
        """Nothing starts before its command. Without a `gate` no logprobs are compared."""
        self._train_engine = train_engine
        self._gate = gate or MismatchGate(None)
        self._saver = saver or Saver.of(run)
        self._work: dict[int, BatchWork] = {}
        self._snapshots: dict[int, Snapshot] = {}
        self._running: dict[int, Command] = {}
        self._aborted: set[int] = set()
        self._ended = threading.Condition()
        """Guards the two above; notified when an operation has ended."""
        self._aborts: list[threading.Thread] = []
        self._methods: dict[CommandKind, Callable[[Command], Input]] = {
            CommandKind.START_TRAINER: self._start_trainer,
            CommandKind.START_ENGINE: self.start_engine,
            CommandKind.LOAD_PROMPTS: self.load_prompts,
            CommandKind.GENERATE: self.generate,
            CommandKind.REWARD: self.reward,
            CommandKind.TRAIN: self._train,
            CommandKind.EXPORT: self._export,
            CommandKind.LOAD_WEIGHTS: self.load_weights,
            CommandKind.SAVE: self._save,
        }

    @abstractmethod
    def start_engine(self, command: Command) -> Input:
        """Make the command's rollout engine ready to load weights."""

    @abstractmethod
    def load_prompts(self, command: Command) -> Input:
        """Get the prompts of the command's batch, or say that there are none."""

    @abstractmethod
    def generate(self, command: Command) -> Input:
        """Complete the prompts."""

    @abstractmethod
    def reward(self, command: Command) -> Input:
        """Score the completions and materialise the train batch."""

    @abstractmethod
    def load_weights(self, command: Command) -> Input:
        """Install the command's version in its engine."""

    @abstractmethod
    def abort(self, command: Command) -> None:
        """Make a running operation end soon; called on a thread of its own."""

    @abstractmethod
    def close_source(self) -> None:
        """Nothing more is wanted from the source of prompts; must not block."""

    def source_state(self) -> dict[str, Any] | None:
        """Where the prompts stand, for a checkpoint, ready for JSON; None where that is not ours to know."""
        return None

    def execute(self, command: Command) -> Input:
        """Do it, blocking; raises on failure, and at once if it was aborted before it began."""
        with self._ended:
            if self.was_aborted(command):
                raise OperationAborted(f"{command.kind.value} was aborted before it began")
            self._running[command.op] = command
        try:
            return self._methods[command.kind](command)
        finally:
            with self._ended:
                del self._running[command.op]
                self._ended.notify_all()

    def ends_within(self, command: Command, timeout_s: float) -> bool:
        """Wait for a running operation's end; whether it came in time."""
        with self._ended:
            return self._ended.wait_for(lambda: command.op not in self._running, timeout_s)

    def was_aborted(self, command: Command) -> bool:
        """Whether an ABORT has named the command."""
        return command.op in self._aborted

    def notice(self, command: Command) -> None:
        """Take note, without blocking."""
        if command.kind is CommandKind.RELEASE_SNAPSHOT:
            assert command.version is not None
            self._snapshots.pop(command.version, None)
            self._gate.released(command.version)
            self._train_engine.release(command.version)
        elif command.kind is CommandKind.CLOSE_SOURCE:
            self.close_source()
        else:
            assert command.target is not None, command
            with self._ended:
                self._aborted.add(command.target)
                target = self._running.get(command.target)
            if target is not None:
                # A thread each, so that one engine that takes its time does not keep the others waiting.
                self._aborts.append(threading.Thread(target=self.abort, args=(target,), name="fsm-abort", daemon=True))
                self._aborts[-1].start()

    def batch(self, batch_id: int) -> BatchWork | None:
        """What is known of an open batch."""
        return self._work.get(batch_id)

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        """Forget batches that have ended."""
        for record in records:
            if is_batch_end(record) and record.batch_id is not None:
                if record.dest in _CONSUMED:
                    self._saver.consumed(record.batch_id)
                self._work.pop(record.batch_id, None)
        return ()

    def close(self, timeout_s: float) -> None:
        """End the engines; one that does not end in time is killed."""
        for thread in self._aborts:
            thread.join(timeout_s)
        self._train_engine.close()

    def work_of(self, command: Command) -> BatchWork:
        """The entry of the command's batch, made if there is none."""
        assert command.batch_id is not None, command
        return self._work.setdefault(command.batch_id, BatchWork())

    def snapshot_of(self, command: Command) -> Snapshot:
        """The published weights of the command's version."""
        assert command.version is not None, command
        return self._snapshots[command.version]

    def _start_trainer(self, command: Command) -> Input:
        self._train_engine.start()
        self._saver.restore(self._train_engine)
        return Input(InputKind.STARTED)

    def _train(self, command: Command) -> Input:
        work = self.work_of(command)
        assert work.train_batch is not None and command.version is not None and command.batch_id is not None
        version = work.train_batch.rollout_policy_version
        limit = self._gate.limit_of_step(work.train_batch, command.version)
        try:
            result = self._train_engine.train(work.train_batch.train_sequences, limit)
        except LogprobMismatch as error:
            raise self._gate.explain_step(error, command.batch_id, version, work.engine) from error
        work.result = result
        if result.stepped:
            self._saver.stepped(work.train_batch.reward_mean, result)
        return Input(
            InputKind.TRAINED,
            train_version=result.train_version,
            tokens=work.train_batch.token_count,
            digest=digest(array("d", [result.metrics.get(name, 0.0) for name in ("loss", "grad_norm")])),
            reason=None if result.stepped else "no_step",
        )

    def _export(self, command: Command) -> Input:
        assert command.version is not None
        self._snapshots[command.version] = self._train_engine.export(command.version)
        self._gate.exported(command.version, self._train_engine)
        return Input(InputKind.EXPORTED, train_version=command.version)

    def _save(self, command: Command) -> Input:
        assert command.version is not None
        path = self._saver.save(self._train_engine, command.version, self.source_state())
        return Input(InputKind.SAVED, train_version=command.version, message=str(path))


def is_batch_end(record: Record) -> bool:
    """Whether a record says that a batch has come to its end."""
    return record.kind is RecordKind.TRANSITION and record.machine == "batch" and record.dest in _ENDED


def digest(*parts: array[int] | array[float]) -> str:
    """Fingerprint of numbers, bit for bit, to hold a re-execution against."""
    fingerprint = hashlib.blake2b(digest_size=8)
    for part in parts:
        fingerprint.update(part.tobytes())
    return fingerprint.hexdigest()
