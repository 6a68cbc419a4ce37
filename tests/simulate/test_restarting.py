"""Engines that fail and are started anew, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.analysis import summarize
from fsm_trainer.replay.verify import verify
from fsm_trainer.simulate.explore_plan import restarted
from fsm_trainer.simulate.whatif import whatif
from fsm_trainer.testing import (
    NO_DEADLINES,
    CommandKind,
    Deadlines,
    Durations,
    Effect,
    Fault,
    FaultPlan,
    Happening,
    Input,
    InputKind,
    RecordKind,
    SchedulerConfig,
    SimResult,
    simulate,
)

C = CommandKind
BASE = SchedulerConfig(max_steps=2, prefetch=0, on_engine_failure="restart", deadlines=NO_DEADLINES)
STEADY = Durations({C.GENERATE: 1.0, C.TRAIN: 0.5, C.START_ENGINE: 2.0, C.LOAD_WEIGHTS: 0.25})
DEATH = Input(InputKind.ENGINE_DIED, engine=0, message="killed")


def run(*faults: Any, config: SchedulerConfig = BASE, **options: Any) -> SimResult:
    return simulate(config, durations=STEADY, faults=FaultPlan(faults, options.pop("heal_at", None)), **options)


def moments(result: SimResult, trigger: str) -> list[float]:
    rows = result.of_kind(RecordKind.TRANSITION)
    return [r.t_ns / 1e9 for r in rows if r.trigger == trigger and r.machine == "engine"]


def test_a_death_costs_a_start_a_load_and_what_was_generated() -> None:
    """Up at 2.25; batch 0 is generated until 3.25; batch 1 is lost at 4.25; a new engine serves version 1 at 6.5."""
    result = run(Fault(C.GENERATE, Effect.DIE, nth=2))
    assert (result.outcome, result.error) == ("completed", None)
    assert result.batches == {"admitted": 3, "trained": 2, "dropped": 0, "failed": 1, "cancelled": 0}
    assert moments(result, "restart") == [4.25]
    assert moments(result, "open") == [2.25, 6.5]
    assert result.wall_s == 8.0, "and batch 2 is trained on at 7.5 to 8.0"


def test_what_hangs_in_an_engine_ends_with_it() -> None:
    hung = (Fault(C.GENERATE, Effect.HANG, nth=3), Happening(16, DEATH))
    result = run(*hung, config=replace(BASE, workers=2, max_staleness=3, max_steps=4))
    assert (result.outcome, len(moments(result, "restart"))) == ("completed", 1)
    assert result.batches["trained"] == 4 and result.batches["failed"] >= 1


def test_a_generation_past_its_deadline_is_taken_for_a_failure_of_the_engine() -> None:
    deadlines = replace(NO_DEADLINES, generate_s=5.0)
    result = run(Fault(C.GENERATE, Effect.HANG, nth=2), config=replace(BASE, deadlines=deadlines))
    assert result.outcome == "completed"
    assert moments(result, "restart") == [3.25 + 5.0]


def test_a_start_that_hangs_is_given_up_at_its_deadline_and_done_again() -> None:
    deadlines = replace(NO_DEADLINES, start_s=4.0)
    faults = (Fault(C.GENERATE, Effect.DIE, nth=2), Fault(C.START_ENGINE, Effect.HANG, nth=2))
    result = run(*faults, config=replace(BASE, deadlines=deadlines))
    assert result.outcome == "completed"
    assert moments(result, "restart") == [4.25, 8.25]


def test_an_engine_that_fails_every_time_fails_the_run() -> None:
    faults = [Fault(C.LOAD_WEIGHTS, Effect.RAISE, nth=nth) for nth in range(2, 9)]
    result = run(*faults, config=replace(BASE, max_steps=5))
    assert result.outcome == "failed"
    assert str(result.error).startswith(
        "engine-0 was restarted 3 times without finishing a generation, then: engine-0: "
    )
    assert len(moments(result, "restart")) == 3
    assert result.steps == 2, "what was generated before is trained on meanwhile"


@pytest.mark.parametrize("mode", ["drain", "inflight"])
@pytest.mark.parametrize("admission", ["paced", "greedy"])
def test_engines_that_die_often_only_slow_the_run_down(mode: str, admission: str) -> None:
    config = replace(
        BASE, admission=admission, sync_mode=mode, workers=3, engines=2, max_staleness=3, max_steps=40, save_interval=5
    )
    deaths = [Happening(20 * i, replace(DEATH, engine=i % 2)) for i in range(1, 12)]
    healthy, result = run(config=config), run(*deaths, config=config)
    assert (result.outcome, result.steps) == ("completed", 40)
    assert result.batches["failed"] >= 5 and result.wall_s > healthy.wall_s
    assert max(result.staleness) <= 3


def test_a_log_with_restarts_verifies_and_is_summarised(tmp_path: Path) -> None:
    config = replace(BASE, workers=2, max_staleness=2, max_steps=6, deadlines=Deadlines())
    result = run(Fault(C.GENERATE, Effect.DIE, nth=3), config=config)
    result.write(tmp_path)
    found = verify(tmp_path)
    assert found.ok
    summary = summarize(tmp_path)
    assert summary.steps == 6
    prediction = whatif(tmp_path, {"max_staleness": [2]}).predictions[0]
    assert prediction.ok and prediction.wall_s is not None and prediction.wall_s < result.wall_s, "without the failure"


def test_the_plan_of_the_search_has_runs_that_must_survive_and_runs_that_must_not() -> None:
    cases = list(restarted((1, 2), range(3)))
    assert {(c.faults, c.stops, c.healed) for c in cases} == {(1, 2, False), (2, 0, True), (1, 0, True), (2, 0, False)}
    assert {c.config.sync_mode for c in cases} == {"drain", "inflight"}
    assert all(c.config.on_engine_failure == "restart" for c in cases)
