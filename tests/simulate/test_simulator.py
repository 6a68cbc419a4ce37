"""`simulate`: figures known from outside, repeatability, what it refuses, and each kind of fault."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.analysis import load_events, summarize
from fsm_trainer.config import TrainConfig
from fsm_trainer.core.monitor import Monitor
from fsm_trainer.replay.verify import verify
from fsm_trainer.simulate.checked import input_bound
from fsm_trainer.simulate.faults import OTHER_KIND
from fsm_trainer.testing import (
    NO_DEADLINES,
    CommandKind,
    Deadlines,
    Delivery,
    Disturbance,
    Durations,
    Effect,
    Fault,
    FaultPlan,
    Happening,
    Input,
    InputKind,
    LogFault,
    Lognormal,
    RecordKind,
    SchedulerConfig,
    SimResult,
    SimulationError,
    simulate,
)

C, K, R = CommandKind, InputKind, RecordKind
STOP = Input(K.STOP, reason="user")
TIGHT = Deadlines(*[20.0] * 7, queue_s=40.0, shutdown_s=5.0, interrupt_s=1.0)
CONFIG = SchedulerConfig(max_steps=8, workers=2, engines=2, max_staleness=2, save_interval=3, deadlines=TIGHT)
CALM = replace(CONFIG, deadlines=NO_DEADLINES)
STEADY = Durations.of(rollout_s=1.0, train_s=0.5, reward_s=0.1, sync_s=0.1)


def run(*faults: Any, config: SchedulerConfig = CONFIG, heal_at: int | None = None, **options: Any) -> SimResult:
    return simulate(config, durations=STEADY, faults=FaultPlan(faults, heal_at), **options)


@pytest.mark.parametrize(
    ("admission", "workers", "wall_s", "dropped"),
    # Figures of a simulation made before this code existed: 200 steps, rollout 1.0, train 0.5, staleness 2, two workers
    # with engines of their own.
    [("paced", 2, 103.5, 0), ("greedy", 2, 136.6, 66)],
)
def test_the_figures_of_the_design(admission: str, workers: int, wall_s: float, dropped: int) -> None:
    config = SchedulerConfig(admission=admission, max_steps=200, workers=workers, engines=2, max_staleness=2)
    result = simulate(config, durations=Durations.of(rollout_s=1.0, train_s=0.5))
    assert result.wall_s == pytest.approx(wall_s, rel=0.05)
    assert result.batches["dropped"] == pytest.approx(dropped, abs=15)
    assert result.steps == 200


def test_a_result_tells_what_its_records_say(tmp_path: Path) -> None:
    result = simulate(SchedulerConfig(max_steps=20), durations=STEADY)
    assert (result.outcome, result.error, result.steps) == ("completed", None, 20)
    assert result.batches == {"admitted": 20, "trained": 20, "dropped": 0, "failed": 0, "cancelled": 0}
    assert sum(result.staleness.values()) == 20
    assert result.drops == {}
    assert result.write(tmp_path).exists()
    assert verify(tmp_path).ok
    summary = summarize(tmp_path)
    assert summary.steps == 20
    assert summary.wall_ns == round(result.wall_s * 1e9)
    events = result.events()
    assert events.equals(load_events(tmp_path))
    assert list(events["seq"]) == list(range(len(result.records)))


def test_the_same_arguments_give_the_same_digest_and_another_seed_another() -> None:
    durations = Durations.of(rollout_s=Lognormal(1.0, 0.5))
    first, again, other = (simulate(CONFIG, seed=seed, durations=durations).digest for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_train_configuration_will_do() -> None:
    config = TrainConfig(algo="async-grpo", max_steps=3, async_max_staleness=0)
    assert simulate(config, durations=STEADY).config == config.to_scheduler_config()


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("admission", ["paced", "greedy"])
def test_any_pair_of_interval_and_staleness_ends(admission: str, staleness: int, interval: int) -> None:
    config = replace(CALM, admission=admission, max_staleness=staleness, sync_interval=interval)
    assert run(config=config).steps == 8


@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
def test_inputs_per_step_do_not_grow_with_the_data(admission: str) -> None:
    config = replace(CALM, admission=admission, save_interval=0)
    inputs = {steps: run(config=replace(config, max_steps=steps)).inputs for steps in (50, 100, 200)}
    assert (inputs[200] - inputs[100]) / 100 == pytest.approx((inputs[100] - inputs[50]) / 50, rel=0.05)
    for steps, count in inputs.items():
        bound = input_bound(replace(config, max_steps=steps), batches=None, unusable=0, extra=0)
        assert bound is not None
        assert count <= bound


def trained(result: SimResult) -> list[tuple[int | None, int | None]]:
    """(batch, policy version) of each optimiser step, in order."""
    rows = [r for r in result.of_kind(R.TRANSITION) if r.machine == "batch" and r.trigger == "train"]
    return [(r.batch_id, r.rollout_version_first) for r in rows]


def commands(result: SimResult) -> list[tuple[str | None, int | None, int | None]]:
    """What was done to which batch or version, in order, but for loading prompts ahead."""
    rows = [r for r in result.of_kind(R.COMMAND) if r.trigger not in (C.LOAD_PROMPTS.value, C.START_ENGINE.value)]
    return [(r.trigger, r.batch_id, r.train_version) for r in rows]


@pytest.mark.parametrize(("staleness", "interval"), [(0, 1), (1, 1), (1, 2), (3, 2), (3, 4)])
def test_lockstep_trains_the_same_pairs_whatever_the_order_of_completions(staleness: int, interval: int) -> None:
    wild = Durations.of(
        rollout_s=Lognormal(1.0, 1.5),
        train_s=Lognormal(0.5, 1.0),
        reward_s=Lognormal(0.2, 1.0),
        sync_s=Lognormal(0.2, 1.0),
    )
    found = set()
    for workers, engines in ((1, 1), (2, 1), (2, 2), (4, 3)):
        config = SchedulerConfig("lockstep", workers, engines, 2, 1, staleness, interval, 12, deadlines=NO_DEADLINES)
        found |= {tuple(trained(simulate(config, seed=seed, durations=wild))) for seed in range(8)}
    assert len(found) == 1
    assert [batch for batch, _ in found.pop()] == list(range(12))


@pytest.mark.parametrize("admission", ["paced", "lockstep"])
@pytest.mark.parametrize("workers", [1, 3])
def test_without_staleness_the_operations_are_the_synchronous_ones(admission: str, workers: int) -> None:
    config = SchedulerConfig(admission=admission, workers=workers, max_staleness=0, max_steps=10)
    synchronous = TrainConfig(algo="grpo", max_steps=10, save_interval=0).to_scheduler_config()
    durations = Durations.of(rollout_s=Lognormal(1.0, 1.0))
    expected = commands(simulate(synchronous, durations=durations))
    for seed in range(5):
        assert commands(simulate(config, seed=seed, durations=durations)) == expected
    assert [kind for kind, _, _ in expected][3:8] == ["generate", "reward", "train", "export", "load_weights"]


FATAL: list[tuple[Any, str]] = [
    *[(Fault(kind, Effect.RAISE, nth=1), f"{kind.value}") for kind in (C.START_TRAINER, C.START_ENGINE)],
    *[(Fault(kind, Effect.RAISE, nth=2), f"{kind.value}") for kind in (C.LOAD_PROMPTS, C.GENERATE, C.REWARD, C.TRAIN)],
    (Fault(C.EXPORT, Effect.RAISE, nth=2), "trainer: export failed"),
    (Fault(C.LOAD_WEIGHTS, Effect.RAISE, nth=4), "load_weights failed"),
    (Fault(C.SAVE, Effect.RAISE, nth=1), "trainer: save failed"),
    (Fault(C.REWARD, Effect.HANG, nth=3), "took longer than 20 s"),
    (Fault(C.LOAD_WEIGHTS, Effect.HANG, nth=1), "took longer than 20 s"),
    (Fault(C.GENERATE, Effect.DIE, nth=3), "died in state"),
    (Fault(C.LOAD_WEIGHTS, Effect.DIE, nth=3), "died in state loading"),
    (Happening(30, Input(K.ENGINE_DIED, engine=1, message="killed")), "engine-1 died"),
    (Fault(C.GENERATE, Effect.WRONG_VERSION, nth=3), "reports rollout versions"),
    (Fault(C.LOAD_WEIGHTS, Effect.WRONG_VERSION, nth=3), "after loading version"),
    (Fault(C.TRAIN, Effect.WRONG_VERSION, nth=3), "optimiser steps after batch"),
    (Fault(C.TRAIN, Effect.NAN, nth=3), "FloatingPointError"),
    (Disturbance(C.TRAIN, Delivery.LATE, 3, delay_s=25.0), "took longer than 20 s"),
    (LogFault(100), "the event log cannot be written"),
]


@pytest.mark.parametrize(("fault", "message"), FATAL, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
def test_a_fatal_fault_ends_the_run_and_is_named(admission: str, fault: Any, message: str) -> None:
    result = run(fault, config=replace(CONFIG, admission=admission))
    assert result.outcome == "failed"
    assert message in str(result.error)


def test_a_wait_at_the_train_queue_past_its_limit_fails_the_run_and_is_named() -> None:
    late = Disturbance(C.TRAIN, Delivery.LATE, 3, delay_s=17.0)
    result = run(late, config=replace(CONFIG, queue_size=1, deadlines=replace(TIGHT, queue_s=15.0), max_staleness=4))
    assert result.outcome == "failed"
    assert "waited 15.0 s in state queued" in str(result.error)


HARMLESS: list[Any] = [
    *[Disturbance(kind, delivery, 2, 3.0) for kind in (C.GENERATE, C.TRAIN, C.LOAD_WEIGHTS) for delivery in Delivery],
    *[Fault(kind, Effect.HANG, nth=2) for kind in (C.GENERATE, C.REWARD, C.TRAIN, C.EXPORT, C.LOAD_WEIGHTS)],
    Fault(C.TRAIN, Effect.NO_STEP, nth=3),
    Fault(C.REWARD, Effect.DEGENERATE, nth=3),
    Happening(20, Input(K.GENERATED, op=10**9)),
    *[Happening(at, Input(K.SAVED, op=OTHER_KIND)) for at in (5, 20, 30)],
]


@pytest.mark.parametrize("fault", HARMLESS, ids=str)
@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
def test_a_run_that_heals_takes_all_its_steps(admission: str, fault: Any) -> None:
    result = run(fault, config=replace(CALM, admission=admission), heal_at=60)
    assert (result.outcome, result.steps) == ("completed", 8)


@pytest.mark.parametrize("at", range(1, 60, 3))
@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
def test_a_stop_and_a_second_stop_may_come_at_any_moment(admission: str, at: int) -> None:
    config = replace(CALM, admission=admission)
    for stops in ([at], [at, at], [at, at + 4], [at, at + 1, at + 2]):
        result = run(*(Happening(moment, STOP) for moment in stops), config=config)
        assert result.outcome in ("interrupted", "completed")


def test_a_source_that_ends_early_completes_the_run() -> None:
    result = run(batches=3, config=CALM)
    assert (result.outcome, result.steps) == ("completed", 3)


def test_a_completion_of_nothing_in_flight_is_recorded_and_ignored() -> None:
    twice = Disturbance(C.REWARD, Delivery.TWICE, 2)
    result = run(twice, Happening(20, Input(K.TRAINED, op=10**9)), Happening(25, Input(K.SAVED, op=OTHER_KIND)))
    reasons = sorted(str(record.reason).split(" of ")[0] for record in result.of_kind(R.IGNORED))
    assert reasons == ["not a completion", "unknown", "unknown"]


def test_what_hangs_for_ever_without_a_deadline_is_an_error() -> None:
    with pytest.raises(SimulationError, match="Starved: nothing is in flight") as caught:
        run(Fault(C.TRAIN, Effect.HANG, nth=2), config=CALM)
    assert caught.value.last_records[-1].kind in (R.WAIT, R.COMMAND, R.TRANSITION)
    assert caught.value.rule.startswith("Starved")


def test_no_end_of_inputs_is_an_error() -> None:
    with pytest.raises(SimulationError, match="no end of the run after 30 inputs"):
        run(max_inputs=30)


def test_a_broken_invariant_is_an_error_with_the_last_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def complain(self: Monitor, record: Any) -> None:
        assert record.seq < 50, "far enough"

    monkeypatch.setattr(Monitor, "see", complain)
    with pytest.raises(SimulationError, match="AssertionError: far enough") as caught:
        run()
    assert 50 in [record.seq for record in caught.value.last_records]
    monkeypatch.undo()


def test_checks_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Monitor, "see", lambda self, record: pytest.fail("it is watched"))
    assert run(check=False).steps == 8
    monkeypatch.undo()
