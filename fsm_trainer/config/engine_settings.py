"""The settings of the engines that generate: which, where each lives, and how weights reach it.

docs/vllm.md and docs/weight-sync.md explain them. Combinations that cannot be are refused in `check_engines`, which
sees the configuration as given, and again as resolved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from fsm_trainer.config.devices import parse_devices
from fsm_trainer.config.settings_group import SettingsGroup
from fsm_trainer.config.vllm_args import check_engine_args, engine_args

if TYPE_CHECKING:
    from fsm_trainer.config.train_config import TrainConfig

NO_URL = "none"
"""Given for the URLs, it takes back those of the run that is resumed."""
_PORTS = {"http": ":80", "https": ":443"}
"""Scheme of a server's address -> the port that need not be written."""


class EngineSettings(SettingsGroup):
    """Which engine generates, where it lives, and how weights reach it."""

    rollout_engine: Literal["auto", "hf", "vllm"] = Field(
        "auto",
        description="Engine that generates (auto: vllm where it is there, has a GPU and can serve the run, else hf)",
    )
    rollout_host: Literal["process", "inline", "server"] = Field(
        "process", description="Where an engine lives: its own process, this one, or a vLLM server that runs already"
    )
    rollout_base_url: str | None = Field(
        None,
        description="Servers to generate with, such as http://localhost:8000; several with commas make an engine each",
    )
    rollout_devices: str | None = Field(None, description="Where to generate (default: the first training device)")
    rollout_tp_size: int | None = Field(
        None, ge=1, description="Tensor-parallel size of one rollout engine (default: --tp-size)"
    )
    rollout_gpu_memory_utilization: float | None = Field(
        None, gt=0, le=1, description="Share of a GPU's memory that vllm takes (default: 0.9, beside the trainer 0.4)"
    )
    vllm_arg: dict[str, Any] | None = Field(
        None, description="Argument of vllm's engine, may be repeated; in a file the section vllm"
    )
    policy_sync_transport: Literal["auto", "shared-memory", "directory", "nccl", "cuda-ipc"] = Field(
        "auto", description="How weights reach the engines (auto: the fastest that their devices allow)"
    )
    policy_sync_bucket_mb: int = Field(
        64, ge=1, le=1 << 20, description="Megabytes of weights that a transport copies at once"
    )
    on_engine_failure: Literal["fail", "restart"] = Field(
        "fail", description="What follows when an engine dies, hangs or fails to load: the run fails, or a new engine"
    )
    max_engine_restarts: int = Field(
        3, ge=1, description="Restarts of one engine in a row, without a batch from it in between, before the run fails"
    )

    @field_validator("vllm_arg", mode="before")
    @classmethod
    def _parse_engine_args(cls, value: object) -> object:
        return engine_args(value) or None

    @field_validator("rollout_base_url")
    @classmethod
    def _plain_urls(cls, value: str | None) -> str | None:
        if value is None or value.strip() == NO_URL:
            return None
        urls = [_base_url(part.strip()) for part in value.split(",")]
        if len(set(urls)) < len(urls):
            raise PydanticCustomError("base_url", "each server once")
        return ",".join(urls)


