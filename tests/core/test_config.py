"""Impossible scheduler configurations name the value and what was expected."""

from __future__ import annotations

from typing import Any

import pytest

from fsm_trainer.core.config import Deadlines, SchedulerConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"admission": "eager"}, "admission is 'eager', expected one of paced, greedy, lockstep"),
        ({"queue_size": 0}, "queue_size is 0, expected at least 1"),
        ({"max_staleness": -1}, "max_staleness is -1, expected at least 0"),
        ({"sync_interval": 0}, "sync_interval is 0, expected at least 1"),
        ({"max_steps": 0}, "max_steps is 0, expected at least 1"),
        ({"engines": 2, "workers": 1}, "use at least 2 workers"),
        ({"admission": "lockstep", "sync_interval": 3, "max_staleness": 1}, "needs max_staleness >= 2, got 1"),
        ({"sync_mode": "lazy"}, "sync_mode is 'lazy', expected one of drain, inflight"),
        ({"sync_mode": "inflight", "admission": "lockstep"}, "lockstep, which fixes the weights"),
        ({"sync_mode": "inflight", "external_rollouts": True}, "external rollouts, whose engines load weights by"),
        ({"on_engine_failure": "retry"}, "on_engine_failure is 'retry', expected one of fail, restart"),
        ({"on_engine_failure": "restart", "admission": "lockstep"}, "lockstep, which cannot lose what an engine"),
        ({"max_engine_restarts": 0}, "max_engine_restarts is 0, expected at least 1"),
        ({"deadlines": Deadlines(train_s=-1)}, "deadlines.train_s is -1, expected at least 0"),
    ],
)
def test_impossible_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="expected|use|needs") as caught:
        SchedulerConfig(**values)
    assert message in str(caught.value)


def test_round_trip() -> None:
    config = SchedulerConfig(admission="greedy", workers=3, max_steps=9, deadlines=Deadlines(queue_s=1))
    assert SchedulerConfig.from_dict(config.to_dict()) == config


def test_a_log_from_before_a_setting_existed_gives_its_default() -> None:
    values = SchedulerConfig(workers=2).to_dict()
    for name in ("sync_mode", "on_engine_failure", "max_engine_restarts"):
        del values[name]
    assert SchedulerConfig.from_dict(values) == SchedulerConfig(workers=2)


def test_wasteful_combinations_warn() -> None:
    assert SchedulerConfig().warnings() == []
    assert "at most 2 batches" in SchedulerConfig(workers=3).warnings()[0]
    hangs = SchedulerConfig(on_engine_failure="restart").warnings()
    assert "restarted after 1800 s, but the run fails once the trainer has waited 300 s" in hangs[0]
    for generate_s, queue_s, warned in ((0, 300, True), (200, 300, False), (300, 300, True), (1800, 0, False)):
        limits = Deadlines(generate_s=generate_s, queue_s=queue_s)
        assert bool(SchedulerConfig(on_engine_failure="restart", deadlines=limits).warnings()) is warned
    assert "published earlier" in SchedulerConfig(sync_interval=3, max_staleness=1).warnings()[0]
