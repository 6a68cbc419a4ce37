"""Who worked and who waited for what while a run trained, from its records, without data frames.

The same figures as `fsm_trainer.analysis` gives of a recorded run (a test holds them together), in a millisecond.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fsm_trainer.core.events import Record, RecordKind

_WORKING = ("loading", "generating", "rewarding")


@dataclass(frozen=True)
class Shares:
    """Shares of the time between the first weights served and the beginning of the end."""

    window_s: float
    rollout_idle: float
    """Mean over the workers: neither loading nor generating nor rewarding."""
    trainer_idle: float
    """The trainer waits for a batch."""
    rollout_waits: dict[str, float]
    """Mean over the workers, by cause, largest first."""
    trainer_waits: dict[str, float]
    """By cause, largest first."""
    trainer_states: dict[str, float]
    """By state, largest first."""


def measure_shares(records: Sequence[Record]) -> Shares | None:
    """The shares of a run; None if it never trained."""
    moves = [r for r in records if r.kind is RecordKind.TRANSITION and r.machine == "run"]
    start = next((r.t_ns for r in moves if r.dest == "running"), None)
    if start is None:
        return None
    end = next((r.t_ns for r in moves if r.dest == "stopping"), records[-1].t_ns)
    if end <= start:
        return None
    spent = _spent(records, start, end)
    workers = {entity for entity, _, _ in spent if entity.startswith("rollout-")}
    whole, each = float(end - start), float(end - start) * max(len(workers), 1)
    rollout = _sum(spent, "rollout-", each)
    trainer = _sum(spent, "trainer", whole)
    return Shares(
        window_s=whole / 1e9,
        rollout_idle=1.0 - sum(share for (state, _), share in rollout.items() if state in _WORKING),
        trainer_idle=sum(share for (state, _), share in trainer.items() if state == "waiting"),
        rollout_waits=_by(1, {key: share for key, share in rollout.items() if key[1]}),
        trainer_waits=_by(1, {key: share for key, share in trainer.items() if key[1]}),
        trainer_states=_by(0, trainer),
    )


_Key = tuple[str, str]


def _spent(records: Sequence[Record], start: int, end: int) -> dict[tuple[str, str, str], int]:
    """Nanoseconds by (entity, state, cause) within the window."""
    spent: dict[tuple[str, str, str], int] = defaultdict(int)
    here: dict[str, tuple[str, str, int]] = {}
    for r in records:
        if r.machine not in ("rollout", "trainer") or r.entity is None:
            continue
        if r.kind is RecordKind.TRANSITION:
            now = (r.dest or "", "", r.t_ns)
        elif r.kind is RecordKind.WAIT:
            now = (r.source or "", r.reason or "", r.t_ns)
        else:
            continue
        state, cause, since = here.get(r.entity, (r.source or "", "", start))
        spent[r.entity, state, cause] += max(0, min(r.t_ns, end) - max(since, start))
        here[r.entity] = now
    for entity, (state, cause, since) in here.items():
        spent[entity, state, cause] += max(0, end - max(since, start))
    return spent


def _sum(spent: dict[tuple[str, str, str], int], prefix: str, whole: float) -> dict[_Key, float]:
    shares: dict[_Key, float] = defaultdict(float)
    for (entity, state, cause), ns in spent.items():
        if ns and entity.startswith(prefix):
            shares[state, cause] += ns / whole
    return shares


def _by(part: int, shares: dict[_Key, float]) -> dict[str, float]:
    """Summed over one part of the key, largest first."""
    total: dict[str, float] = defaultdict(float)
    for key, share in shares.items():
        total[key[part]] += share
    return dict(sorted(total.items(), key=lambda item: (-item[1], item[0])))
