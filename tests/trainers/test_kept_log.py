"""A run's log in several files, and compacted at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fsm_trainer import AsyncPolicyTrainer
from fsm_trainer.config import TrainConfig
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.trainers import closing
from fsm_trainer.trainers import trainer as trainer_module
from tests.trainers.helpers import ROWS, run_end, varied_reward

Make = Callable[..., TrainConfig]


def test_a_log_in_several_files_that_is_compacted_at_the_end(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def open_log(path: Path, *, segment_bytes: int, **options: dict[str, str]) -> EventLogWriter:
        limits.append(segment_bytes)
        return EventLogWriter(path, segment_bytes=segment_bytes >> 6, **options)  # so small a run needs small files

    monkeypatch.setattr(trainer_module, "EventLogWriter", open_log)
    for compacts, files in ((False, ["events.arrows", "events-00001.arrows"]), (True, ["events.arrow"])):
        name = str(make_config().output_dir) + str(compacts)
        config = make_config(output_dir=name, log_segment_mb=1, log_compact=compacts)
        result = AsyncPolicyTrainer(config, reward_fn=varied_reward, dataset=ROWS).fit()
        assert result.outcome == "completed"
        left = {path.name for path in result.run.path.glob("events*")}
        assert left == set(files) if compacts else left >= set(files)
        assert run_end(result.run.path).reason == "completed"
        assert f"log {result.run.path / files[0]}" in result.message
        assert read_log(result.run.path).compacted == compacts
    assert limits == [1 << 20, 1 << 20]


def test_a_log_that_cannot_be_compacted_is_kept_as_it_is(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Path) -> None:
        raise ValueError("cannot compact: No space left on device")

    monkeypatch.setattr(closing, "compact", fail)
    result = AsyncPolicyTrainer(make_config(max_steps=1, log_compact=True), reward_fn=varied_reward, dataset=ROWS).fit()
    assert (result.outcome, result.exit_code) == ("completed", 0)
    assert f"log {result.run.path / 'events.arrows'}" in result.message
    assert run_end(result.run.path).reason == "completed"