def _base_url(text: str) -> str:
    """A server's address without the path of its OpenAI interface, written as any other of the same server is."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in _PORTS and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # no port, or half an IPv6 address
        good = False
    if not good or parts.query or parts.fragment or any(c.isspace() for c in text):
        raise PydanticCustomError("base_url", "the address of a vLLM server, such as http://localhost:8000")
    server = parts.netloc.lower().removesuffix(_PORTS[parts.scheme]).removesuffix(":")
    return f"{parts.scheme}://{server}{parts.path.rstrip('/').removesuffix('/v1')}"


def check_engines(config: TrainConfig) -> None:
    """Combinations that mean nothing or cannot be; ValueError in one sentence."""
    _check_servers(config)
    _check_vllm_only(config)
    if config.rollout_engine == "vllm" and config.lora_rank is not None:
        raise ValueError(
            f"--lora-rank {config.lora_rank} does not go with --rollout-engine vllm in this version, which serves all "
            f"weights as trained; give --rollout-engine hf, or leave out --lora-rank"
        )
    _check_filters(config)
    if config.is_async and config.async_admission == "lockstep":
        _check_lockstep(config)
    if config.async_sync_mode == "inflight" and config.rollout_engine == "hf":
        raise ValueError(
            "--async-sync-mode inflight needs --rollout-engine vllm: the hf engine cannot take weights while it "
            "generates; give --async-sync-mode drain"
        )
    if config.async_inflight_cache == "keep" and config.async_sync_mode == "drain":
        raise ValueError(
            "--async-inflight-cache keep has no meaning with --async-sync-mode drain, which loads no weights amid a "
            "generation; leave it out, or give --async-sync-mode inflight"
        )


def _check_servers(config: TrainConfig) -> None:
    if config.rollout_base_url is None:
        if config.rollout_host == "server":
            raise ValueError("--rollout-host server needs --rollout-base-url; give the servers, or another host")
        return
    if config.rollout_host != "server" and "rollout_host" in config.model_fields_set:
        raise ValueError(
            f"--rollout-host is {config.rollout_host}, but --rollout-base-url names servers, where engines live "
            f"already; leave one of the two out"
        )
    if config.rollout_engine == "hf":
        raise ValueError(
            "--rollout-engine is hf, but --rollout-base-url names servers, which are vLLM's; give --rollout-engine "
            "vllm, or leave out --rollout-base-url"
        )
    if config.vllm_arg:
        raise ValueError(
            "--vllm-arg has no meaning with --rollout-base-url, whose servers have been started with arguments of "
            "their own; start them with these, or leave one of the two out"
        )


def _check_vllm_only(config: TrainConfig) -> None:
    names = ("vllm_arg", "rollout_gpu_memory_utilization")
    for name in names if config.rollout_engine == "hf" else ():
        if getattr(config, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} is for vllm, but --rollout-engine is hf here; leave it out, or give "
                f"--rollout-engine vllm"
            )
    check_engine_args(config.vllm_arg or {}, config.max_prompt_tokens + config.max_new_tokens)


def vllm_can_sample(config: TrainConfig) -> bool:
    """Whether vllm can say what the policy's logprobs were before top-p and top-k: at temperature 1 only."""
    return config.temperature == 1 or not _filters(config)


def _filters(config: TrainConfig) -> list[str]:
    return [name for name, on in (("--top-p", config.top_p < 1), ("--top-k", config.top_k > 0)) if on]


def _check_filters(config: TrainConfig) -> None:
    if config.rollout_engine == "vllm" and not vllm_can_sample(config):
        raise ValueError(
            f"{' and '.join(_filters(config))} with --temperature {config.temperature:g}: vllm cannot say what the "
            f"policy's logprobs were before these filters except at temperature 1; give --temperature 1, leave them "
            f"out, or give --rollout-engine hf"
        )


def _check_lockstep(config: TrainConfig) -> None:
    if config.async_sync_mode == "inflight":
        raise ValueError(
            "--async-sync-mode inflight does not go with --async-admission lockstep, which fixes the weights that "
            "generate each batch; give --async-sync-mode drain or --async-admission paced"
        )
    if config.on_engine_failure == "restart":
        raise ValueError(
            "--on-engine-failure restart does not go with --async-admission lockstep, which cannot lose a batch; give "
            "--on-engine-failure fail or --async-admission paced"
        )


def engine_warnings(config: TrainConfig) -> list[str]:
    """What is given and has no effect, in words."""
    found = []
    given = [name for name in ("rollout_devices", "rollout_tp_size") if config.base_urls and getattr(config, name)]
    if given:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        found.append(f"{flags}: left aside, since the servers of --rollout-base-url say where they run")
    on_gpu = any(device != "cpu" for group in config.rollout_groups for device in group)
    if config.rollout_gpu_memory_utilization is not None and (config.base_urls or not on_gpu):
        found.append("--rollout-gpu-memory-utilization: left aside, since this run starts no engine on a GPU")
    if config.async_span_policy != "keep" and config.async_sync_mode == "drain":
        found.append(
            f"--async-span-policy {config.async_span_policy}: without effect, since with --async-sync-mode drain one "
            f"version draws a whole sample"
        )
    default = type(config).model_fields["max_engine_restarts"].default
    if config.max_engine_restarts != default and config.on_engine_failure == "fail":
        found.append("--max-engine-restarts: without effect, since --on-engine-failure fail restarts no engine")
    return found


def memory_share(config: TrainConfig, devices: Sequence[str]) -> float | None:
    """Share of its GPUs' memory that an engine on these devices takes; None where it has none."""
    if all(device == "cpu" for device in devices):
        return None
    beside = not set(devices).isdisjoint(parse_devices("--train-devices", config.train_devices or ""))
    return config.rollout_gpu_memory_utilization or (0.4 if beside else 0.9)
