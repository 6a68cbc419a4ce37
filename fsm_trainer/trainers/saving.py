"""What a run saves and where it goes on from: the engine's files, its settings, and where the prompts stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsm_trainer.config import TrainConfig
from fsm_trainer.config.checkpoint import RUN_CONFIG, SOURCE_STATE, Checkpoint
from fsm_trainer.engines.base import TrainEngine, TrainResult
from fsm_trainer.trainers.checkpoints import CheckpointStore
from fsm_trainer.trainers.run_directory import RunDirectory


class Saver:
    """One run's checkpoints. Told of consumed batches by the loop's thread; the rest is the trainer's thread."""

    def __init__(
        self,
        run: RunDirectory,
        store: CheckpointStore,
        *,
        settings: TrainConfig | None = None,
        start: Checkpoint | None = None,
    ) -> None:
        """`settings` go into each checkpoint; `start` is the one that the run goes on from."""
        self._run = run
        self._store = store
        self._settings = settings
        self._start = start
        self._next_batch = 0 if start is None else start.first_batch
        """One above the highest id consumed. No batch is consumed during a save."""

    @classmethod
    def of(cls, run: RunDirectory, settings: TrainConfig | None = None, start: Checkpoint | None = None) -> Saver:
        """The saver that a run's settings ask for; without any, one that keeps everything."""
        if settings is None:
            return cls(run, CheckpointStore(run.checkpoints))
        store = CheckpointStore(run.checkpoints, settings.save_total_limit, settings.save_best)
        return cls(run, store, settings=settings, start=start)

    def consumed(self, batch_id: int) -> None:
        """A batch was trained on or dropped."""
        self._next_batch = max(self._next_batch, batch_id + 1)

    def stepped(self, reward_mean: float, result: TrainResult) -> None:
        """An optimiser step was taken. ValueError if --save-best names no metric of it."""
        self._store.note_step({"reward_mean": reward_mean, **result.metrics})

    def restore(self, engine: TrainEngine) -> None:
        """Let a started engine go on from the checkpoint, if there is one."""
        if self._start is None:
            return
        restored = engine.restore(str(self._start.path))
        if restored != self._start.train_version:
            raise ValueError(
                f"checkpoint {self._start.path} is of {self._start.train_version} optimiser steps, but its engine "
                f"state of {restored}; it is damaged"
            )

    def save(self, engine: TrainEngine, train_version: int, source: dict[str, Any] | None) -> Path:
        """Write a checkpoint; `source` says where the prompts stand. Returns its folder."""
        path = self._run.checkpoint(train_version)

        def fill(folder: Path) -> None:
            engine.save(str(folder))
            if source is not None:
                (folder / SOURCE_STATE).write_text(json.dumps(source) + "\n", encoding="utf-8")
            if self._settings is not None:
                (folder / RUN_CONFIG).write_text(self._settings.to_json(), encoding="utf-8")

        self._store.save(path, fill, train_version=train_version, first_batch=self._next_batch)
        return path
