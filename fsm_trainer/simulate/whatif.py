"""What would a recorded run have been with other settings, or with a part of it quicker or slower?

The live scheduler and loop run in virtual time over the durations that the run itself recorded, once for each setting.
docs/what-if.md says what is modelled and how far off predictions were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, Record, RecordKind
from fsm_trainer.simulate.durations import Durations
from fsm_trainer.simulate.faults import FaultPlan
from fsm_trainer.simulate.measured import Measured, Scaled, Thinned
from fsm_trainer.simulate.recorded import Recorded, recorded
from fsm_trainer.simulate.settings import Setting, grid
from fsm_trainer.simulate.shares import Shares, measure_shares
from fsm_trainer.simulate.simulator import NO_DEADLINES, SimResult, SimulationError, simulate
from fsm_trainer.simulate.timing import Timing, measure_timing

if TYPE_CHECKING:
    from fsm_trainer.eventlog.reader import EventLog

STEPS_IN_ALL = 25_000
"""Steps simulated for all settings together, about ten seconds."""
MOST_STEPS, LEAST_STEPS = 1000, 100
"""Bounds of the steps simulated for one setting; a longer run goes on as these did."""
KNOWN_ERROR = 0.08
"""Share by which a prediction of another setting may be off: the largest error of docs/what-if.md, rounded up."""
SAME = 0.01
"""Predictions that differ by no more than this share count as equal when the best is chosen."""


@dataclass(frozen=True)
class Scales:
    """Factors on recorded durations: 0.5 is twice as fast."""

    rollout: float = 1.0
    train: float = 1.0
    reward: float = 1.0
    sync: float = 1.0
    """Export and load of weights."""

    def apply(self, durations: Durations) -> Durations:
        """The durations so many times; hand-overs stay as they are."""
        factors = {
            CommandKind.GENERATE: self.rollout,
            CommandKind.TRAIN: self.train,
            CommandKind.REWARD: self.reward,
            CommandKind.EXPORT: self.sync,
            CommandKind.LOAD_WEIGHTS: self.sync,
        }
        operations = dict(durations.operations)
        for kind, factor in factors.items():
            amount = operations.get(kind)
            if factor != 1.0 and isinstance(amount, (Measured, Thinned)):
                operations[kind] = Scaled(amount, factor)
        return replace(durations, operations=operations)


@dataclass(frozen=True)
class Prediction:
    """What one setting is predicted to give."""

    setting: Setting
    wall_s: float | None = None
    """Seconds from the first event to the end, or to the last step if the recorded run did not complete."""
    served_s: float | None = None
    """Seconds of them until the engines served their first weights."""
    step_s: float | None = None
    """Seconds a step, start-up left out."""
    trainer_idle: float | None = None
    """Share of the time in which the trainer waits for a batch, while the run trains."""
    rollout_idle: float | None = None
    """Share in which a worker neither loads nor generates nor rewards, mean over the workers."""
    staleness_mean: float | None = None
    staleness_max: int | None = None
    drops: int | None = None
    """Batches generated and then thrown away as stale."""
    problem: str | None = None
    """Why this setting cannot run, or would not come to its end; then nothing is predicted."""

    @property
    def ok(self) -> bool:
        """Whether there is a prediction."""
        return self.problem is None


@dataclass(frozen=True)
class WhatIf:
    """The answers for one recorded run."""

    recorded: Setting
    steps: int
    """Optimiser steps of the run, and of each prediction."""
    simulated_steps: int
    """Steps simulated for each prediction; the rest goes on as these did."""
    completed: bool
    """The run came to its end; otherwise times are to the last step it took."""
    actual_s: float
    """What the recorded run took."""
    self_check: Prediction
    """The recorded setting, predicted from its own durations."""
    predictions: tuple[Prediction, ...]
    """In the order asked for."""
    scales: Scales = field(default_factory=Scales)
    serial_engines: bool = False
    """Workers who share an engine were assumed to wait for each other."""

    @property
    def self_error(self) -> float:
        """The self-check's error, as a share of what the run took; positive if it is predicted too long."""
        assert self.self_check.wall_s is not None
        return self.self_check.wall_s / self.actual_s - 1.0

    def best(self, staleness_limit: int | None = None) -> Prediction | None:
        """The quickest setting whose staleness bound is within the limit; None if there is none.

        Of those within 1 % of the quickest, the one with the least staleness, then workers, then queue.
        """
        allowed = [
            (p.wall_s, p)
            for p in self.predictions
            if p.wall_s is not None and (staleness_limit is None or p.setting.max_staleness <= staleness_limit)
        ]
        if not allowed:
            return None
        least = min(wall for wall, _ in allowed)
        close = [(_modesty(p), wall, p) for wall, p in allowed if wall <= least * (1.0 + SAME)]
        return min(close, key=lambda entry: entry[:2])[2]


def within(error: float) -> str:
    """How near a prediction came, in words: within 0.1 %, or by how much it is off, positive if too long."""
    return "within 0.1 %" if abs(error) <= 0.001 else f"{100 * error:+.1f} % off"


def _modesty(prediction: Prediction) -> tuple[float, ...]:
    s = prediction.setting
    return (prediction.staleness_mean or 0.0, prediction.drops or 0, s.engines, s.workers, s.queue_size)


