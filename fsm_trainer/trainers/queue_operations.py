"""The rollout side of a run whose batches come from producers outside it, through an `AsyncTrainBatchQueue`.

To the scheduler the producers are one rollout engine: taking a batch from the queue is its prompt loading, and what
it "generates" is there at once, stamped with the version that the producer used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fsm_trainer.core.batch import AsyncTrainBatch
from fsm_trainer.core.batch_queue import QueueClosed
from fsm_trainer.core.events import Command, Input, InputKind, Record, RecordKind
from fsm_trainer.engines.base import Snapshot, TrainEngine
from fsm_trainer.runtime.train_queue import AsyncTrainBatchQueue
from fsm_trainer.trainers.mismatch import MismatchGate
from fsm_trainer.trainers.operations import RunOperations
from fsm_trainer.trainers.run_directory import RunDirectory
from fsm_trainer.trainers.saving import Saver

OnWeights = Callable[[Snapshot], None]
"""Told of each newly published version; the snapshot can be read while the call lasts."""


class QueueOperations(RunOperations):
    """Trains on what others put into the queue, until it is closed."""

    def __init__(
        self,
        *,
        queue: AsyncTrainBatchQueue,
        on_weights: OnWeights | None,
        train_engine: TrainEngine,
        run: RunDirectory,
        timeout_s: float | None,
        gate: MismatchGate | None = None,
        saver: Saver | None = None,
    ) -> None:
        """`timeout_s` is how long the producers may keep the run waiting; None for ever."""
        super().__init__(train_engine=train_engine, run=run, gate=gate, saver=saver)
        self._queue = queue
        self._on_weights = on_weights
        self._timeout_s = timeout_s

    def start_engine(self, command: Command) -> Input:
        """The producers start themselves."""
        return Input(InputKind.STARTED)

    def load_prompts(self, command: Command) -> Input:
        """Wait for the next batch; a closed and empty queue is the end."""
        try:
            batch: object = self._queue.get(timeout_s=self._timeout_s)
        except QueueClosed:
            return Input(InputKind.EXHAUSTED)
        if not isinstance(batch, AsyncTrainBatch) or not batch.train_sequences:
            raise ValueError(f"the train queue gave {batch!r}, expected an AsyncTrainBatch with at least one sequence")
        oldest = min(batch.rollout_versions)
        if oldest < batch.rollout_policy_version:
            raise ValueError(
                f"batch {batch.prompt_batch_id} is stamped with version {batch.rollout_policy_version} but version "
                f"{oldest} drew some of its tokens, expected the oldest as rollout_policy_version, from which "
                f"staleness counts"
            )
        self.work_of(command).train_batch = batch
        return Input(InputKind.LOADED)

    def generate(self, command: Command) -> Input:
        """Pass on the producer's stamp."""
        batch = self._batch_of(command)
        return Input(
            InputKind.GENERATED,
            rollout_version_first=batch.rollout_policy_version,
            rollout_version_last=max(batch.rollout_versions),
            tokens=sum(sum(s.loss_mask) for s in batch.train_sequences),
        )

    def reward(self, command: Command) -> Input:
        """The producer has scored it."""
        return Input(InputKind.REWARDED, tokens=self._batch_of(command).token_count)

    def load_weights(self, command: Command) -> Input:
        """Tell the producers."""
        if self._on_weights is not None:
            self._on_weights(self.snapshot_of(command))
        return Input(InputKind.WEIGHTS_LOADED, rollout_version_last=command.version)

    def abort(self, command: Command) -> None:
        """The one thing that waits here is the queue, and a closed one releases it."""
        self._queue.close()

    def close_source(self) -> None:
        """Take nothing more: producers meet QueueClosed."""
        self._queue.close()

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        """Tell the producers of a failure first: the close that follows would look like an ordinary end to them."""
        for r in records:
            if r.kind is RecordKind.TRANSITION and r.machine == "run" and r.trigger == "stop" and r.reason == "failed":
                said = [x.message for x in records if x.kind is RecordKind.TRANSITION and x.message]
                self._queue.report_error(RuntimeError((said or [records[0].message or "the run failed"])[-1]))
        return super().on_step(records)

    def _batch_of(self, command: Command) -> AsyncTrainBatch:
        batch = self.work_of(command).train_batch
        assert batch is not None, command
        return batch
