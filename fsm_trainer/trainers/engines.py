"""Which engines a configuration asks for, and where each one lives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.engine_settings import memory_share
from fsm_trainer.config.errors import one_line
from fsm_trainer.config.objective_settings import make_objective
from fsm_trainer.engines.base import RolloutEngine, SamplingParams, TrainEngine
from fsm_trainer.engines.vllm_versions import check_vllm, untried
from fsm_trainer.engines.weight_sync.choose import choose_transport, make_transport
from fsm_trainer.engines.weight_sync.transport import WeightTransport
from fsm_trainer.runtime.host import EngineHost, InlineHost, ProcessHost

if TYPE_CHECKING:
    from fsm_trainer.engines.hf_lora import LoraSettings

_HERE = ("localhost", "127.0.0.1", "::1")
"""How a server on this machine is addressed."""
_log = structlog.get_logger("fsm_train")


def make_train_engine(config: TrainConfig, transport: WeightTransport | None = None) -> TrainEngine:
    """The train engine of a resolved configuration, which publishes by `transport` (None: shared memory) and closes it.

    It loads nothing before `start`.
    """
    from fsm_trainer.engines.hf_train import HFTrainEngine

    assert config.ckpt is not None and config.train_devices is not None, config
    return HFTrainEngine(
        config.ckpt,
        objective=make_objective(config),
        loss=get_algorithm(config.algo).resolve_loss(),
        reference_refresh_steps=config.reference_refresh_steps or None,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
        lr_decay_style=config.lr_decay_style,
        warmup=config.lr_warmup_steps,
        lr_decay_steps=config.lr_decay_steps,
        min_lr=config.min_lr,
        grad_clip_norm=config.grad_clip_norm,
        nonfinite=config.nonfinite,
        optimizer=config.optimizer,
        mini_bs=config.mini_bs,
        max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        sequence_packing=config.sequence_packing,
        gradient_checkpointing=config.gradient_checkpointing,
        torch_compile=config.torch_compile,
        lora=lora_settings(config),
        temperature=config.temperature,
        device=config.train_devices,
        dtype=config.dtype,
        threads=config.threads,
        seed=config.seed,
        transport=transport,
    )


def transport_of(config: TrainConfig) -> str:
    """How weights reach the rollout engines of a resolved configuration. ConfigError if it cannot be as asked."""
    assert config.train_devices is not None, config
    try:
        return choose_transport(
            config.policy_sync_transport,
            train_device=config.train_devices,
            rollout_devices=[device for group in config.rollout_groups for device in group],
            engine=config.rollout_engine,
            host=config.rollout_host,
            local_servers=all(urlsplit(url).hostname in _HERE for url in config.base_urls),
        )
    except ValueError as error:
        raise ConfigError(one_line(error).replace("policy_sync_transport", "--policy-sync-transport")) from error


def make_weight_transport(config: TrainConfig) -> WeightTransport:
    """The transport of a resolved configuration."""
    name = transport_of(config)
    _log.info("weight_transport", name=name, asked=config.policy_sync_transport)
    return make_transport(
        name,
        bucket_bytes=config.policy_sync_bucket_mb << 20,
        directory=Path(str(config.output_dir)).absolute() / "weights",
        ranks=config.rollout_tp_size or 1,
    )


def lora_settings(config: TrainConfig) -> LoraSettings | None:
    """The adapters that are trained, the same for train and rollout engines; None when all weights are."""
    from fsm_trainer.engines.hf_lora import ALL_LINEAR, LoraSettings

    if config.lora_rank is None:
        return None
    targets = (config.lora_target_modules or ALL_LINEAR).split(",")
    return LoraSettings(
        config.lora_rank, config.lora_alpha or 2 * config.lora_rank, tuple(target.strip() for target in targets)
    )


def sampling_params(config: TrainConfig) -> SamplingParams:
    """How completions are drawn."""
    return SamplingParams(
        n_samples=config.n_samples,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )


def rollout_engine_factory(config: TrainConfig, engine: int) -> Callable[[], RolloutEngine]:
    """What makes rollout engine number `engine`; can be pickled, so that it can be made in another process."""
    assert config.ckpt is not None, config
    if config.base_urls:
        return _server_factory(config, engine)
    if config.rollout_engine == "vllm":
        return _vllm_factory(config, engine)
    from fsm_trainer.engines.hf_rollout import HFRolloutEngine

    # The engine itself rather than a function of this module, or its process would import the whole trainer.
    return partial(
        HFRolloutEngine,
        config.ckpt,
        sampling_params(config),
        device=config.rollout_groups[engine][0],
        dtype=config.dtype,
        threads=config.threads,
        lora=lora_settings(config),
    )


def _vllm_factory(config: TrainConfig, engine: int) -> Callable[[], RolloutEngine]:
    from fsm_trainer.engines.vllm_local import vllm_engine

    assert config.ckpt is not None
    group, further = config.rollout_groups[engine], dict(config.vllm_arg or {})
    return partial(
        vllm_engine,
        config.ckpt,
        sampling_params(config),
        devices=group,
        dtype=config.dtype,
        max_model_len=further.pop("max_model_len", config.max_prompt_tokens + config.max_new_tokens),
        memory_utilization=memory_share(config, group),
        threads=config.threads,
        seed=config.seed,
        transport=transport_of(config),
        keep_cache=config.async_inflight_cache == "keep",
        engine_args=further,
    )


def _server_factory(config: TrainConfig, engine: int) -> Callable[[], RolloutEngine]:
    from fsm_trainer.engines.vllm_server import vllm_server_engine

    assert config.ckpt is not None
    return partial(
        vllm_server_engine,
        config.base_urls[engine],
        config.ckpt,
        sampling_params(config),
        dtype=config.dtype,
        max_model_len=config.max_prompt_tokens + config.max_new_tokens,
        keep_cache=config.async_inflight_cache == "keep",
        # Before the scheduler's own limit, which could only say that it took too long.
        start_timeout_s=0.9 * config.start_timeout_s or math.inf,
        warn=partial(_warn, engine),
    )


def _warn(engine: int, event: str, said: str) -> None:
    _log.warning(event, engine=engine, message=said)


def engine_words(config: TrainConfig, engine: int) -> str:
    """Rollout engine number `engine` in words: kind and version, devices or server, and where it lives."""
    if config.base_urls:
        return f"vllm server {config.base_urls[engine]}"
    kind, package = ("vllm", check_vllm()) if config.rollout_engine == "vllm" else ("hf", version("transformers"))
    devices = ", ".join(config.rollout_groups[engine])
    where = "its own process" if config.rollout_host == "process" else "this process"
    return f"{kind} ({'transformers ' if kind == 'hf' else ''}{package}) on {devices} in {where}"


def make_rollout_host(config: TrainConfig, engine: int) -> EngineHost:
    """The host of rollout engine number `engine`, started; what talks to a server lives in this process."""
    factory, name = rollout_engine_factory(config, engine), f"engine-{engine}"
    _log.info("engine_starting", engine=engine, what=engine_words(config, engine))
    if config.rollout_engine == "vllm" and not config.base_urls and (doubt := untried(check_vllm())) is not None:
        _warn(engine, "engine_untried", doubt)
    return ProcessHost(factory, name) if config.rollout_host == "process" else InlineHost(factory, name)
