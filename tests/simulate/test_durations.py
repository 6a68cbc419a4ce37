"""Durations: as people write them, per-prompt stragglers, and those of a recorded run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from fsm_trainer.analysis.frames import events_frame, intervals
from fsm_trainer.analysis.overlap import measure_sides, training_window
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.simulate.durations import Durations, Lognormal, Pareto, Stragglers, Uniform, parse_amount
from fsm_trainer.simulate.recorded import recorded
from fsm_trainer.simulate.shares import measure_shares
from fsm_trainer.simulate.simulator import simulate
from fsm_trainer.simulate.swarm import draw_case
from fsm_trainer.testing import CommandKind, Effect, Fault, FaultPlan, SchedulerConfig

C = CommandKind


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("1.5", 1.5),
        ("0", 0.0),
        (" 2 ", 2.0),
        ("lognormal:1,0.5", Lognormal(1.0, 0.5)),
        ("pareto:0.5,1.2", Pareto(0.5, 1.2)),
        ("uniform:0,2", Uniform(0.0, 2.0)),
    ],
)
def test_amounts_as_people_write_them(text: str, amount: object) -> None:
    assert parse_amount(text) == amount


@pytest.mark.parametrize(
    "text", ["", "x", "1,2", "-1", "inf", "nan", "gauss:1,2", "pareto:1", "pareto:1,0", "uniform:2,1"]
)
def test_what_is_no_amount_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|give"):
        parse_amount(text)


def test_a_batch_straggles_if_any_of_its_prompts_does() -> None:
    rng = random.Random(0)
    draws = [Stragglers(1.0, share=0.02, factor=8.0, prompts=16).draw(rng) for _ in range(4000)]
    assert set(draws) == {1.0, 8.0}
    # 1 - 0.98 ** 16 = 0.276
    assert draws.count(8.0) / 4000 == pytest.approx(0.276, abs=0.02)


def test_hand_over_takes_its_time_on_either_side() -> None:
    plain = Durations.of(rollout_s=1.0, train_s=0.5)
    handed = replace(plain, before={C.GENERATE: 0.25}, after={C.GENERATE: 0.125})
    config = SchedulerConfig(max_steps=10, max_staleness=0)
    walls = [simulate(config, durations=durations).wall_s for durations in (plain, handed)]
    assert walls == pytest.approx([15.0, 15.0 + 10 * 0.375])


def test_a_recorded_run_is_met_again_moment_for_moment() -> None:
    met = 0
    for seed in range(120):
        case = draw_case(seed)
        result = replace(case, plan=FaultPlan()).run()
        # What was broken off by a deadline has no duration.
        if result.steps == 0 or result.outcome == "failed":
            continue
        known = recorded(result.records)
        again = simulate(case.config, seed=seed + 1, durations=known.durations, batches=case.batches)
        assert again.digest == result.digest, seed
        met += 1
    assert met > 60


def test_batches_without_a_step_are_recorded_too(tmp_path: Path) -> None:
    faults = (Fault(C.REWARD, Effect.DEGENERATE, batch_id=3), Fault(C.TRAIN, Effect.NO_STEP, batch_id=5))
    config = SchedulerConfig(max_steps=10)
    result = simulate(config, faults=faults)
    result.write(tmp_path)
    known = recorded(tmp_path)
    assert set(known.faults) == set(faults)
    assert (known.steps, known.batches) == (10, None)
    assert simulate(config, durations=known.durations, faults=known.faults).digest == result.digest


def test_a_recorded_run_says_how_many_batches_there_were() -> None:
    assert recorded(simulate(SchedulerConfig(), batches=6).records).batches == 6


def test_what_if_another_configuration_had_run() -> None:
    """Two engines instead of one: with all rollouts alike the answer is known."""
    one = simulate(SchedulerConfig(max_steps=40), durations=Durations.of(rollout_s=1.0, train_s=0.25))
    two = SchedulerConfig(max_steps=40, workers=2, engines=2, max_staleness=2)
    predicted = simulate(two, durations=recorded(one.records).durations)
    assert one.wall_s == pytest.approx(40.25)
    assert predicted.wall_s == simulate(two, durations=Durations.of(rollout_s=1.0, train_s=0.25)).wall_s
    assert predicted.wall_s < 22.0


def test_a_log_without_a_rollout_is_refused() -> None:
    with pytest.raises(ValueError, match="no finished rollout"):
        recorded([])


def test_shares_are_those_of_the_analysis(tmp_path: Path) -> None:
    compared = 0
    for seed in range(40):
        result = draw_case(seed).run()
        shares = measure_shares(result.records)
        if shares is None or result.config.deadlines.queue_s or result.outcome != "completed":
            continue
        result.write(tmp_path / str(seed))
        events = events_frame(read_log(tmp_path / str(seed)))
        window = training_window(events)
        assert window is not None
        sides = measure_sides(intervals(events), window)
        assert sides is not None
        assert shares.window_s == pytest.approx((window.end_ns - window.start_ns) / 1e9)
        assert (shares.rollout_idle, shares.trainer_idle) == pytest.approx((sides.rollout_idle, sides.trainer_idle))
        assert sum(shares.trainer_states.values()) == pytest.approx(1.0)
        compared += 1
    assert compared > 10
