"""`TrainConfig`: every setting of a run, typed, validated and frozen; and the scheduler's share of it.

It knows which combinations are impossible, but nothing of files, flags or the machine it runs on: what depends on
those is checked by `preflight.py` and filled in by `resolve.py`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pydantic import ValidationError, model_validator
from pydantic_core import ErrorDetails

from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.config.devices import parse_devices
from fsm_trainer.config.engine_settings import EngineSettings, check_engines
from fsm_trainer.config.errors import ConfigError, flag, one_line, shown, suggestion
from fsm_trainer.config.groups import (
    AsyncSettings,
    BasicSettings,
    CheckpointSettings,
    ObservabilitySettings,
    RolloutSettings,
    TrainSettings,
)
from fsm_trainer.config.objective_settings import ObjectiveSettings, check_objective, spare_prompts
from fsm_trainer.config.step_settings import StepSettings, check_step
from fsm_trainer.core.config import Deadlines, SchedulerConfig

ASYNC_SETTINGS = frozenset(AsyncSettings.model_fields)


# Pydantic collects fields from the last base to the first; listed backwards they come in the order of `--help`.
class TrainConfig(
    ObservabilitySettings,
    CheckpointSettings,
    AsyncSettings,
    ObjectiveSettings,
    StepSettings,
    TrainSettings,
    EngineSettings,
    RolloutSettings,
    BasicSettings,
):
    """All settings of one run. Raises `pydantic.ValidationError`; `build` raises a one-line `ConfigError` instead."""

    @classmethod
    def build(cls, values: dict[str, Any], origin: dict[str, str] | None = None) -> TrainConfig:
        """Validate `values`; a failure names the setting, its value and where it came from (`origin`)."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_describe(error.errors()[0], origin or {})) from error

    @property
    def is_async(self) -> bool:
        """Whether rollout and training overlap."""
        return get_algorithm(self.algo).asynchronous

    @property
    def rows_per_batch(self) -> int:
        """Sequences that one whole batch is trained on."""
        return self.batch_size * self.n_samples

    @property
    def prompts_per_batch(self) -> int:
        """Prompts that are served and generated for one whole batch, spare ones included."""
        return self.batch_size + spare_prompts(self)

    @property
    def rollout_groups(self) -> tuple[tuple[str, ...], ...]:
        """Devices of each rollout engine here; one engine for every `rollout_tp_size` rollout devices."""
        if self.base_urls:
            return ()
        devices = parse_devices("--rollout-devices", self.rollout_devices or "")
        if not devices:
            devices = parse_devices("--train-devices", self.train_devices or "")[:1] or ("cpu",)
            return (devices,)
        size = self.rollout_tp_size or self.tp_size
        if len(devices) % size:
            raise ConfigError(
                f"--rollout-devices names {len(devices)} devices, which do not divide into engines of "
                f"--rollout-tp-size {size}; give a multiple of {size}"
            )
        return tuple(devices[i : i + size] for i in range(0, len(devices), size))

    @property
    def base_urls(self) -> tuple[str, ...]:
        """Address of each server to generate with; none where the engines are the run's own."""
        return tuple((self.rollout_base_url or "").split(",")) if self.rollout_base_url else ()

    @property
    def engines(self) -> int:
        """Rollout engines of the run."""
        return len(self.base_urls) or len(self.rollout_groups)

    @property
    def workers(self) -> int:
        """Rollout workers of the run: one per engine unless more are asked for."""
        engines = self.engines
        if not self.is_async:
            return engines
        return self.async_rollout_workers if self._asked_for_workers else max(self.async_rollout_workers, engines)

    @property
    def _asked_for_workers(self) -> bool:
        return "async_rollout_workers" in self.model_fields_set

    @model_validator(mode="after")
    def _check_combinations(self) -> TrainConfig:
        self._check_algo()
        self._check_engine_counts()
        check_engines(self)
        self._check_batch()
        check_step(self)
        check_objective(self)
        if self.save_best is not None and self.save_total_limit is None:
            raise ValueError(
                f"--save-best {self.save_best} has no meaning without --save-total-limit: every checkpoint is kept; "
                f"give both or neither"
            )
        if self.top_k == 0:
            raise ValueError("--top-k is 0, expected -1 (off) or at least 1")
        self._check_decay()
        if self.is_async and self.async_admission == "lockstep":
            least = self.async_sync_interval_steps - 1
            if self.async_max_staleness < least:
                raise ValueError(
                    f"--async-admission lockstep with --async-sync-interval-steps {self.async_sync_interval_steps} "
                    f"needs --async-max-staleness of at least {least}, got {self.async_max_staleness}"
                )
        return self

    def _check_algo(self) -> None:
        extra = sorted(ASYNC_SETTINGS & self.model_fields_set)
        if extra and not self.is_async:
            raise ValueError(
                f"{flag(extra[0])} has no meaning with the synchronous --algo {self.algo}; leave it out or give "
                f"--algo async-{self.algo}"
            )

    def _check_engine_counts(self) -> None:
        engines, named = self.engines, "--rollout-base-url" if self.base_urls else "--rollout-devices"
        if not self.is_async and engines > 1:
            raise ValueError(
                f"the synchronous --algo {self.algo} uses one rollout engine, but {named} makes {engines}; "
                f"give the {'server' if self.base_urls else 'devices'} of one engine or --algo async-{self.algo}"
            )
        if self._asked_for_workers and self.async_rollout_workers < engines:
            raise ValueError(
                f"--async-rollout-workers is {self.async_rollout_workers} but {named} makes {engines} "
                f"rollout engines; give at least {engines} workers or leave it out"
            )

    def _check_batch(self) -> None:
        if self.n_samples < 2:
            raise ValueError(
                f"--n-samples is {self.n_samples}, expected at least 2: --algo {self.algo} takes its baseline over the "
                f"completions of one prompt"
            )

    def _check_decay(self) -> None:
        if self.lr_decay_style == "constant":
            return
        if self.min_lr > self.lr:
            raise ValueError(
                f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}; lower it or give --lr-decay-style constant"
            )
        if self.lr_warmup_steps >= self.lr_decay_steps:
            raise ValueError(
                f"--lr-warmup-steps {self.lr_warmup_steps} leaves no step of the {self.lr_decay_steps} of "
                f"--lr-decay-steps, which counts them too; raise it or give --lr-decay-style constant"
            )

    @property
    def prompts_may_come_back(self) -> bool:
        """Whether a batch can be dropped for staleness, or lost with its engine, and its prompts be served again."""
        drops = self.is_async and self.async_admission == "greedy" and self.async_drop_stale_batches
        return drops or self.on_engine_failure == "restart"

    def deadlines(self) -> Deadlines:
        """The scheduler's deadlines."""
        return Deadlines(
            start_s=self.start_timeout_s,
            load_prompts_s=self._load_timeout_s() if self.prompts_may_come_back else Deadlines.load_prompts_s,
            generate_s=self.rollout_timeout_s,
            reward_s=self.reward_timeout_s,
            train_s=self.train_timeout_s,
            sync_s=self.sync_timeout_s,
            save_s=self.save_timeout_s,
            queue_s=self.async_queue_timeout_s,
            shutdown_s=self.shutdown_timeout_s,
        )

    def _load_timeout_s(self) -> float:
        """At the end of the data prompts are waited for until the last batch that may give them back is consumed."""
        each = (self.rollout_timeout_s, self.reward_timeout_s, self.async_queue_timeout_s)
        consumption = (self.train_timeout_s, self.sync_timeout_s, self.save_timeout_s)
        if not all((*each, *consumption)):
            return 0.0
        ahead = self.async_queue_size + self.workers + 1
        return max(Deadlines.load_prompts_s, sum(each) + ahead * sum(consumption))

    def to_scheduler_config(self, max_batches: int | None = None) -> SchedulerConfig:
        """What the scheduler needs; `max_batches` is how many the prompt source holds, if known.

        A synchronous algorithm is the same scheduler with no lead: staleness 0, one worker, a sync after each step.
        """
        limits = [limit for limit in (self.max_steps, max_batches) if limit is not None]
        max_steps = min(limits) if limits else None
        if not self.is_async:
            # The trainer waits for each rollout by design, so only the rollout's own deadlines apply.
            return SchedulerConfig(
                queue_size=1,
                max_staleness=0,
                max_steps=max_steps,
                save_interval=self.save_interval,
                on_engine_failure=self.on_engine_failure,
                max_engine_restarts=self.max_engine_restarts,
                deadlines=dataclasses.replace(self.deadlines(), queue_s=0.0),
            )
        return SchedulerConfig(
            admission=self.async_admission,
            workers=self.workers,
            engines=self.engines,
            queue_size=self.async_queue_size,
            prefetch=self.async_prefetch_batches,
            max_staleness=self.async_max_staleness,
            sync_interval=self.async_sync_interval_steps,
            max_steps=max_steps,
            sync_mode=self.async_sync_mode,
            drop_stale=self.async_drop_stale_batches,
            max_no_step_batches=self.async_max_no_step_batches,
            save_interval=self.save_interval,
            on_engine_failure=self.on_engine_failure,
            max_engine_restarts=self.max_engine_restarts,
            deadlines=self.deadlines(),
        )

    def to_json(self) -> str:
        """The run's `config.json`."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """Rebuild from `to_json`'s text. A value equal to its default counts as not given."""
        return cls.build(given_values(text))


