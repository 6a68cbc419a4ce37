"""Which trackers a run reports to, and what it tells them of itself."""

from __future__ import annotations

import time
from functools import partial

from fsm_trainer.config import TrainConfig
from fsm_trainer.config.groups import tracker_names
from fsm_trainer.runtime.clock import Clock
from fsm_trainer.tracking.live import LiveTracking
from fsm_trainer.tracking.trackers import TRACKERS, RunInfo
from fsm_trainer.trainers.run_directory import RunDirectory


def live_tracking(config: TrainConfig, run: RunDirectory, clock: Clock) -> LiveTracking:
    """What `--report-to` asks for. TensorBoard and W&B write into the run's folder, trackio into its own place."""
    started_s = time.time() - clock.now_ns() / 1e9
    settings = config.model_dump(mode="json")
    folders = {"tensorboard": run.path / "tensorboard"}
    return LiveTracking(
        {
            name: partial(TRACKERS[name], RunInfo(run.path.name, folders.get(name, run.path), started_s, settings))
            for name in tracker_names(config.report_to)
        }
    )
