"""The promises of a train engine; see `contract.engine_contract`."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.base import Snapshot, TrainEngine


def _sequence(advantage: float, *completion: int) -> TrainSequence:
    prompt = (5, 6)
    return TrainSequence(
        tokens=(*prompt, *completion),
        logprobs=(0.0, 0.0, *([-1.0] * len(completion))),
        prompt_len=len(prompt),
        loss_mask=(0, 0, *([1] * len(completion))),
        advantage=advantage,
        reward=0.0,
    )


SEQUENCES = (_sequence(1.0, 7, 8), _sequence(-1.0, 9, 10, 11))


class TrainContract:
    """Each public method but `checks` is one promise."""

    def __init__(
        self,
        factory: Callable[[], TrainEngine],
        *,
        sequences: Sequence[TrainSequence] | None = None,
        flat_sequences: Sequence[TrainSequence] | None = None,
        bad_sequences: Sequence[TrainSequence] | None = None,
        read: Callable[[Snapshot], bytes] | None = None,
    ) -> None:
        """See `engine_contract`."""
        self._factory = factory
        self._sequences = SEQUENCES if sequences is None else sequences
        self._flat = flat_sequences
        self._bad = bad_sequences
        self._read = read

    def checks(self) -> list[Callable[[], None]]:
        """The promises that can be checked with what was given."""
        found = [
            self.counts_its_steps,
            self.reports_finite_metrics,
            self.exports_the_version_it_is_told,
            self.saves_a_whole_checkpoint,
            self.a_restored_engine_goes_on,
            self.closes_with_snapshots_published,
        ]
        if self._flat is not None:
            found.append(self.a_batch_without_gradient_is_no_step)
        if self._bad is not None:
            found.append(self.a_loss_that_is_not_finite_raises)
        if self._read is not None:
            found += [self.a_snapshot_keeps_its_weights, self.a_step_changes_the_weights, self.release_frees_a_snapshot]
        return found

    def counts_its_steps(self) -> None:
        """`train` returns how many optimiser steps were taken since `start`."""
        with self._engine() as engine:
            for step in (1, 2, 3):
                result = engine.train(self._sequences)
                found = (result.stepped, result.train_version)
                assert found == (True, step), f"after step {step}: stepped, train_version = {found}"

    def a_batch_without_gradient_is_no_step(self) -> None:
        """`stepped` is False then, and the count stays."""
        assert self._flat is not None
        with self._engine() as engine:
            engine.train(self._sequences)
            flat = engine.train(self._flat)
            found = (flat.stepped, flat.train_version)
            assert found == (False, 1), f"after a batch without gradient: stepped, train_version = {found}"
            assert engine.train(self._sequences).train_version == 2, "the count went on as if it had been a step"

    def a_loss_that_is_not_finite_raises(self) -> None:
        """`train` raises FloatingPointError then, before anything is counted."""
        assert self._bad is not None
        with self._engine() as engine:
            engine.train(self._sequences)
            try:
                engine.train(self._bad)
            except FloatingPointError:
                pass
            else:
                raise AssertionError("train returned though the loss is not finite")
            version = engine.train(self._sequences).train_version
            assert version == 2, f"the failed step was counted: train_version {version}, expected 2"

    def reports_finite_metrics(self) -> None:
        """Metrics of a step are finite numbers, the loss among them."""
        with self._engine() as engine:
            metrics = engine.train(self._sequences).metrics
        assert "loss" in metrics, f"no loss among {sorted(metrics)}"
        assert all(math.isfinite(value) for value in metrics.values()), f"metrics {metrics}"

    def exports_the_version_it_is_told(self) -> None:
        """`export(version)` returns a snapshot of that version, several at a time."""
        with self._engine() as engine:
            versions = [engine.export(0).version]
            engine.train(self._sequences)
            versions.append(engine.export(1).version)
            assert versions == [0, 1], f"exported versions 0 and 1, got {versions}"
            engine.release(0)
            engine.release(1)

    def a_snapshot_keeps_its_weights(self) -> None:
        """Training on does not change a published snapshot."""
        assert self._read is not None
        with self._engine() as engine:
            snapshot = engine.export(0)
            before = self._read(snapshot)
            engine.train(self._sequences)
            assert self._read(snapshot) == before, "a step changed a snapshot that was published before it"

    def a_step_changes_the_weights(self) -> None:
        """Snapshots before and after a step differ."""
        assert self._read is not None
        with self._engine() as engine:
            before = self._read(engine.export(0))
            engine.train(self._sequences)
            assert self._read(engine.export(1)) != before, "a step left the published weights as they were"

    def release_frees_a_snapshot(self) -> None:
        """A released snapshot cannot be read any more, and the others still can."""
        assert self._read is not None
        with self._engine() as engine:
            first, second = engine.export(0), engine.export(1)
            engine.release(0)
            try:
                self._read(first)
            except Exception:  # which one is the transport's own affair
                pass
            else:
                raise AssertionError("a released snapshot can still be read")
            assert self._read(second), "releasing one snapshot took another with it"

    def saves_a_whole_checkpoint(self) -> None:
        """`save` leaves a folder with files in it and nothing beside it, again and again."""
        with self._engine() as engine, tempfile.TemporaryDirectory() as parent:
            engine.train(self._sequences)
            for name in ("step-1", "step-2"):
                engine.save(str(Path(parent, name)))
                assert any(Path(parent, name).iterdir()), "save returned before any file was there"
            left = sorted(path.name for path in Path(parent).iterdir())
            assert left == ["step-1", "step-2"], f"save left other things behind: {left}"

    def a_restored_engine_goes_on(self) -> None:
        """An engine that restored a checkpoint takes the same steps as the one that saved it."""
        with tempfile.TemporaryDirectory() as parent:
            folder = str(Path(parent, "step-2"))
            with self._engine() as engine:
                for _ in range(2):
                    engine.train(self._sequences)
                engine.save(folder)
                expected = self._next_step(engine)
            with self._engine() as engine:
                restored = engine.restore(folder)
                assert restored == 2, f"restored a checkpoint of 2 steps, reports {restored}"
                found = self._next_step(engine)
        assert found == expected, f"goes on with {found[:2]} instead of {expected[:2]}, or with other weights"

    def _next_step(self, engine: TrainEngine) -> tuple[int, float, bytes]:
        result = engine.train(self._sequences)
        weights = b"" if self._read is None else self._read(engine.export(result.train_version))
        return result.train_version, result.metrics["loss"], weights

    def closes_with_snapshots_published(self) -> None:
        """`close` frees published snapshots too."""
        with self._engine() as engine:
            snapshot = engine.export(0)
        if self._read is None:
            return
        try:
            self._read(snapshot)
        except Exception:  # freed, which is right
            return
        raise AssertionError("a snapshot can still be read after close")

    @contextmanager
    def _engine(self) -> Iterator[TrainEngine]:
        engine = self._factory()
        engine.start()
        try:
            yield engine
        finally:
            engine.close()
