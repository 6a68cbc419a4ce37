"""The settings of a run, one class a group: description, default and bounds of each, once.

Flags, configuration file, schema and documentation are all made from these fields. Defaults follow AReno's where it
has the setting. This module knows nothing of flags, files or devices.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, Field, field_validator
from pydantic_core import PydanticCustomError

from fsm_trainer.algorithms.registry import algorithm_names
from fsm_trainer.config.engine_settings import EngineSettings
from fsm_trainer.config.objective_settings import ObjectiveSettings
from fsm_trainer.config.settings_group import SettingsGroup
from fsm_trainer.config.step_settings import StepSettings

TRACKERS = ("tensorboard", "wandb", "trackio")
"""What `report_to` may name."""
_SAMPLES_KEPT = re.compile("all|none|[1-9][0-9]{0,8}")


class BasicSettings(SettingsGroup):
    """What to run, on what, and how long."""

    algo: str = Field(
        "async-grpo",
        description="Algorithm; the async ones (experimental) overlap rollout and training",
        json_schema_extra={"enum": list(algorithm_names())},
    )
    ckpt: str | None = Field(None, description="Model to train: a folder for from_pretrained, or a hub name")
    dataset_path: str | None = Field(
        None, description="Prompts: a data file, a folder, hub NAME[:CONFIG[:SPLIT]] or reasoning-gym:TASK[,TASK]"
    )
    dataset_loader_fn: str | None = Field(
        None, description="FILE.py[:FUNCTION] that makes the dataset's rows (FUNCTION: load_training_dataset)"
    )
    reward_fn_path: str | None = Field(
        None,
        description="FILE.py[:FUNCTION] that scores (FUNCTION: reward_fn) or builtin:NAME; several with commas between",
    )
    epochs: int = Field(10, ge=1, description="Passes over the dataset")
    shuffle: bool = Field(True, description="Shuffle the prompts anew each epoch, by the seed")
    drop_last: bool = Field(
        True, description="Leave out of an epoch the prompts that fill no whole batch (false: a smaller last batch)"
    )
    max_prompt_attempts: int = Field(
        3, ge=1, description="Batches a prompt may be part of in an epoch, when they are dropped as stale or fail"
    )
    max_steps: int | None = Field(None, ge=1, description="Optimiser steps after which the run is done")
    seed: int = Field(0, ge=0, lt=2**31, description="Fixes prompt order, sampling and initialisation")
    output_dir: str | None = Field(
        None, description="The run's folder, new or empty (default: the next free runs/ALGO-NNNN)"
    )
    preset: Literal["quickstart"] | None = Field(
        None, description="Ready-made task with its own settings; what is given besides wins"
    )
    train_devices: str | None = Field(
        None, description="Where to train: cpu, 0, 0,1 or 0..3 (default: cuda:0 if there is one, else cpu)"
    )
    tp_size: int = Field(1, ge=1, description="Tensor-parallel size of training (alias --train-tp-size)")
    threads: int = Field(0, ge=0, le=1024, description="torch threads per process (0: the cores shared out)")
    start_timeout_s: float = Field(600.0, ge=0, description="Limit for starting the engines (0: none)")
    shutdown_timeout_s: float = Field(30.0, ge=0, description="Limit for ending what is in flight (0: none)")

    @field_validator("algo")
    @classmethod
    def _check_algo_name(cls, value: str) -> str:
        """Algorithms that a program registered itself count too."""
        if value not in algorithm_names():
            raise PydanticCustomError("algo", "one of {names}", {"names": ", ".join(algorithm_names())})
        return value


class RolloutSettings(SettingsGroup):
    """How completions are generated and scored."""

    batch_size: int = Field(32, ge=1, description="Prompts per batch")
    n_samples: int = Field(8, ge=1, description="Completions per prompt: the group the baseline is taken over")
    max_prompt_tokens: int = Field(1024, ge=1, description="Longest prompt allowed")
    overlong_prompts: Literal["drop", "error"] = Field(
        "drop", description="What becomes of longer prompts: left out and counted, or refused"
    )
    disable_thinking: bool = Field(False, description="Tell the chat template to go without thinking, if it can")
    max_new_tokens: int = Field(1024, ge=1, description="Longest completion generated")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling (1: off)")
    top_k: int = Field(-1, ge=-1, description="Sample among the k likeliest tokens (-1: off)")
    rollout_timeout_s: float = Field(1800.0, ge=0, description="Limit for generating one batch (0: none)")
    reward_weights: str | None = Field(None, description="Weight of each reward function, with commas (default: 1)")
    reward_executor: Literal["process", "thread"] = Field(
        "process", description="Where reward functions run: processes that may hang or crash, or threads of this one"
    )
    reward_workers: int | None = Field(
        None, ge=1, le=64, description="Reward processes or threads (default: what the functions ask for, else few)"
    )
    reward_call_timeout_s: float | None = Field(
        None, ge=0, description="Limit for one call of a reward function (0: none; default: 0.9 of --reward-timeout-s)"
    )
    reward_on_error: Literal["fail", "zero", "mask"] = Field(
        "fail", description="A sample whose reward fails: fails the run, counts 0, or is left out"
    )
    reward_timeout_s: float = Field(600.0, ge=0, description="Limit for scoring one batch (0: none)")


class TrainSettings(SettingsGroup):
    """How the weights are updated."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate")
    lr_decay_style: Literal["cosine", "linear", "constant"] = Field("cosine", description="Shape of the decay")
    lr_decay_steps: int = Field(1000, ge=1, description="Optimiser steps, warm-up included, until --min-lr is reached")
    min_lr: float = Field(1e-7, ge=0, description="Learning rate after the decay")
    lr_warmup_steps: int = Field(0, ge=0, description="Optimiser steps of linear warm-up")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's first-moment decay")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="AdamW's second-moment decay")
    weight_decay: float = Field(1e-2, ge=0, description="AdamW's decoupled weight decay")
    grad_clip_norm: float = Field(1.0, gt=0, description="Global gradient norm clipped to")
    max_logprob_gap: float | None = Field(
        None,
        ge=0,
        description="Largest mean difference of rollout and trainer logprobs for one version; past it the run stops "
        "(0: no check; default: by --dtype)",
    )
    sync_probe_prompts: int = Field(
        4, ge=0, le=64, description="Prompts that trainer and engine score after each sync, to compare (0: none)"
    )
    train_timeout_s: float = Field(1800.0, ge=0, description="Limit for one optimiser step (0: none)")
    sync_timeout_s: float = Field(300.0, ge=0, description="Limit for one export or load of weights (0: none)")


