"""Numbers of each train step: one JSON object a step in `metrics.jsonl`, and the same as `metric` rows of the log.

A view of what the scheduler recorded and the engines reported; no decision depends on it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from fsm_trainer.core.config import SECOND_NS
from fsm_trainer.core.events import InputKind, Record, RecordKind
from fsm_trainer.core.machines import EngineState, RunState, TrainerState
from fsm_trainer.trainers.batch_numbers import batch_rates, batch_values, quotient
from fsm_trainer.trainers.operations import BatchWork


class StepMetrics:
    """Observer of the event loop: writes one line for every optimiser step. Raises OSError if it cannot."""

    def __init__(self, path: Path, work_of: Callable[[int], BatchWork | None]) -> None:
        """`work_of` gives what is known of an open batch."""
        self._file = path.open("x", encoding="utf-8")
        self._work_of = work_of
        self._queue_len = 0
        self._waiting_since_ns = 0
        self._wait_ns = 0
        self._sync_ns = 0
        self._load_since_ns: dict[str, int] = {}
        self.last: dict[str, float] = {}
        """The newest step's numbers, for a display."""

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        """Follow the records; at an optimiser step write its line and return its metric rows."""
        rows: list[Record] = []
        for record in records:
            self._follow(record)
            if record.kind is RecordKind.VERSION and record.trigger == "step":
                rows.extend(self._write(records[0], record))
        return rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _follow(self, r: Record) -> None:
        if r.kind is RecordKind.QUEUE and r.queue_len is not None:
            self._queue_len = r.queue_len
        elif r.kind is RecordKind.INPUT and r.trigger == InputKind.EXPORTED.value:
            self._sync_ns += _duration_ns(r)
        elif r.kind is RecordKind.TRANSITION and r.machine == "engine" and r.entity is not None:
            self._follow_load(r, r.entity)
        elif r.kind is RecordKind.TRANSITION and r.machine == "run" and r.dest == RunState.RUNNING.value:
            # Waiting for the engines to start is no wait for a batch.
            self._wait_ns, self._waiting_since_ns = 0, r.t_ns
        elif r.kind is RecordKind.TRANSITION and r.machine == "trainer":
            if r.dest == TrainerState.WAITING.value:
                self._waiting_since_ns = r.t_ns
            elif r.source == TrainerState.WAITING.value:
                self._wait_ns += r.t_ns - self._waiting_since_ns

    def _follow_load(self, r: Record, entity: str) -> None:
        if r.dest == EngineState.LOADING.value:
            self._load_since_ns[entity] = r.t_ns
        elif r.source == EngineState.LOADING.value:
            self._sync_ns += r.t_ns - self._load_since_ns[entity]

    def _write(self, trained: Record, step: Record) -> list[Record]:
        assert step.batch_id is not None and step.train_version is not None
        work = self._work_of(step.batch_id)
        assert work is not None and work.result is not None and work.train_batch is not None
        batch = work.train_batch
        staleness = step.train_version - 1 - batch.rollout_policy_version
        rates = {**batch_rates(work), "staleness_mean": (float(staleness), 1.0)}
        numbers: dict[str, float] = {
            "reward_mean": batch.reward_mean,
            **work.result.metrics,
            "staleness_max": float(staleness),
            "queue_len": float(self._queue_len),
            "rollout_s": batch.rollout_time_s,
            "reward_s": batch.reward_time_s,
            "materialize_s": batch.materialize_time_s,
            "train_s": _duration_ns(trained) / SECOND_NS,
            "sync_s": self._sync_ns / SECOND_NS,
            "wait_s": self._wait_ns / SECOND_NS,
            "tokens": float(batch.token_count),
            **work.reward_metrics,
            **{name: quotient(rate) for name, rate in rates.items()},
            **batch_values(work, rates),
        }
        self._sync_ns = self._wait_ns = 0
        self.last = numbers
        head = {
            "step": step.train_version,
            "train_version": step.train_version,
            "rollout_version": batch.rollout_policy_version,
            "batch_id": step.batch_id,
            "epoch": batch.epoch,
            "time_s": step.t_ns / SECOND_NS,
        }
        self._file.write(json.dumps({**head, **{name: _in_json(value) for name, value in numbers.items()}}) + "\n")
        self._file.flush()
        return [_metric_row(step, name, value, staleness, rates.get(name)) for name, value in numbers.items()]


def _metric_row(
    step: Record, name: str, value: float, staleness: int, rate: tuple[float, float] | None = None
) -> Record:
    numerator, denominator = rate or (None, None)
    return Record(
        seq=-1,
        t_ns=step.t_ns,
        kind=RecordKind.METRIC,
        machine="trainer",
        cause_seq=step.seq,
        batch_id=step.batch_id,
        train_version=step.train_version,
        staleness=staleness,
        value=value,
        reason=name,
        numerator=numerator,
        denominator=denominator,
    )


def _in_json(value: float) -> float | None:
    """JSON has no infinities: an importance ratio may overflow though the loss is finite."""
    return value if math.isfinite(value) else None


def _duration_ns(completion: Record) -> int:
    assert completion.started_ns is not None and completion.finished_ns is not None
    return completion.finished_ns - completion.started_ns
