"""Engines that load while they generate, in virtual time: pauses, versions, and what a what-if makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Command, CommandKind, Record, RecordKind
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import write_log
from fsm_trainer.simulate.durations import Durations, Lognormal
from fsm_trainer.simulate.inflight import Loads
from fsm_trainer.simulate.recorded import recorded
from fsm_trainer.simulate.settings import Setting
from fsm_trainer.simulate.simulator import NO_DEADLINES, SimResult, simulate
from fsm_trainer.simulate.whatif import whatif

C = CommandKind
STEPS = 60
BASE = SchedulerConfig(max_steps=STEPS, workers=2, max_staleness=2, deadlines=NO_DEADLINES)
UNEVEN = Durations.of(rollout_s=Lognormal(1.0, 0.5), train_s=Lognormal(0.4, 0.3), reward_s=0.1, sync_s=0.125)
S = 1_000_000_000


def run(mode: str, durations: Durations = UNEVEN, config: SchedulerConfig = BASE) -> SimResult:
    return simulate(replace(config, sync_mode=mode), durations=durations, seed=5)


def ends(result: SimResult) -> dict[int, tuple[float, int | None, int | None]]:
    """Batch -> when its generation ended (seconds), versions of its first and last token."""
    rows = [r for r in result.records if r.machine == "batch" and r.trigger == "generated"]
    return {
        r.batch_id: (r.t_ns / S, r.rollout_version_first, r.rollout_version_last)
        for r in rows
        if r.batch_id is not None
    }


def write(folder: Path, result: SimResult, run_config: dict[str, str]) -> Path:
    write_log(folder / LOG_NAME, result.records, log_metadata(result.config, run_config))
    return folder


def load(version: int, op: int) -> Command:
    return Command(op, C.LOAD_WEIGHTS, engine=0, version=version)


def test_generations_stand_still_while_their_engine_loads() -> None:
    """Both workers generate from 0.25 on. Batch 0 is trained on at 1.25 to 1.75; loading version 1 takes 0.25 s."""
    durations = Durations({C.GENERATE: [1.0, 2.0, 4.0, 4.0], C.TRAIN: 0.5, C.LOAD_WEIGHTS: 0.25})
    found = ends(run("inflight", durations, replace(BASE, max_steps=3)))
    assert found[0] == (1.25, 0, 0)
    assert found[1] == (0.25 + 2.0 + 0.25, 0, 1)
    # Begun at 1.25 with version 0; version 1 is loaded at 1.75 to 2.0, and version 2 at 3.0 to 3.25.
    assert found[2] == (1.25 + 4.0 + 0.25 + 0.25, 0, 2)
    drained = ends(run("drain", durations, replace(BASE, max_steps=3)))
    assert drained[1] == (2.25, 0, 0), "nothing is loaded before it has ended"


def test_loads_are_counted_as_far_as_they_overlap() -> None:
    loads = Loads()
    loads.begin(load(1, 10), 100, 50, succeeds=True)
    loads.begin(load(2, 11), 200, 50, succeeds=False)
    loads.begin(load(3, 12), 300, 50, succeeds=True)
    assert [loads.paused_ns(0, *window) for window in ((0, 90), (0, 125), (125, 400), (150, 200), (0, 400))] == [
        *(0, 25, 125, 0, 150)
    ]
    assert loads.paused_ns(1, 0, 400) == 0, "another engine's"
    assert [loads.version_at(0, moment, 0) for moment in (149, 150, 260, 350)] == [0, 1, 1, 3]
    assert loads.version_at(0, 150, 2) == 2
    loads.forget(load(3, 12))
    assert (loads.version_at(0, 400, 0), loads.paused_ns(0, 0, 400)) == (1, 100)


def test_it_pays_where_workers_share_an_engine_and_rollouts_are_slow() -> None:
    """Two workers, rollout 2 s, step 0.5 s: draining makes them wait for each other at each sync."""
    config = SchedulerConfig(max_steps=200, workers=2, max_staleness=2)
    slow = Durations.of(rollout_s=2.0, train_s=0.5)
    drained, flying = (run(mode, slow, config).wall_s for mode in ("drain", "inflight"))
    assert flying == pytest.approx(201.0, abs=1.0), "one batch a second"
    assert flying / drained == pytest.approx(0.75, abs=0.01)
    own = replace(config, engines=2)
    costly = Durations.of(rollout_s=2.0, train_s=0.5, sync_s=0.5)
    assert run("inflight", costly, own).wall_s > 1.1 * run("drain", costly, own).wall_s, "each load holds up what runs"


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize(("before", "after"), [("drain", "inflight"), ("inflight", "drain"), ("inflight", "inflight")])
def test_what_if_predicts_the_other_mode(before: str, after: str, serial: bool, tmp_path: Path) -> None:
    durations = replace(UNEVEN, serial_engines=serial)
    known, truth = run(before, durations), run(after, durations)
    log = write(tmp_path, known, {"rollout_host": "process"} if serial else {})
    found = whatif(log, {"sync_mode": [after]})
    (prediction,) = found.predictions
    assert prediction.setting == Setting.of(truth.config)
    assert found.self_error == pytest.approx(0.0, abs=1e-6)
    assert prediction.wall_s == pytest.approx(truth.wall_s, rel=1e-6)


def test_lockstep_cannot_be_asked_for_it() -> None:
    known = run("drain")
    found = whatif(known.records, {"sync_mode": ["inflight"], "admission": ["lockstep", "paced"]}, config=known.config)
    problems = [p.problem for p in found.predictions]
    assert "lockstep, which fixes the weights" in str(problems[0]) and problems[1] is None


@pytest.mark.parametrize(
    ("run_config", "serial"),
    [({"rollout_host": "process"}, True), ({"rollout_host": "process", "rollout_engine": "vllm"}, False), ({}, False)],
)
def test_vllm_generates_several_batches_at_once(run_config: dict[str, str], serial: bool, tmp_path: Path) -> None:
    log = write(tmp_path, run("inflight"), run_config)
    assert recorded(log).durations.serial_engines is serial


def test_flags_say_the_mode_where_it_is_not_the_usual_one() -> None:
    usual, flying = Setting(), Setting(sync_mode="inflight")
    assert "--async-sync-mode" not in usual.flags()
    assert "--async-sync-mode inflight" in flying.flags()
    assert "--async-sync-mode drain" in usual.flags(flying)


def stamps(records: list[Record]) -> set[int]:
    """Versions that came in while batches were generated."""
    rows = [r for r in records if r.kind is RecordKind.TRANSITION and r.machine == "batch" and r.trigger == "generated"]
    return {(r.rollout_version_last or 0) - (r.rollout_version_first or 0) for r in rows}


def test_long_generations_see_several_versions() -> None:
    config = replace(BASE, workers=3, max_staleness=6)
    durations = Durations({C.GENERATE: [0.5, 0.5, 6.0], C.TRAIN: 0.4, C.LOAD_WEIGHTS: 0.05})
    assert max(stamps(run("inflight", durations, config).records)) >= 3
    assert stamps(run("drain", durations, config).records) == {0}
