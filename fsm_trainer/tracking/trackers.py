"""TensorBoard, Weights & Biases and trackio behind one small interface. Each is an extra, imported when it is used.

Nothing here knows where the points come from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fsm_trainer.core.config import SECOND_NS
from fsm_trainer.tracking.points import Point

PROJECT = "fsm_trainer"
"""The project that W&B and trackio list the run under; W&B's own WANDB_PROJECT goes before it."""


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told of the run itself."""

    name: str
    folder: Path
    """Where its files go."""
    started_s: float
    """The moment 0 of the run's clock, in seconds since 1970."""
    config: Mapping[str, Any] = field(default_factory=dict)
    offline: bool = False
    """Write files only, unless the environment says otherwise: a finished run is being exported."""


class Tracker(Protocol):
    """Takes the points of one run, in order, on the thread that made it. Raises what its library raises."""

    def log(self, point: Point) -> None:
        """Keep the values of a step."""

    def close(self) -> None:
        """Bring everything to where it belongs."""


class TensorBoardTracker:
    """An event file with a scalar for each value. TensorBoard keeps float32."""

    def __init__(self, info: RunInfo) -> None:
        """Open a new event file in the folder."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._started_s = info.started_s
        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(info.folder), flush_secs=10)

    def log(self, point: Point) -> None:
        """One event with all values."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        wall_time = self._started_s + point.t_ns / SECOND_NS
        self._writer.add_event(self._event(wall_time=wall_time, step=point.step, summary=self._summary(value=values)))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases, by its own environment variables (WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY)."""

    def __init__(self, info: RunInfo) -> None:
        """Begin the run; without network when it is offline."""
        import wandb

        info.folder.mkdir(parents=True, exist_ok=True)
        # The library would turn to the terminal for a key, or wait there for an answer.
        # And where its own log file finds a full disk, Python would show a traceback for each line of it.
        logging.raiseExceptions = False
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=info.name,
            dir=str(info.folder),
            config=dict(info.config),
            mode="offline" if info.offline and "WANDB_MODE" not in os.environ else None,
            settings=settings,
        )

    def log(self, point: Point) -> None:
        """One row of the run's history."""
        self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        """Wait until all is written, or sent."""
        self._run.finish()


class TrackioTracker:
    """A run of trackio, in its database: TRACKIO_DIR, or else the folder, for an export; or trackio's own place."""

    def __init__(self, info: RunInfo) -> None:
        """Begin the run."""
        if info.offline:
            info.folder.mkdir(parents=True, exist_ok=True)
            os.environ.setdefault("TRACKIO_DIR", str(info.folder))
        with contextlib.redirect_stdout(sys.stderr):
            import trackio

            self._library = trackio
            self._run = trackio.init(
                project=PROJECT, name=info.name, config=dict(info.config), auto_log_gpu=False, auto_log_cpu=False
            )

    def log(self, point: Point) -> None:
        """One row of the run's history."""
        self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        """Wait until all is written."""
        with contextlib.redirect_stdout(sys.stderr):
            # Not the run's own, after which the library would finish it once more, and say so, at exit.
            self._library.finish()


TRACKERS: dict[str, type[TensorBoardTracker] | type[WandbTracker] | type[TrackioTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}
"""Name of the tracker, which is also that of its package and of our extra."""


def check_installed(name: str) -> None:
    """ValueError, with what to do, if the tracker's package is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"{name} needs the package {name}, which is not installed; pip install 'fsm-trainer[{name}]'")
