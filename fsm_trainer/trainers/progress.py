"""What a display shows of a running trainer: a copy made by the loop thread, read by any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fsm_trainer.core.events import CommandKind, Record, RecordKind
from fsm_trainer.core.scheduler import Status


@dataclass(frozen=True)
class Progress:
    """One moment of a run."""

    status: Status
    total_steps: int | None
    elapsed_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers of the newest step."""
    tokens_per_s: float = 0.0
    """Generated completion tokens a second, since the run was running."""
    dropped: int = 0
    steps_before: int = 0
    """Optimiser steps of the runs that this one goes on from."""
    now_ns: int = 0
    """When it was read, on the run's clock."""
    starting_ns: dict[int, int] = field(default_factory=dict)
    """When the start of each engine that is being started was ordered."""

    @property
    def starting_s(self) -> dict[int, float]:
        """Seconds that each engine which is being started has taken so far."""
        return {engine: max(0, self.now_ns - began) / 1e9 for engine, began in sorted(self.starting_ns.items())}

    @property
    def left_s(self) -> float | None:
        """Seconds to go at the rate so far, once there is one; None where no more steps are to come."""
        done = self.status.train_version - self.steps_before
        if not done or self.total_steps is None or self.status.run not in ("starting", "running"):
            return None
        return self.elapsed_s / done * (self.total_steps - self.status.train_version)


class Display(Protocol):
    """Shows a run to a person."""

    def start(self, read: Callable[[], Progress]) -> None:
        """Begin; `read` gives the newest moment, from any thread."""

    def stop(self) -> None:
        """End, leaving the last moment shown."""


class ProgressTracker:
    """Observer of the event loop that keeps the newest `Progress`."""

    def __init__(
        self,
        status: Callable[[], Status],
        metrics: Callable[[], dict[str, float]],
        total_steps: int | None,
        now_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        """`status` and `metrics` are called on the loop thread; `now_ns` is the run's clock."""
        self._status = status
        self._metrics = metrics
        self._total_steps = total_steps
        self._now_ns = now_ns
        self._starts: dict[int, tuple[int, int]] = {}
        """`op` of a start -> engine, and when it was ordered."""
        self._up_ns = 0
        self._tokens = 0
        self._dropped = 0
        first = status()
        self._steps_before = first.train_version
        self.newest = Progress(first, total_steps, 0.0, steps_before=self._steps_before)

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        """Make a new copy."""
        for r in records:
            self._note_start(r)
            if r.kind is RecordKind.TRANSITION and r.machine == "run" and r.trigger == "run":
                self._up_ns = r.t_ns
            elif r.kind is RecordKind.TRANSITION and r.machine == "batch" and r.trigger == "generated":
                self._tokens += r.tokens or 0
            elif r.kind is RecordKind.DROP:
                self._dropped += 1
        elapsed_s = (records[0].t_ns - self._up_ns) / 1e9 if self._up_ns else 0.0
        self.newest = Progress(
            status=self._status(),
            total_steps=self._total_steps,
            elapsed_s=elapsed_s,
            metrics=self._metrics(),
            tokens_per_s=self._tokens / elapsed_s if elapsed_s else 0.0,
            dropped=self._dropped,
            steps_before=self._steps_before,
            starting_ns=dict(self._starts.values()),
        )
        return ()

    def read(self) -> Progress:
        """The newest moment, as of now; from any thread."""
        return replace(self.newest, now_ns=self._now_ns())

    def _note_start(self, record: Record) -> None:
        if record.kind is RecordKind.COMMAND and record.trigger == CommandKind.START_ENGINE.value:
            assert record.engine is not None
            self._starts[record.seq] = (record.engine, record.t_ns)
        elif record.kind is RecordKind.INPUT and record.cause_seq is not None:
            self._starts.pop(record.cause_seq, None)
