"""The machines of a run in the order in which they are shown, and how batches end. Knows no log."""

from __future__ import annotations

MACHINES = ("run", "trainer", "rollout", "engine")
"""Every kind of machine but the batch."""
BATCH_ENDS = ("trained", "dropped", "failed", "cancelled")
"""The terminal states of a batch."""


def place_of(machine: str, entity: str) -> tuple[int, int]:
    """What entities are sorted by: the kind, then the number in the name, so that rollout-10 comes after rollout-9."""
    kind = MACHINES.index(machine) if machine in MACHINES else len(MACHINES)
    number = entity.rpartition("-")[2]
    return kind, int(number) if number.isdecimal() else 0