def given_values(text: str) -> dict[str, Any]:
    """What of a `config.json` is not at its default: it cannot be told whether the rest was given."""
    values, fields = json.loads(text), TrainConfig.model_fields
    return {name: value for name, value in values.items() if name not in fields or fields[name].default != value}


def _describe(error: ErrorDetails, origin: dict[str, str]) -> str:
    """One line for pydantic's first complaint."""
    if not error["loc"]:
        return one_line(error["msg"].removeprefix("Value error, "))
    name = str(error["loc"][0])
    where = f" in {origin[name]}" if name in origin else ""
    if error["type"] == "extra_forbidden":
        return f"unknown setting {name!r}{where}{suggestion(name, TrainConfig.model_fields)}"
    return f"{flag(name)} is {shown(error['input'])}{where}, expected {_expected(error)}"


def _expected(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    bounds = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("more than", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("less than", "lt"),
    }
    if kind in bounds:
        words, key = bounds[kind]
        return f"{words} {context[key] if isinstance(context[key], int) else format(context[key], 'g')}"
    if kind == "literal_error":
        return "one of " + str(context["expected"]).replace("'", "").replace(" or ", ", ")
    words_by_kind = {"int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false"}
    return {**words_by_kind, "string": "a text"}.get(kind.split("_")[0], one_line(error["msg"]))
