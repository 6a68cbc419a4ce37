"""A few of tools/live_runs.py's runs: real threads, engine processes and faults; the tool runs hundreds."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind
from fsm_trainer.engines.fake import Effect, FakeBehaviour, Fault
from tools import live_runs
from tools.live_runs import WORLDS, LiveCase, draw_live_case, live_run

CONFIG = SchedulerConfig(max_steps=12, workers=2, max_staleness=2)


@pytest.mark.parametrize("seed", range(18))
def test_a_live_run_ends_verifies_and_leaves_nothing(seed: int, tmp_path: Path) -> None:
    result = live_run(draw_live_case(seed), tmp_path)
    assert result.problems == (), result
    assert result.outcome in ("completed", "failed", "interrupted")


@pytest.mark.parametrize("world", WORLDS)
def test_without_faults_a_live_run_completes(world: str, tmp_path: Path) -> None:
    case = LiveCase(1, world, CONFIG, FakeBehaviour())
    result = live_run(case, tmp_path)
    assert (result.outcome, result.problems) == ("completed", ())
    assert result.decisions > 100


def test_an_engine_process_that_dies_is_named(tmp_path: Path) -> None:
    die = FakeBehaviour(faults=[Fault(CommandKind.GENERATE, Effect.DIE, nth=1)])
    case = LiveCase(1, "process", CONFIG, die)
    result = live_run(case, tmp_path)
    assert (result.outcome, result.problems) == ("failed", ())
    assert "exited with code 13" in str(result.error)


def test_what_is_left_behind_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_runs, "GONE_S", 0.01)
    threads, children = set(threading.enumerate()), set(psutil.Process().children(recursive=True))
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="leak")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = live_runs._check_gone(threads, children)
        assert found == ["thread leak is left", f"process {child.pid} is left"]
    finally:
        release.set()
        thread.join()
        child.communicate(b"\n")


def test_seeds_reach_every_world_and_fault() -> None:
    cases = [draw_live_case(seed) for seed in range(300)]
    assert {case.world for case in cases} == set(WORLDS)
    met = {(case.world, fault.effect) for case in cases for fault in case.behaviour.faults}
    assert met >= {(world, effect) for world in WORLDS for effect in (Effect.RAISE, Effect.NAN, Effect.WRONG_VERSION)}
    assert met >= {("threads", Effect.HANG), ("process", Effect.HANG), ("process", Effect.DIE)}
    assert any(case.log_fails_at is not None for case in cases)
    assert any(event.message == live_runs.KILL.message for case in cases for event in case.happenings.values())