class AsyncSettings(SettingsGroup):
    """How far rollout may run ahead of training; only for the async algorithms."""

    async_queue_size: int = Field(2, ge=1, description="Batches the train queue holds")
    async_rollout_workers: int = Field(
        1, ge=1, le=1000, description="Rollout workers (default: 1, or one per rollout engine if there are more)"
    )
    async_prefetch_batches: int = Field(1, ge=0, le=1000, description="Prompt batches loaded ahead of admission")
    async_max_staleness: int = Field(1, ge=0, description="Steps a batch's weights may lag when it is trained")
    async_sync_interval_steps: int = Field(1, ge=1, description="Optimiser steps between weight syncs")
    async_queue_timeout_s: float = Field(300.0, ge=0, description="Limit for a wait at the train queue (0: none)")
    async_drop_stale_batches: bool = Field(True, description="Drop a batch that is too stale (false: fail the run)")
    async_admission: Literal["paced", "greedy", "lockstep"] = Field(
        "paced", description="paced wastes nothing, greedy fills the queue, lockstep repeats bit for bit"
    )
    async_sync_mode: Literal["drain", "inflight"] = Field(
        "drain",
        description="How an engine gets new weights: once what it generates has ended, or in between (vllm only)",
    )
    async_inflight_cache: Literal["recompute", "keep"] = Field(
        "recompute",
        description="In-flight sync: what ran is computed anew, or goes on with the older weights' attention cache",
    )
    async_max_no_step_batches: int = Field(
        100, ge=1, description="Batches in a row that may give no optimiser step before the run fails"
    )


