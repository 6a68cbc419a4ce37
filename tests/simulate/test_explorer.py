"""All orders of completions of small runs, and that the search would find what is wrong."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from fsm_trainer.core import rules
from fsm_trainer.core.admission import Paced
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, Input, InputKind
from fsm_trainer.core.invariants import InvariantViolation
from fsm_trainer.core.publishing import refresh
from fsm_trainer.core.scheduler import Scheduler
from fsm_trainer.core.state import State
from fsm_trainer.simulate import explore_state
from fsm_trainer.simulate.explore import BEGIN, Case, _topological, explore
from fsm_trainer.simulate.explore_moves import Move, World, apply, moves
from fsm_trainer.simulate.explore_plan import ADMISSIONS, small_plan
from fsm_trainer.simulate.explore_report import as_test, replay, schedule_text
from fsm_trainer.simulate.explore_state import check_shape, freeze, supported, thaw

NO_REFRESH = tuple(rule for rule in rules.RULES if rule is not refresh)


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_every_order_of_completions_keeps_every_rule(admission: str) -> None:
    states = steps = 0
    for case in small_plan():
        if case.config.admission == admission:
            found = explore(case)
            assert found.violation is None, as_test(found)
            assert found.ends
            states, steps = states + found.states, steps + found.steps
    assert states > 5_000, "the plan has shrunk"
    assert steps > states, "states are reached by several schedules"


@pytest.mark.parametrize("admission", ["paced", "greedy"])
@pytest.mark.parametrize("staleness", range(4))
@pytest.mark.parametrize("interval", range(1, 5))
def test_refresh_is_needed_exactly_below_interval_minus_one(
    admission: str, staleness: int, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SchedulerConfig(
        admission=admission, max_staleness=staleness, sync_interval=interval, max_steps=5, prefetch=0
    )
    assert explore(Case(config)).violation is None, "with it, every run completes"
    monkeypatch.setattr(rules, "RULES", NO_REFRESH)
    violation = explore(Case(config)).violation
    assert (violation is not None) == (staleness < interval - 1)
    assert violation is None or "in flight" in violation, "without it the run stands still"


def test_a_violation_comes_with_a_shortest_schedule_as_a_test_to_paste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "RULES", NO_REFRESH)
    found = explore(Case(SchedulerConfig(max_staleness=0, sync_interval=2, max_steps=3, prefetch=0)))
    assert found.violation is not None
    # Version 1 is due only after two steps, and without it there is no second batch.
    assert schedule_text(found.schedule) == (
        "begin start_trainer start_engine@0 export load_weights@0 load_prompts(0) generate(0)@0 reward(0) train(0)"
    )
    namespace: dict[str, Any] = {}
    exec(as_test(found), namespace)
    test: Callable[[], None] = namespace["test_found_by_the_explorer"]
    with pytest.raises(InvariantViolation, match="in flight"):
        test()
    monkeypatch.undo()
    test()


def test_a_wrong_rule_is_found_whatever_the_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Paced, "may_admit", lambda self, engine: len(self.state.unconsumed()) <= 2)
    case = Case(SchedulerConfig(workers=2, max_staleness=1, max_steps=3), faults=1, stops=2)
    found = explore(case)
    assert found.violation is not None
    with pytest.raises(InvariantViolation):
        replay(case, found.schedule)
    monkeypatch.undo()
    assert replay(case, found.schedule).finished


def test_a_found_schedule_with_disturbances_replays() -> None:
    case = Case(SchedulerConfig(max_steps=2), World(no_step=frozenset({0})), faults=1, stops=1)
    schedule = [
        BEGIN,
        Move("complete", CommandKind.START_TRAINER),
        Move("complete", CommandKind.START_ENGINE, engine=0),
        Move("stop"),
        Move("late", CommandKind.EXPORT),
    ]
    scheduler = replay(case, schedule)
    assert (scheduler.outcome, scheduler.error) == ("failed", "trainer in state syncing: export took longer than 300 s")
    assert schedule_text(schedule) == "begin start_trainer start_engine@0 stop export!late"


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_equal_bytes_have_equal_futures(admission: str) -> None:
    """A thawed scheduler takes every move to where the original takes it, along random schedules with everything."""
    rng = random.Random(admission)
    for _ in range(25):
        workers = rng.randint(1, 3)
        config = SchedulerConfig(
            admission=admission,
            workers=workers,
            engines=rng.randint(1, min(workers, 2)),
            queue_size=rng.randint(1, 2),
            max_staleness=rng.randint(1, 3),
            sync_interval=rng.randint(1, 2),
            max_steps=5,
            save_interval=rng.randint(0, 2),
        )
        world = World(prompts=rng.choice([None, 4]), degenerate=frozenset({1}), no_step=frozenset({2}))
        scheduler = Scheduler(config)
        scheduler.step(Input(InputKind.BEGIN))
        fault_at = rng.randint(5, 60)
        for event in range(200):
            if scheduler.finished:
                break
            options = moves(scheduler.state, faults=int(event == fault_at), stops=2 if event > 25 else 0)
            options = [move for move in options if move.action != "give_up"]
            move = rng.choice(options)
            other = thaw(config, freeze(scheduler))
            assert freeze(other) == freeze(scheduler)
            records = [apply(each, move, world)[0] for each in (scheduler, other)]
            kinds = [[(r.kind, r.trigger) for r in each if r.kind.value != "wait"] for each in records]
            assert sorted(kinds[0]) == sorted(kinds[1])
            assert freeze(other) == freeze(scheduler)
        assert scheduler.finished


def test_the_number_of_a_worker_is_no_part_of_the_state() -> None:
    config = SchedulerConfig(workers=3, max_staleness=2)
    scheduler = Scheduler(config)
    scheduler.step(Input(InputKind.BEGIN))
    first = freeze(scheduler)
    for _ in range(12):
        apply(scheduler, moves(scheduler.state, faults=0, stops=0)[0], World())
    assert freeze(scheduler) != first
    assert freeze(thaw(config, freeze(scheduler))) == freeze(scheduler)
    assert not supported(SchedulerConfig(workers=4, engines=2))
    assert supported(SchedulerConfig(workers=4, engines=4))


def test_what_the_scheduler_newly_remembers_must_be_made_known(monkeypatch: pytest.MonkeyPatch) -> None:
    check_shape()
    original = State.__init__

    def remembering(self: State, config: SchedulerConfig) -> None:
        original(self, config)
        self.something_new = 0  # type: ignore[attr-defined]

    monkeypatch.setattr(explore_state.State, "__init__", remembering)
    with pytest.raises(AssertionError, match="does not know {'something_new'}"):
        check_shape()


def test_a_cycle_is_told_from_a_graph_without_one() -> None:
    tree = [array("q", [1, 2]), array("q", [2]), array("q")]
    assert _topological(tree) == [0, 1, 2]
    assert len(_topological([*tree, array("q", [4]), array("q", [3])])) == 3


def test_a_case_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 50 states"):
        explore(Case(SchedulerConfig(max_steps=5)), limit=50)


def test_the_longest_schedule_is_one_that_can_be_run() -> None:
    case = Case(SchedulerConfig(workers=2, max_staleness=1, max_steps=2), stops=1)
    found = explore(case)
    assert found.violation is None
    assert found.outcomes.keys() == {"completed", "interrupted", "failed"}
    assert 0 < found.after_stop < found.after_drain < len(found.longest)
    assert replay(case, found.longest).finished
