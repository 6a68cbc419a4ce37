"""What to say of a seed that fails: the smallest neighbour that fails alike, and all that is needed to see it again.

Neighbours of a run are itself with one fault less, fewer steps, fewer workers or engines, plainer durations.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path

from fsm_trainer.core.events import Record
from fsm_trainer.simulate.durations import Durations
from fsm_trainer.simulate.simulator import NO_DEADLINES, SimulationError
from fsm_trainer.simulate.swarm import Case, draw_case

MAX_TRIES = 400
"""Runs that a search for a smaller one may take."""


@dataclass(frozen=True)
class SeedFailure:
    """One failing seed, made as small as was found."""

    seed: int
    problem: str
    case: Case
    smallest: Case
    smallest_problem: str
    tries: int
    last_records: tuple[Record, ...]
    """Of the smallest run, up to the step that broke."""

    def __str__(self) -> str:
        """The whole report."""
        rows = "\n".join(f"  {_row(record)}" for record in self.last_records)
        return (
            f"seed {self.seed} fails at commit {commit()}: {self.problem}\n"
            f"run it again: draw_case({self.seed}).run()   (fsm_trainer.simulate.swarm)\n"
            f"its options:\n{_describe(self.case)}\n"
            f"smallest failing neighbour ({self.tries} tried): {self.smallest_problem}\n{_describe(self.smallest)}\n"
            f"its last {len(self.last_records)} records:\n{rows}"
        )


def try_seed(seed: int, draw: Callable[[int], Case] = draw_case) -> SeedFailure | None:
    """Run a seed; None if all is well, else the failure, made small."""
    case = draw(seed)
    failure = failure_of(case)
    return None if failure is None else shrink(case, failure)


def failure_of(case: Case) -> SimulationError | None:
    """What is wrong with a run; None if nothing is."""
    try:
        case.run()
    except SimulationError as error:
        return error
    return None


def shrink(case: Case, failure: SimulationError) -> SeedFailure:
    """Walk to ever smaller neighbours that fail by the same rule, until none of them does."""
    smallest, found, tries = case, failure, 0
    progress = True
    while progress and tries < MAX_TRIES:
        progress = False
        for neighbour in neighbours(smallest):
            tries += 1
            trouble = failure_of(neighbour)
            if trouble is not None and trouble.rule == failure.rule:
                smallest, found, progress = neighbour, trouble, True
                break
    return SeedFailure(case.seed, str(failure), case, smallest, str(found), tries, found.last_records)


def neighbours(case: Case) -> Iterator[Case]:
    """Runs that differ in one thing and are smaller, the boldest first."""
    config, plan = case.config, case.plan
    if len(plan.parts) > 1:
        half = len(plan.parts) // 2
        yield replace(case, plan=replace(plan, parts=plan.parts[:half]))
        yield replace(case, plan=replace(plan, parts=plan.parts[half:]))
    for index in range(len(plan.parts)):
        yield replace(case, plan=plan.without(index))
    if plan.heal_at is not None:
        yield replace(case, plan=replace(plan, heal_at=None))
    for fewer in _fewer(config.max_steps, 1):
        yield replace(case, config=replace(config, max_steps=fewer))
    for fewer in _fewer(case.batches, 0):
        yield replace(case, batches=fewer)
    for name, least in (("engines", 1), ("workers", config.engines), ("queue_size", 1), ("prefetch", 0)):
        if getattr(config, name) > least:
            yield replace(case, config=replace(config, **{name: getattr(config, name) - 1}))
    if config.on_engine_failure == "restart":
        yield replace(case, config=replace(config, on_engine_failure="fail"))
    if config.inflight:
        yield replace(case, config=replace(config, sync_mode="drain"))
    if config.save_interval:
        yield replace(case, config=replace(config, save_interval=0))
    if case.durations.before or case.durations.after:
        yield replace(case, durations=replace(case.durations, before={}, after={}))
    if case.durations.operations and case.durations != Durations.of():
        yield replace(case, durations=Durations.of())


def _fewer(value: int | None, least: int) -> list[int]:
    return [] if value is None else [n for n in dict.fromkeys((value // 2, value - 1)) if least <= n < value]


def _row(record: Record) -> str:
    filled = [
        f"{name}={value}" for name, value in zip(Record._fields[3:], record[3:], strict=True) if value is not None
    ]
    return f"{record.seq:>5} {record.t_ns / 1e9:>9.3f} s {record.kind.value:<10} {' '.join(filled)}"


def _describe(case: Case) -> str:
    shown = [case.config, *case.plan.parts]
    lines = [_show(part) for part in shown]
    for name in ("operations", "before", "after"):
        amounts = getattr(case.durations, name).items()
        lines.append(f"{name}: {', '.join(f'{kind.value} {_show(amount)}' for kind, amount in amounts) or 'none'}")
    lines.append(f"batches {case.batches}, heal_at {case.plan.heal_at}")
    return "\n".join(f"  {line}" for line in lines)


def _show(value: object) -> str:
    """What differs from the default."""
    if isinstance(value, Enum):
        return str(value.value)
    if value == NO_DEADLINES:
        return "NO_DEADLINES"
    if not is_dataclass(value):
        return repr(value)
    changed = [f for f in fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{f.name}={_show(getattr(value, f.name))}' for f in changed)})"


def commit() -> str:
    """The revision under test, as far as git knows it here."""
    asked = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