class CheckpointSettings(SettingsGroup):
    """What is kept of the weights, and from where a run goes on (docs/checkpoints.md)."""

    resume: str | None = Field(
        None, description="Go on from a run's newest checkpoint: its folder, one of its checkpoints, or latest"
    )
    save_path: str | None = Field(None, description="Folder of the checkpoints (default: OUTPUT_DIR/checkpoints)")
    save_interval: int = Field(100, ge=0, description="Optimiser steps between checkpoints (0: the last one only)")
    save_total_limit: int | None = Field(None, ge=1, description="Checkpoints kept, the newest (default: all)")
    save_best: str | None = Field(
        None, description="Metric, such as reward_mean, whose highest mean makes a checkpoint one kept besides these"
    )
    save_timeout_s: float = Field(1800.0, ge=0, description="Limit for writing one checkpoint (0: none)")


class ObservabilitySettings(SettingsGroup):
    """What is shown and recorded besides the event log."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level of log lines")
    log_format: Literal["console", "json"] = Field("console", description="Form of log lines on standard error")
    progress: Literal["auto", "rich", "plain", "none"] = Field(
        "auto", description="Progress display (auto: rich on a terminal, else plain lines)"
    )
    log_samples: str = Field(
        "all",
        description="Batches whose completions are kept in samples/: all, none, or the newest N",
        json_schema_extra={"pattern": _SAMPLES_KEPT.pattern},
    )
    log_segment_mb: int = Field(
        0, ge=0, le=1 << 20, description="Megabytes after which the event log goes on in another file (0: one file)"
    )
    log_compact: bool = Field(False, description="Compact the event log once the run has ended")
    report_to: str = Field(
        "none",
        description="Trackers that get the run's numbers while it goes: tensorboard, wandb, trackio; with commas",
    )

    @field_validator("log_samples")
    @classmethod
    def _check_log_samples(cls, value: str) -> str:
        if _SAMPLES_KEPT.fullmatch(value) is None:
            raise PydanticCustomError("log_samples", "all, none or how many of the newest batches to keep, at least 1")
        return value

    @field_validator("report_to")
    @classmethod
    def _check_report_to(cls, value: str) -> str:
        names = tracker_names(value)
        if value.strip() != "none" and not (names and set(names) <= set(TRACKERS) and len(set(names)) == len(names)):
            raise PydanticCustomError("report_to", "none, or some of {known}", {"known": ", ".join(TRACKERS)})
        return value


def tracker_names(report_to: str) -> list[str]:
    """The trackers that a value of `report_to` names."""
    names = [name.strip() for name in report_to.split(",")]
    return [] if names == ["none"] else names


LISTED = frozenset({"reward_fn_path", "reward_weights", "report_to", "lora_target_modules", "rollout_base_url"})
"""Settings that name several things with commas between; a flag may be repeated, a file may have a list."""
MAPPED = {"vllm_arg": "vllm"}
"""Settings of `KEY=VALUE` each, whose flag may be repeated -> the section of a file that holds them."""

GROUPS: dict[str, type[BaseModel]] = {
    "Basic": BasicSettings,
    "Rollout": RolloutSettings,
    "Engine": EngineSettings,
    "Train": TrainSettings,
    "Step": StepSettings,
    "Objective": ObjectiveSettings,
    "Async": AsyncSettings,
    "Checkpoint": CheckpointSettings,
    "Observability": ObservabilitySettings,
}
"""Group title -> its settings, in the order of `--help`."""
