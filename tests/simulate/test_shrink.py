"""A broken scheduler is found by seeds, and the report holds the smallest failing run near the one that failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fsm_trainer.core import admission, policy
from fsm_trainer.core.batch_queue import BoundedQueue
from fsm_trainer.core.events import CommandKind
from fsm_trainer.simulate.durations import Durations
from fsm_trainer.simulate.faults import Disturbance, FaultPlan
from fsm_trainer.simulate.shrink import SeedFailure, neighbours, try_seed
from fsm_trainer.simulate.swarm import Case, draw_case
from fsm_trainer.testing import NO_DEADLINES, Delivery, SchedulerConfig

Break = Callable[[pytest.MonkeyPatch], None]


def first_failure(seeds: range = range(200)) -> SeedFailure:
    found = (failure for seed in seeds if (failure := try_seed(seed)) is not None)
    failure = next(found, None)
    assert failure is not None, "no seed notices"
    return failure


def too_much_staleness(patch: pytest.MonkeyPatch) -> None:
    right = policy.feasible
    patch.setattr(policy, "feasible", lambda version, deadlines: right(version - 1, deadlines))


def too_long_a_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BoundedQueue, "full", property(lambda self: len(self) > self.maxsize))


def open_gates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(admission.Admission, "gate_closes", lambda self, engine: False)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (too_much_staleness, "no needless drop"),
        (too_long_a_queue, "queue within capacity"),
        (open_gates, "a due sync closes the gate"),
    ],
)
def test_a_broken_policy_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch, spoil: Break, problem: str) -> None:
    spoil(monkeypatch)
    failure = first_failure()
    assert problem in failure.problem
    assert problem in failure.smallest_problem
    assert len(failure.smallest.plan.parts) <= 1
    assert failure.smallest.size < failure.case.size
    assert (failure.smallest.config.max_steps or failure.smallest.batches or 0) <= 5
    assert not any(try_smaller(failure))
    report = str(failure)
    assert f"seed {failure.seed} fails at commit " in report
    assert f"draw_case({failure.seed}).run()" in report
    assert len(failure.last_records) == 20
    assert all(f"{record.seq:>5}" in report for record in failure.last_records)


def try_smaller(failure: SeedFailure) -> list[bool]:
    """Whether any neighbour of the smallest still fails by the same rule."""
    from fsm_trainer.simulate.shrink import failure_of

    found = [failure_of(case) for case in neighbours(failure.smallest)]
    rule = failure.problem.split(":")[1]
    return [trouble is not None and rule in str(trouble) for trouble in found]


def test_a_fault_that_matters_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that trusts a completion that comes twice breaks only with such a fault."""
    from fsm_trainer.core import handlers

    right = handlers._on_completion

    def trusting(rec: Any, chosen: Any, event: Any) -> None:
        if event.op not in rec.state.ops:
            raise KeyError("no such operation")
        right(rec, chosen, event)

    monkeypatch.setattr(handlers, "_on_completion", trusting)
    case = Case(
        seed=0,
        config=SchedulerConfig(max_steps=6, workers=2, max_staleness=2, deadlines=NO_DEADLINES),
        durations=Durations.of(),
        plan=FaultPlan(
            (
                Disturbance(CommandKind.GENERATE, Delivery.LATE, 2, 1.0),
                Disturbance(CommandKind.REWARD, Delivery.TWICE, 1, 0.1),
                Disturbance(CommandKind.TRAIN, Delivery.HELD, 2),
            )
        ),
        batches=None,
    )
    failure = try_seed(0, draw=lambda seed: case)
    assert failure is not None
    assert failure.smallest.plan.parts == (Disturbance(CommandKind.REWARD, Delivery.TWICE, 1, 0.1),)
    assert failure.smallest.config.max_steps is not None
    assert failure.smallest.config.max_steps < 6


def test_a_sound_seed_has_nothing_to_report() -> None:
    assert try_seed(0) is None


def test_every_neighbour_is_smaller_in_one_thing() -> None:
    for seed in range(50):
        case = draw_case(seed)
        for neighbour in neighbours(case):
            assert neighbour != case
            assert neighbour.size <= case.size
            assert replace(neighbour, seed=case.seed) == neighbour
