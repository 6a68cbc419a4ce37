"""An event log in memory, which can be told to fail."""

from __future__ import annotations

from fsm_trainer.core.events import Record


class MemorySink:
    """Keeps records, and notes how many there were at each flush and sync."""

    def __init__(self, *, fail_at: int | None = None) -> None:
        """`fail_at`: seq of the first record that cannot be kept; from then on nothing can."""
        self.records: list[Record] = []
        self.flushes: list[int] = []
        self.syncs: list[int] = []
        self._fail_at = fail_at

    def append(self, record: Record) -> None:
        """Keep one row."""
        if self._fail_at is not None:
            self._check(record.seq)
        self.records.append(record)

    def flush(self) -> None:
        """Note it."""
        self._check(len(self.records))
        self.flushes.append(len(self.records))

    def sync(self) -> None:
        """Note it."""
        self._check(len(self.records))
        self.syncs.append(len(self.records))

    def _check(self, seq: int) -> None:
        if self._fail_at is not None and seq >= self._fail_at:
            raise OSError(f"no space left for row {seq}")
