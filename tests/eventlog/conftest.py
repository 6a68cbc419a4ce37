"""Small logs for the tests of the event log."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fsm_trainer.core.events import Record, RecordKind


def sample_records(count: int) -> list[Record]:
    """Rows of every column type with nulls, the last of them `run_end`."""
    rows = [
        Record(
            seq=i,
            t_ns=10**15 + 1000 * i,
            kind=list(RecordKind)[i % 11],
            machine="trainer" if i % 2 else None,
            batch_id=i if i % 3 else None,
            value=i / 7 if i % 4 == 0 else None,
            message="größer als erlaubt" if i % 5 == 0 else None,
        )
        for i in range(count - 1)
    ]
    return [*rows, Record(seq=count - 1, t_ns=2 * 10**15, kind=RecordKind.RUN_END, reason="completed")]


@pytest.fixture(scope="session")
def make_rows() -> Callable[[int], list[Record]]:
    """Makes that many good rows."""
    return sample_records