def whatif(
    run: str | Path | EventLog | Iterable[Record],
    axes: Mapping[str, Sequence[int | str]] | None = None,
    *,
    scales: Scales | None = None,
    settings: Iterable[Setting] | None = None,
    config: SchedulerConfig | None = None,
    most_steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WhatIf:
    """Predict a run for every combination of `axes` (names of `Setting`'s parts -> values), the rest as recorded.

    A synchronous run leaves the settings open that only async algorithms have: they take `fsm-train`'s defaults.
    `settings` are asked as they are, instead of a grid.

    `run` is a run's directory, its log (a file, or one that was read), or records, which need their `config`.
    `most_steps` (at least 100) bounds the steps simulated for each setting. `progress(done, all)` is called after each.
    Raises ValueError if there is nothing to learn from.
    """
    known = recorded(run)
    config = known.config if config is None else config
    if config is None:
        raise ValueError("records alone do not say how the run was configured; give its config as well")
    known = replace(known, config=config)
    _check(known, config)
    asked = grid(_start(Setting.of(config), axes), axes or {}) if settings is None else list(settings)
    most_steps = most_steps or min(MOST_STEPS, STEPS_IN_ALL // (1 + len(asked)))
    steps = min(known.steps, max(LEAST_STEPS, most_steps))
    scales = scales or Scales()
    predictor = _Predictor(known, known.from_nothing(steps), steps, _base(config))
    self_check = predictor.predict(Setting.of(config), Scales())
    if not self_check.ok:
        raise ValueError(f"{known.name} cannot be predicted: even with its own setting, {self_check.problem}")
    predictions = []
    for done, setting in enumerate(asked, 1):
        predictions.append(predictor.predict(setting, scales))
        if progress is not None:
            progress(done, len(asked))
    completed = predictor.to_end
    return WhatIf(
        recorded=Setting.of(config),
        steps=known.steps,
        simulated_steps=steps,
        completed=completed,
        actual_s=known.timing.wall_s(known.steps),
        self_check=self_check,
        predictions=tuple(predictions),
        scales=scales,
        serial_engines=known.durations.serial_engines,
    )


def _start(recorded_setting: Setting, axes: Mapping[str, Sequence[int | str]] | None) -> Setting:
    """What holds where nothing is asked: what was recorded, or `fsm-train`'s defaults if that had no lead at all."""
    return Setting() if axes and recorded_setting.without_lead else recorded_setting


def _base(config: SchedulerConfig) -> SchedulerConfig:
    """The configuration as of a run that begins with version and batch 0, and in which nothing is ever late."""
    left = None if config.max_steps is None else config.max_steps - config.first_version
    return replace(config, max_steps=left, first_version=0, first_batch=0, deadlines=NO_DEADLINES)


def _check(known: Recorded, config: SchedulerConfig) -> None:
    if config.external_rollouts:
        raise ValueError(
            f"{known.name} is a run whose batches came from outside; how long those took to make is not in its log"
        )
    if not known.steps:
        raise ValueError(f"{known.name} holds no optimiser step to learn from; ask about a run that has trained")


@dataclass(frozen=True)
class _Predictor:
    whole: Recorded
    part: Recorded
    steps: int
    """Steps simulated."""
    base: SchedulerConfig
    """What all settings have in common."""

    @property
    def to_end(self) -> bool:
        """The recorded run came to its end."""
        return self.whole.timing.end_s is not None

    def predict(self, setting: Setting, scales: Scales) -> Prediction:
        """One setting; what is impossible is said in the prediction."""
        try:
            config = self._config(setting)
            result = simulate(
                config, durations=scales.apply(self.part.durations), faults=FaultPlan(self.part.faults), check=False
            )
        except ValueError as error:
            return Prediction(setting, problem=str(error))
        except SimulationError as error:
            return Prediction(setting, problem=f"it would never end: {error}")
        timing = measure_timing(result.records)
        if timing.end_s is None and (self.to_end or len(timing.steps_s) < self.steps):
            return Prediction(setting, problem=f"it would fail: {result.error}")
        return self._prediction(setting, result, timing if self.to_end else timing.first(self.steps))

    def _config(self, setting: Setting) -> SchedulerConfig:
        """A recording that does not go to its end was to go on: generation does not stop short of its last step."""
        config = setting.config(self.base)
        if self.to_end:
            return replace(config, max_steps=self.steps)
        longer = self.steps + config.workers + config.queue_size + 1
        return replace(config, max_steps=longer if config.max_steps is None else min(longer, config.max_steps))

    def _shares(self, result: SimResult) -> Shares | None:
        """To the end, or to the last step that counts: of a recording that was broken off, more are simulated."""
        if self.to_end:
            return result.shares
        steps = [n for n, r in enumerate(result.records) if r.kind is RecordKind.VERSION and r.trigger == "step"]
        return measure_shares(result.records[: steps[self.steps - 1] + 1])

    def _prediction(self, setting: Setting, result: SimResult, timing: Timing) -> Prediction:
        wall = timing.wall_s(self.whole.steps)
        last_step = timing.wall_s(self.whole.steps, to_end=False)
        staleness, shares = result.staleness, self._shares(result)
        trained = sum(staleness.values())
        return Prediction(
            setting,
            wall_s=wall,
            served_s=timing.served_s,
            step_s=(last_step - timing.served_s) / self.whole.steps,
            trainer_idle=None if shares is None else shares.trainer_idle,
            rollout_idle=None if shares is None else shares.rollout_idle,
            staleness_mean=sum(value * count for value, count in staleness.items()) / trained,
            staleness_max=max(staleness),
            drops=round(result.drops.get("stale", 0) * self.whole.steps / len(timing.steps_s)),
        )
