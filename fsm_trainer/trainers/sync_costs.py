"""What each load of weights cost, as the engine says it, for the log.

Noted on the lane of the engine that has loaded; the loop's thread makes rows of it when the load is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.engines.base import Loaded


class SyncCosts:
    """The newest load of each engine."""

    def __init__(self) -> None:
        """Nothing has been loaded."""
        self._loaded: dict[int, Loaded] = {}

    def note(self, engine: int, loaded: Loaded) -> None:
        """An engine has loaded; called before the scheduler hears of it, and an engine's loads come one by one."""
        self._loaded[engine] = loaded

    def rows(self, records: Sequence[Record]) -> list[Record]:
        """The log's metric rows of the loads among these records. A part that took nothing, or is unknown, has none."""
        return [
            load_row(load, name, value)
            for load in loads_among(records)
            if load.engine in self._loaded
            for name, value in _costs(self._loaded[load.engine])
            if value > 0
        ]


def loads_among(records: Sequence[Record]) -> list[Record]:
    """The records that say that an engine has loaded a version."""
    return [record for record in records if record.kind is RecordKind.VERSION and record.trigger == "load"]


def load_row(load: Record, name: str, value: float, rate: tuple[float, float] | None = None) -> Record:
    """The log's metric row of a load; `rate` is the numerator and denominator of one that is a rate."""
    numerator, denominator = rate or (None, None)
    return Record(
        seq=-1,
        t_ns=load.t_ns,
        kind=RecordKind.METRIC,
        machine="engine",
        cause_seq=load.seq,
        engine=load.engine,
        rollout_version_last=load.rollout_version_last,
        value=value,
        reason=name,
        numerator=numerator,
        denominator=denominator,
    )


def _costs(loaded: Loaded) -> tuple[tuple[str, float], ...]:
    return (
        ("sync_pause_s", loaded.pause_s),
        ("sync_transfer_s", loaded.transfer_s),
        ("sync_resume_s", loaded.resume_s),
        ("sync_bytes", float(loaded.nbytes)),
    )
