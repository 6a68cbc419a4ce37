"""When a run served, stepped and ended: the few moments that a prediction is made of and held against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.simulate.measured import FILLING

_NS = 1e9


@dataclass(frozen=True)
class Timing:
    """Seconds since the first event."""

    served_s: float
    """All engines served their first weights."""
    steps_s: tuple[float, ...]
    """Each optimiser step was taken."""
    end_s: float | None
    """The run completed; None if it was broken off or is still going."""

    def first(self, steps: int) -> Timing:
        """As far as so many steps."""
        return Timing(self.served_s, self.steps_s[:steps], None)

    def wall_s(self, steps: int, *, to_end: bool = True) -> float:
        """Seconds to the end, or the last step if there is none; of so many steps, the rest of which went on as these.

        Start-up, the first steps and what follows the last step are counted once.
        """
        taken = len(self.steps_s)
        tail = 0.0 if self.end_s is None or not to_end else self.end_s - self.steps_s[-1]
        if steps == taken:
            return self.steps_s[-1] + tail
        usual = (self.steps_s[-1] - self.steps_s[FILLING - 1]) / (taken - FILLING)
        return self.steps_s[-1] + (steps - taken) * usual + tail


def measure_timing(records: Sequence[Record]) -> Timing:
    """The moments of a run's records; other kinds of rows than transitions, versions and the ends may be left out."""
    begin = records[0].t_ns if records else 0
    served = next((r.t_ns for r in records if r.machine == "run" and r.dest == "running"), begin)
    steps = [r.t_ns for r in records if r.kind is RecordKind.VERSION and r.trigger == "step"]
    last = records[-1] if records else None
    completed = last is not None and last.kind is RecordKind.RUN_END and last.reason == "completed"
    return Timing(
        served_s=(served - begin) / _NS,
        steps_s=tuple((t - begin) / _NS for t in steps),
        end_s=(last.t_ns - begin) / _NS if completed and last is not None else None,
    )
