"""Advice in words: what bounds a run by its residency, and predictions that hold when the setting is really run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.report.advice import Advice, advise
from fsm_trainer.report.run_data import RunData
from tests.replay.virtual_run import log_of, virtual_run

Times = dict[CommandKind, int]


def advice_on(path: Path, config: SchedulerConfig, durations: Times | None = None, **kwargs: object) -> Advice:
    rows = virtual_run(config, durations, **kwargs)  # type: ignore[arg-type]
    return advise(RunData(read_log(log_of(path, rows, config))))


def wall_ms(config: SchedulerConfig, durations: Times | None = None) -> float:
    rows = virtual_run(config, durations)
    return (rows[-1].t_ns - rows[0].t_ns) / 1e6


@pytest.mark.parametrize(
    ("durations", "bound", "words"),
    [
        ({CommandKind.GENERATE: 200}, "generation", "Generation-bound"),
        ({CommandKind.GENERATE: 20, CommandKind.REWARD: 200}, "reward", "Bound by rewards"),
        ({CommandKind.TRAIN: 300}, "training", "Training-bound"),
        ({CommandKind.EXPORT: 300}, "sync", "Bound by weight syncs"),
    ],
)
def test_what_bounds_it(tmp_path: Path, durations: Times, bound: str, words: str) -> None:
    found = advice_on(tmp_path, SchedulerConfig(max_steps=40), durations)
    assert found.bound == bound
    assert found.sentences[0].startswith(words)


def test_idle_shares_by_hand(tmp_path: Path) -> None:
    """Synchronous, 20 steps: 3453 ms of training time, of it 2157 the trainer and 1353 the worker idle."""
    found = advice_on(tmp_path, SchedulerConfig(max_steps=20, max_staleness=0))
    assert found.sentences[0].startswith("Generation-bound: training idles 62 %, rollout 39 %.")
    assert "The trainer waits 58 % for generation." in found.sentences


def test_a_second_worker_is_predicted_as_it_turns_out(tmp_path: Path) -> None:
    config, durations = SchedulerConfig(max_steps=60), {CommandKind.GENERATE: 200}
    found = advice_on(tmp_path, config, durations)
    (second,) = [s for s in found.suggestions if s.what == "2 rollout workers and 2 rollout engines"]
    real = wall_ms(replace(config, workers=2, engines=2), durations) / wall_ms(config, durations) - 1
    assert real < -0.3
    assert second.wall_change == pytest.approx(real, abs=0.02)
    (sentence,) = [s for s in found.sentences if s.startswith(f"With {second.what}, ")]
    assert f"wall time is predicted to be {-100 * second.wall_change:.0f} % shorter" in sentence
    assert second.flags == "--async-rollout-workers 2, and --rollout-devices with 2 devices"


def test_half_the_time_of_what_bounds_it(tmp_path: Path) -> None:
    config, durations = SchedulerConfig(max_steps=60), {CommandKind.TRAIN: 300}
    found = advice_on(tmp_path, config, durations)
    real = 1 - wall_ms(config, {CommandKind.TRAIN: 150}) / wall_ms(config, durations)
    (sentence,) = [s for s in found.sentences if s.startswith("If the train step took half the time")]
    (percent,) = re.findall(r"predicted to be (\d+) % shorter", sentence)
    assert int(percent) == pytest.approx(100 * real, abs=2)


def test_a_training_bound_run_is_told_that_no_setting_helps(tmp_path: Path) -> None:
    found = advice_on(tmp_path, SchedulerConfig(max_steps=60), {CommandKind.TRAIN: 300})
    assert found.suggestions == ()
    assert any(s.startswith("No setting next to this one") for s in found.sentences)
    assert found.self_error == pytest.approx(0.0, abs=0.01)


def test_of_a_combination_only_what_helps_is_named(tmp_path: Path) -> None:
    """Three workers of 600 ms and a step of 110 that may lead by one: a bound of 3 helps, a fourth worker does not."""
    config = SchedulerConfig(max_steps=60, workers=3, engines=3, max_staleness=1)
    durations = {CommandKind.GENERATE: 100, CommandKind.TRAIN: 110, CommandKind.EXPORT: 1, CommandKind.REWARD: 200}

    def change(**other: int) -> float:
        return wall_ms(replace(config, **other), durations) / wall_ms(config, durations) - 1

    assert change(max_staleness=3) == change(max_staleness=3, workers=4, engines=4) < change(max_staleness=2) < -0.05
    assert abs(change(max_staleness=2, sync_interval=2)) < 0.01
    found = advice_on(tmp_path, config, durations)
    assert [(s.what, s.flags) for s in found.suggestions] == [
        ("a staleness bound of 3", "--async-max-staleness 3"),
        ("a staleness bound of 2", "--async-max-staleness 2"),
    ]
    assert [s.wall_change for s in found.suggestions] == pytest.approx([change(max_staleness=n) for n in (3, 2)])


def test_all_that_a_combination_needs_is_named(tmp_path: Path) -> None:
    """Where a sync takes longer than all else, rarer ones help, but only if the staleness bound allows for them."""
    found = advice_on(tmp_path, SchedulerConfig(max_steps=60), {CommandKind.EXPORT: 300})
    (rarer,) = found.suggestions
    assert rarer.what == "a staleness bound of 2 and a weight sync interval of 2"
    assert rarer.flags == "--async-max-staleness 2 --async-sync-interval-steps 2"


def test_a_synchronous_run_is_told_what_async_would_give(tmp_path: Path) -> None:
    synchronous = SchedulerConfig(max_steps=60, max_staleness=0, queue_size=1)
    found = advice_on(tmp_path, synchronous)
    assert "Nothing overlaps in a synchronous run; full overlap would make a step up to" in found.sentences[0]
    real = wall_ms(SchedulerConfig(max_steps=60)) / wall_ms(synchronous) - 1
    more, plain = found.suggestions
    assert (plain.what, plain.wall_change) == ("the async algorithm", pytest.approx(real, abs=0.02))
    assert more.what == "the async algorithm, 2 rollout workers and 2 rollout engines"
    assert plain.flags.startswith("--algo async-") and more.flags.startswith(plain.flags)


def test_what_was_generated_in_vain(tmp_path: Path) -> None:
    greedy = SchedulerConfig(max_steps=40, workers=3, engines=3, admission="greedy", max_staleness=1)
    found = advice_on(tmp_path / "a", greedy, {CommandKind.GENERATE: 37})
    assert any("dropped as stale; --async-admission paced" in s for s in found.sentences)
    flat = advice_on(tmp_path / "b", SchedulerConfig(max_steps=10), degenerate={1, 2, 3})
    assert any("23 % of the batches had equal rewards" in s for s in flat.sentences)


def test_a_run_that_never_trained(tmp_path: Path) -> None:
    config = SchedulerConfig(max_steps=5)
    found = advise(RunData(read_log(log_of(tmp_path / "a", virtual_run(config)[:3], config))))
    assert found == Advice(None, ("The run never trained, so there is nothing to advise on.",), (), None)
    begun = advise(RunData(read_log(log_of(tmp_path / "b", virtual_run(config)[:40], config))))
    assert begun.suggestions == ()
