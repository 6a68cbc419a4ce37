"""What `--dry-run` prints: the resolved configuration and what the run would do. Starts nothing, writes nothing."""

from __future__ import annotations

import importlib.metadata
import json
import platform

from fsm_trainer.config.devices import parse_devices
from fsm_trainer.config.errors import flag
from fsm_trainer.config.groups import GROUPS
from fsm_trainer.config.objective_settings import make_objective
from fsm_trainer.config.preflight import Inputs, plan_warnings
from fsm_trainer.config.train_config import TrainConfig
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.trainers.engines import engine_words, transport_of
from fsm_trainer.trainers.run_directory import RunDirectory

_LIBRARIES = ("torch", "transformers", "tokenizers", "datasets", "pyarrow", "pandas", "transitions", "vllm")


def render_plan(config: TrainConfig, inputs: Inputs, scheduler: SchedulerConfig) -> str:
    """The whole text."""
    sections = [_settings(config), "Plan\n" + _table(_plan_rows(config, inputs, scheduler))]
    warnings = plan_warnings(config, inputs)
    if warnings:
        sections.append("Warnings\n" + "\n".join(f"  {warning}" for warning in warnings))
    return "\n\n".join(sections)


def _settings(config: TrainConfig) -> str:
    blocks = []
    for title, group in GROUPS.items():
        rows = [(flag(name), _text(getattr(config, name))) for name in group.model_fields]
        blocks.append(f"{title}\n{_table(rows)}")
    return "\n\n".join(blocks)


def _plan_rows(config: TrainConfig, inputs: Inputs, scheduler: SchedulerConfig) -> list[tuple[str, str]]:
    prompts, run = inputs.prompts, RunDirectory.of(config)
    return [
        *([("resumed from", f"{config.resume}, after step {scheduler.first_version}")] if config.resume else []),
        ("machines", f"1 run, 1 trainer, {scheduler.workers} rollout worker(s), {scheduler.engines} engine(s)"),
        ("train engine", f"hf on {_train_devices(config)}, {config.threads} thread(s)"),
        *[(f"rollout engine {i}", engine_words(config, i)) for i in range(config.engines)],
        ("weight sync", f"{transport_of(config)}, {_sync_mode(config)}"),
        ("scheduler", json.dumps({k: v for k, v in scheduler.to_dict().items() if k != "deadlines"})),
        ("deadlines [s]", json.dumps(scheduler.to_dict()["deadlines"])),
        ("dataset", _dataset(inputs)),
        *[("reward" if i == 0 else "", line) for i, line in enumerate(inputs.rewards.describe(config))],
        ("batch", _batch(config)),
        ("objective", _objective(config)),
        ("steps", f"{scheduler.max_steps}, of {prompts.total_batches} batches in {config.epochs} epoch(s)"),
        ("context", f"{config.max_prompt_tokens + config.max_new_tokens} of {inputs.context or 'unknown'} positions"),
        ("event log", str(run.events)),
        ("configuration", str(run.config)),
        ("metrics", str(run.metrics)),
        ("samples", _samples(config, run)),
        ("checkpoints", _checkpoints(config)),
        ("versions", ", ".join([f"python {platform.python_version()}", *_versions()])),
    ]


def _dataset(inputs: Inputs) -> str:
    too_long = inputs.prompts.overlong_rows
    left_out = f", {too_long} of them too long and left out" if too_long else ""
    return f"{inputs.dataset_rows} rows{left_out}, {inputs.prompts.batches_per_epoch} batches an epoch"


def _sync_mode(config: TrainConfig) -> str:
    if not config.is_async or config.async_sync_mode == "drain":
        return "drain mode"
    kept = "goes on with its cache" if config.async_inflight_cache == "keep" else "is computed anew"
    return f"inflight mode, what runs {kept}"


def _batch(config: TrainConfig) -> str:
    spare = config.prompts_per_batch - config.batch_size
    more = f"; {spare} spare prompts are generated to fill gaps" if spare else ""
    return f"{config.batch_size} prompts x {config.n_samples} samples = {config.rows_per_batch} sequences{more}"


def _objective(config: TrainConfig) -> str:
    """The algorithm's own pieces, with the settings that change them."""
    o, buffer = make_objective(config), config.overlong_buffer_tokens
    parts = [
        f"{o.surrogate} of the {o.ratio_level} ratio, {max(0.0, 1 - o.clip_low):g} to {1 + o.clip_high:g}",
        f"correction {o.correction}",
        *([f"{o.span_policy} old spans"] if o.span_policy != "keep" else []),
        f"{o.aggregation} loss",
        *([f"KL {o.kl_estimator} x {o.kl_coef:g}"] if o.needs_reference else []),
        *([f"entropy x {o.entropy_coef:g}"] if o.entropy_coef else []),
        *([f"reward falls over the last {buffer} tokens"] if buffer else []),
    ]
    return ", ".join(parts)


def _train_devices(config: TrainConfig) -> str:
    return ", ".join(parse_devices("--train-devices", config.train_devices or ""))


def _samples(config: TrainConfig, run: RunDirectory) -> str:
    if config.log_samples == "none":
        return "none"
    which = "every batch" if config.log_samples == "all" else f"the newest {config.log_samples} batches"
    return f"{run.samples} ({which})"


def _checkpoints(config: TrainConfig) -> str:
    every = f"every {config.save_interval} steps and " if config.save_interval else ""
    return f"{config.save_path} ({every}after the last)"


def _versions() -> list[str]:
    installed = []
    for name in _LIBRARIES:
        try:
            installed.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
