"""What-if against simulated truth: the answer is known by simulating the other setting with the same durations."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Command, CommandKind, Record, RecordKind
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import write_log
from fsm_trainer.simulate.durations import Durations, Lognormal
from fsm_trainer.simulate.measured import Measured, Thinned, spread
from fsm_trainer.simulate.recorded import SCORING, recorded
from fsm_trainer.simulate.settings import Setting, grid
from fsm_trainer.simulate.shares import measure_shares
from fsm_trainer.simulate.simulator import NO_DEADLINES, SimResult, simulate
from fsm_trainer.simulate.whatif import KNOWN_ERROR, Prediction, Scales, WhatIf, whatif, within
from fsm_trainer.testing import Effect, Fault

C = CommandKind
STEPS = 60
BASE = SchedulerConfig(max_steps=STEPS, deadlines=NO_DEADLINES)
UNEVEN = Durations.of(
    rollout_s=Lognormal(1.0, 0.5), train_s=Lognormal(0.6, 0.3), reward_s=Lognormal(0.1, 0.2), sync_s=0.05
)
UNEVEN = replace(UNEVEN, operations={**UNEVEN.operations, C.EXPORT: 0.03, C.SAVE: 0.4})
HANDED = replace(UNEVEN, before={C.GENERATE: 0.01, C.TRAIN: 0.02}, after={C.GENERATE: 0.03, C.TRAIN: 0.005})


def run(setting: Setting, durations: Durations = HANDED) -> SimResult:
    return simulate(setting.config(BASE), durations=durations, seed=5)


def only(found: WhatIf) -> Prediction:
    (prediction,) = found.predictions
    return prediction


@pytest.mark.parametrize("admission", ["paced", "greedy", "lockstep"])
@pytest.mark.parametrize(
    "other",
    [
        {"max_staleness": 0, "queue_size": 1},
        {"max_staleness": 2},
        {"max_staleness": 4, "workers": 2},
        {"max_staleness": 3, "workers": 3, "sync_interval": 2, "queue_size": 1},
    ],
)
def test_another_setting_comes_out_as_it_would_have_been(admission: str, other: dict[str, int]) -> None:
    before = run(Setting())
    after = Setting(admission=admission, **other)
    truth = run(after)
    axes = {"admission": [admission], **{name: [value] for name, value in other.items()}}
    found = only(whatif(before.records, axes, config=before.config))
    assert found.setting == after
    # Batches and versions that the recorded run never had take what the nearest took; greedy has many of them.
    assert found.wall_s == pytest.approx(truth.wall_s, rel=0.03 if admission == "greedy" else 1e-9)
    if admission != "greedy":
        assert truth.shares is not None
        assert (found.trainer_idle, found.rollout_idle) == (truth.shares.trainer_idle, truth.shares.rollout_idle)
        mean = sum(value * count for value, count in truth.staleness.items()) / STEPS
        assert (found.staleness_mean, found.staleness_max) == (mean, max(truth.staleness))


def test_the_recorded_setting_comes_out_as_it_was() -> None:
    for setting in (Setting(), Setting(max_staleness=3, workers=3, engines=2), Setting("greedy", max_staleness=2)):
        before = run(setting)
        found = whatif(before.records, config=before.config)
        assert found.self_error == 0.0
        assert found.actual_s == pytest.approx(before.wall_s)
        assert found.recorded == setting
        assert only(found) == found.self_check


def test_a_scale_is_a_simulation_with_scaled_durations() -> None:
    before = run(Setting(), UNEVEN)
    quicker = replace(
        UNEVEN, operations={**UNEVEN.operations, C.GENERATE: Lognormal(0.5, 0.5), C.REWARD: Lognormal(0.3, 0.2)}
    )
    found = only(whatif(before.records, config=before.config, scales=Scales(rollout=0.5, reward=3.0)))
    assert found.wall_s == pytest.approx(run(Setting(), quicker).wall_s)


def test_scales_of_plain_numbers_by_hand() -> None:
    """One thing after the other: (1 + 0.25 + 0.5) s a step, and a load of 0.125 s before each."""
    plain = Durations.of(rollout_s=1.0, reward_s=0.25, train_s=0.5, sync_s=0.125)
    durations = replace(plain, operations={**plain.operations, C.EXPORT: 0.0625, C.SAVE: 5.0})
    before = run(Setting(max_staleness=0), durations)
    assert before.wall_s == pytest.approx(STEPS * (1.875 + 0.0625) + 5.0)
    scales = Scales(rollout=0.5, reward=2.0, train=4.0, sync=0.0)
    found = only(whatif(before.records, config=before.config, scales=scales))
    assert found.wall_s == pytest.approx(STEPS * (0.5 + 0.5 + 2.0) + 5.0)
    assert found.step_s == pytest.approx(3.0)


def test_a_synchronous_run_is_asked_what_async_would_give() -> None:
    synchronous = SchedulerConfig(queue_size=1, max_staleness=0, max_steps=STEPS, deadlines=NO_DEADLINES)
    durations = Durations.of(rollout_s=1.0, train_s=1.0)
    before = simulate(synchronous, durations=durations)
    found = whatif(before.records, {"admission": ["paced"]}, config=synchronous)
    assert found.actual_s == pytest.approx(2.0 * STEPS)
    assert only(found).setting == Setting()  # fsm-train's defaults
    assert only(found).wall_s == pytest.approx(STEPS + 1.0)
    back = run(Setting(), durations)
    assert only(whatif(back.records, {"max_staleness": [0]}, config=BASE)).wall_s == pytest.approx(2.0 * STEPS)


def test_workers_who_share_an_engine_that_is_serial_wait_for_each_other() -> None:
    for serial, wall_s in ((False, STEPS / 2 + 0.1), (True, STEPS + 0.1)):
        durations = replace(Durations.of(rollout_s=1.0, train_s=0.1), serial_engines=serial)
        truth = run(Setting(max_staleness=4, workers=2), durations)
        assert truth.wall_s == pytest.approx(wall_s, abs=0.2)
        again = simulate(truth.config, durations=recorded(truth.records).durations)
        assert again.digest == truth.digest


def test_a_call_that_waits_for_its_engine_has_not_begun(tmp_path: Path) -> None:
    """A host takes the second worker's call while the first one's is running: its log shows it as started."""
    truth = run(Setting(max_staleness=4, workers=2), replace(HANDED, serial_engines=True))
    posted = [r._replace(started_ns=r.posted_ns) if r.trigger == "generated" else r for r in truth.records]
    write_log(tmp_path / LOG_NAME, posted, log_metadata(truth.config, {"rollout_host": "process"}))
    known, whole = recorded(tmp_path), recorded(truth.records)
    assert known.durations.serial_engines
    generate, alone = known.durations.operations[C.GENERATE], run(Setting(max_staleness=0)).records
    took = {r.batch_id: r for r in alone if r.trigger == "generate"}
    assert isinstance(generate, Measured) and len(took) == STEPS
    for command in took.values():
        (end,) = [r for r in alone if r.cause_seq == command.seq and r.trigger == "generated"]
        assert end.finished_ns is not None and end.started_ns is not None and command.batch_id is not None
        # What it waited is not in it, but the hand-over to the thread is, where it no longer shows.
        extra = generate.at(command.batch_id, 0) - (end.finished_ns - end.started_ns) / 1e9
        assert 0.0 <= extra < 0.0101
    assert simulate(truth.config, durations=known.durations).wall_s == pytest.approx(truth.wall_s)
    assert whole.steps == known.steps == STEPS


def test_what_cannot_run_is_said_and_not_fatal() -> None:
    before = run(Setting())
    axes = {"admission": ["lockstep"], "engines": [1, 2], "sync_interval": [1, 3]}
    found = whatif(before.records, axes, config=before.config).predictions
    assert [(p.setting.engines, p.setting.sync_interval, p.ok) for p in found][:2] == [(1, 1, True), (1, 3, False)]
    assert [p.ok for p in found] == [True, False, False, False]
    assert "needs max_staleness >= 2" in str(found[1].problem)
    assert "2 rollout engines but 1 rollout workers" in str(found[2].problem)
    raising = replace(BASE, drop_stale=False)
    failing = only(whatif(before.records, {"admission": ["greedy"], "workers": [3]}, config=raising))
    assert not failing.ok and "it would fail" in str(failing.problem)


def test_batches_that_gave_no_step_give_none_again() -> None:
    faults = [Fault(C.REWARD, Effect.DEGENERATE, batch_id=n) for n in (3, 4, 20)]
    before = simulate(BASE, durations=HANDED, faults=faults)
    other = Setting(max_staleness=3, workers=2)
    truth = simulate(other.config(BASE), durations=HANDED, faults=faults)
    found = only(whatif(before.records, {"max_staleness": [3], "workers": [2]}, config=BASE))
    assert found.wall_s == pytest.approx(truth.wall_s)


def test_of_a_run_that_was_broken_off_times_are_to_the_last_step() -> None:
    whole = run(Setting())
    torn = whole.records[: len(whole.records) * 2 // 3]
    found = whatif(torn, config=BASE)
    assert not found.completed
    last = [r for r in torn if r.kind.value == "version" and r.trigger == "step"][-1]
    assert (found.steps, found.actual_s) == (last.train_version, pytest.approx(last.t_ns / 1e9))
    assert found.self_error == pytest.approx(0.0, abs=1e-9)
    # The shares too, though more than these steps are simulated.
    shares = measure_shares(torn[: torn.index(last) + 1])
    assert shares is not None
    assert found.self_check.trainer_idle == pytest.approx(shares.trainer_idle, abs=1e-9)
    assert found.self_check.rollout_idle == pytest.approx(shares.rollout_idle, abs=1e-9)


def test_the_error_that_is_told_is_no_less_than_the_measured_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "what-if.md").read_text(encoding="utf-8")
    (worst,) = re.findall(r"Median error [\d.]+%, worst ([\d.]+)%", text)
    assert float(worst) <= 100 * KNOWN_ERROR
    assert [within(error) for error in (0.0, -0.0009, 0.0123, -0.04)] == [
        "within 0.1 %",
        "within 0.1 %",
        "+1.2 % off",
        "-4.0 % off",
    ]


def test_a_run_that_failed_is_asked_for_the_steps_it_took() -> None:
    """Greedy with two workers and nothing dropped fails at the first stale batch."""
    config = replace(Setting("greedy", workers=2).config(BASE), drop_stale=False)
    before = simulate(config, durations=HANDED, seed=5, check=False)
    assert (before.outcome, before.steps) == ("failed", 2)
    found = whatif(before.records, {"admission": ["paced", "greedy"]}, config=config)
    assert (found.steps, found.completed, found.self_error) == (2, False, pytest.approx(0.0, abs=1e-9))
    assert [p.ok for p in found.predictions] == [True, True]
    with pytest.raises(ValueError, match="cannot be predicted: even with its own setting, it would fail"):
        whatif(before.records, config=replace(config, max_staleness=0, workers=3))


def test_the_error_that_is_stated_is_that_of_the_self_check() -> None:
    """Told a wrong configuration, the self-check is off by what that makes: 2 s a step for 1 s."""
    durations = Durations.of(rollout_s=1.0, train_s=1.0)
    before = run(Setting(max_staleness=0), durations)
    found = whatif(before.records, config=BASE)
    assert found.actual_s == pytest.approx(120.0)
    assert found.self_error == pytest.approx(61.0 / 120.0 - 1.0)


def test_a_long_run_is_simulated_in_part() -> None:
    config = replace(BASE, max_steps=600)
    longer = [0.5 + n / 500 for n in range(700)]
    growing = replace(HANDED, operations={**HANDED.operations, C.GENERATE: longer, C.SAVE: 50.0})
    before = simulate(config, durations=growing, check=False)
    truth = simulate(replace(config, max_staleness=3, workers=2), durations=growing, check=False)
    found = whatif(before.records, {"max_staleness": [3], "workers": [2]}, config=config, most_steps=150)
    assert (found.steps, found.simulated_steps) == (600, 150)
    assert abs(found.self_error) < 0.02
    assert only(found).wall_s == pytest.approx(truth.wall_s, rel=0.02)


def test_a_resumed_run_is_asked_as_one_that_begins_at_nothing() -> None:
    config = replace(BASE, max_steps=STEPS + 7, first_version=7, first_batch=9)
    before = simulate(config, durations=HANDED, seed=5)
    # The same durations, each batch and version by its place in this run.
    known = recorded(before.records)
    found = whatif(before.records, {"max_staleness": [1, 3]}, config=config)
    assert (found.steps, found.self_error) == (STEPS, pytest.approx(0.0, abs=1e-9))
    wider = simulate(replace(config, max_staleness=3), durations=known.durations)
    assert found.predictions[1].wall_s == pytest.approx(wider.wall_s)


def test_a_reward_beside_a_train_step_holds_it_up() -> None:
    """By hand: generation 1 s, reward 0.5 s of which 80 % keep a processor busy, train 2 s, one batch ahead.

    Beside a train step lie a whole generation and reward: it takes 2 + 0.8 * 0.5 = 2.4 s. The first batch is generated
    and scored alone.
    """
    held = replace(Durations.of(rollout_s=1.0, reward_s=0.5, train_s=2.0), held_up=0.8)
    result = run(Setting(), held)
    assert result.wall_s == pytest.approx(1.5 + (STEPS - 1) * 2.4 + 2.0)
    assert run(Setting(max_staleness=0), held).wall_s == pytest.approx(STEPS * 3.5)


def test_a_reward_that_begins_in_the_midst_of_a_step_holds_up_its_rest() -> None:
    """By hand: two batches are scored from 1 to 4 s; the first is trained on from 4 to 6, beside nothing.

    At 6 s the second step begins, and the generation of the third batch, whose reward begins at 7: the step has then
    1 s to go, at half speed, and ends at 9.
    """
    held = replace(Durations.of(rollout_s=1.0, reward_s=3.0, train_s=2.0), held_up=0.5)
    result = run(Setting(workers=2), held)
    trained = [r for r in result.records if r.trigger == "trained" and r.kind is RecordKind.INPUT]
    assert [r.finished_ns for r in trained[:2]] == [6 * 10**9, 9 * 10**9]


def test_what_held_up_a_recorded_step_is_taken_off_and_put_on_again(tmp_path: Path) -> None:
    held = replace(HANDED, held_up=0.7)
    before = run(Setting(), held)
    path = write_with_scoring(before, tmp_path, share=0.7)
    known = recorded(path)
    alone = [
        r for r in run(Setting(max_staleness=0), held).records if r.kind.value == "input" and r.trigger == "trained"
    ]
    durations = known.durations.operations[C.TRAIN]
    assert isinstance(durations, Measured)
    for batch in (0, 5, 40):
        assert durations.at(batch, None) == pytest.approx((alone[batch].finished_ns - alone[batch].started_ns) / 1e9)
    found = whatif(path, {"max_staleness": [0, 1, 3]})
    assert found.self_error == pytest.approx(0.0, abs=1e-6)
    for prediction in found.predictions:
        assert prediction.wall_s == pytest.approx(run(prediction.setting, held).wall_s, rel=1e-6)


def write_with_scoring(result: SimResult, folder: Path, *, share: float) -> Path:
    """The log of a run on the CPU whose rewards kept a processor busy for that share of their time."""
    issued = {r.seq: r for r in result.records if r.kind is RecordKind.COMMAND}
    rows = list(result.records[:-1])
    for r in result.records:
        if r.kind is RecordKind.INPUT and r.trigger == "rewarded":
            assert r.cause_seq is not None and r.finished_ns is not None and r.started_ns is not None
            spent = share * (r.finished_ns - r.started_ns) / 1e9
            batch = issued[r.cause_seq].batch_id
            rows.append(Record(len(rows), r.t_ns, RecordKind.METRIC, batch_id=batch, reason=SCORING, value=spent))
    rows.append(result.records[-1]._replace(seq=len(rows)))
    metadata = log_metadata(result.config, {"train_devices": "cpu", "rollout_host": "inline"})
    write_log(folder / LOG_NAME, rows, metadata)
    return folder


def test_the_best_is_the_quickest_within_the_limit_and_the_least_stale_of_equals() -> None:
    rows = [
        Prediction(Setting(max_staleness=0), wall_s=20.0, staleness_mean=0.0, drops=0),
        Prediction(Setting(max_staleness=1), wall_s=12.0, staleness_mean=1.0, drops=0),
        Prediction(Setting(max_staleness=4), wall_s=10.05, staleness_mean=2.0, drops=0),
        Prediction(Setting(max_staleness=4, workers=2), wall_s=10.0, staleness_mean=3.0, drops=0),
        Prediction(Setting(max_staleness=9), problem="it cannot"),
    ]
    check = Prediction(Setting(), wall_s=12.0)
    found = WhatIf(Setting(), 10, 10, True, 12.0, check, tuple(rows))
    assert found.best() == rows[2]
    assert found.best(1) == rows[1]
    assert found.best(0) == rows[0]
    assert replace(found, predictions=(rows[4],)).best() is None


def test_what_was_not_measured_takes_what_the_nearest_took() -> None:
    measured = Measured({(2, 0): 2.0, (2, 1): 2.5, (4, 1): 4.0, (10, 0): 10.0})

    def of(batch: int, engine: int = 0) -> float:
        return measured(Command(0, C.GENERATE, engine=engine, batch_id=batch))

    assert [of(2), of(2, 1), of(2, 7), of(4)] == [2.0, 2.5, 2.0, 4.0]
    assert [of(0), of(3), of(6), of(8)] == [2.0, 2.0, 4.0, 10.0]
    # Past the end, backwards: 12 is as far beyond 10 as 8 is before it.
    assert [of(11), of(12), of(14), of(18), of(20)] == [10.0, 10.0, 4.0, 2.0, 4.0]


def test_a_thinned_recording_keeps_its_first_and_last() -> None:
    assert spread(5, 9) == (0, 1, 2, 3, 4)
    picks = spread(1000, 60)
    assert len(picks) == 60 and picks[-1] == 999
    # The first ten, then ten stretches of five.
    assert picks[:22] == (*range(15), *range(119, 124), 229, 230)
    measured = Measured({(n, None): float(n) for n in range(1000)})
    thinned = Thinned(measured, picks)
    assert [thinned(Command(0, C.TRAIN, batch_id=n)) for n in (0, 15, 59, 60, 119, 120)] == [0, 119, 999, 999, 0, 0]


def test_a_grid_has_every_combination_once() -> None:
    found = grid(Setting(queue_size=3), {"workers": [1, 2, 1], "max_staleness": [0, 4]})
    # In the order of a setting's parts, the last one turning quickest.
    assert [(s.max_staleness, s.workers, s.queue_size) for s in found] == [(0, 1, 3), (0, 2, 3), (4, 1, 3), (4, 2, 3)]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"colour": [1]}, "'colour' is no part of a setting"),
        ({"admission": ["eager"]}, "--async-admission is 'eager', expected one of paced, greedy, lockstep"),
        ({"workers": [0]}, "--async-rollout-workers is 0, expected a whole number from 1 to 1000"),
        ({"queue_size": ["2"]}, "--async-queue-size is '2'"),
    ],
)
def test_what_no_setting_has_is_refused(axes: dict[str, list[int | str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid(Setting(), axes)


def test_a_run_to_learn_nothing_from_is_refused() -> None:
    before = run(Setting())
    first_step = next(n for n, r in enumerate(before.records) if r.trigger == "step")
    with pytest.raises(ValueError, match="the log holds no optimiser step to learn from"):
        whatif(before.records[:first_step], config=BASE)
    with pytest.raises(ValueError, match="give its config as well"):
        whatif(before.records)
    with pytest.raises(ValueError, match="batches came from outside"):
        whatif(before.records, config=replace(BASE, external_rollouts=True))
