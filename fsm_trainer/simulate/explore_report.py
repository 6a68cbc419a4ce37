"""What an exploration hands to people: its figures, its deepest schedule, and a found violation as a test to paste."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Input, InputKind
from fsm_trainer.core.invariants import hold
from fsm_trainer.core.monitor import Monitor
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.simulate import explore_checks as checks
from fsm_trainer.simulate.explore import BEGIN, Case, Found
from fsm_trainer.simulate.explore_moves import Move, World, apply, is_fault, moves

MAX_EVENTS = 10_000


def replay(case: Case, schedule: Iterable[Move]) -> Scheduler:
    """Run a schedule on one scheduler from its beginning, then complete what is left, oldest first, to the end.

    Holds the same checks as the search and raises AssertionError where it found a violation; the ended scheduler is
    returned if there is none (any more).
    """
    scheduler, monitor = Scheduler(case.config), Monitor(case.config)
    monitor.see_all(scheduler.step(Input(InputKind.BEGIN))[0])
    faulted = False
    for move in schedule:
        if move != BEGIN and not scheduler.finished:
            faulted = faulted or is_fault(move)
            _replay_move(scheduler, monitor, move, case.world)
    for _ in range(MAX_EVENTS):
        if scheduler.finished:
            break
        _replay_move(scheduler, monitor, moves(scheduler.state, faults=0, stops=0)[0], case.world)
    hold(scheduler.finished, "no livelock", scheduler.status())
    monitor.finish()
    checks.check_end(scheduler.state, case.world, faulted=faulted)
    return scheduler


def _replay_move(scheduler: Scheduler, monitor: Monitor, move: Move, world: World) -> None:
    records, _ = apply(scheduler, move, world)
    monitor.see_all(records)
    checks.check_step(scheduler.state, records, world)
    checks.check_state(scheduler.state)


def as_test(found: Found) -> str:
    """A pytest test that fails where the search found the violation."""
    case = found.case
    lines = [
        "from fsm_trainer.core.config import SchedulerConfig",
        "from fsm_trainer.core.events import CommandKind as K",
        "from fsm_trainer.simulate.explore import Case",
        "from fsm_trainer.simulate.explore_moves import Move, World",
        "from fsm_trainer.simulate.explore_report import replay",
        "",
        "",
        "def test_found_by_the_explorer() -> None:",
        f"    # {' '.join(str(found.violation).split())[:400]}",
        f"    case = Case({config_text(case.config)}, {_world_text(case.world)})",
        "    replay(",
        "        case,",
        "        [",
        *(f"            {_move_text(move)}," for move in found.schedule if move != BEGIN),
        "        ],",
        "    )",
    ]
    return "\n".join(lines) + "\n"


def config_text(config: SchedulerConfig) -> str:
    """The call that makes this configuration, without what is default."""
    default = SchedulerConfig()
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    given = ", ".join(f"{k}={v!r}" for k, v in values.items() if v != getattr(default, k))
    return f"SchedulerConfig({given})"


def _world_text(world: World) -> str:
    given = [] if world.prompts is None else [f"prompts={world.prompts}"]
    for name in ("degenerate", "no_step"):
        batches = getattr(world, name)
        if batches:
            given.append(f"{name}=frozenset({set(batches)})")
    return f"World({', '.join(given)})"


def _move_text(move: Move) -> str:
    given = [repr(move.action)]
    if move.kind is not None:
        given.append(f"K.{move.kind.name}")
    for name in ("batch_id", "engine", "first", "last"):
        value = getattr(move, name)
        if value is not None:
            given.append(f"{name}={value}")
    return f"Move({', '.join(given)})"


def schedule_text(schedule: Sequence[Move]) -> str:
    """A schedule in one line: `generate(0)@1` is the end of batch 0's generation on engine 1."""
    words = []
    for move in schedule:
        what = move.action if move.kind is None else move.kind.value
        batch = "" if move.batch_id is None else f"({move.batch_id})"
        engine = "" if move.engine is None else f"@{move.engine}"
        if move.first is not None:
            engine += f":{move.first}-{move.last}"
        mark = "" if move.action == "complete" or move.kind is None else f"!{move.action}"
        words.append(f"{what}{batch}{engine}{mark}")
    return " ".join(words)
