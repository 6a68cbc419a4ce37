"""The engines a configuration asks for get the settings it names."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch

from fsm_trainer.algorithms.losses import policy_loss
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.resolve import resolve
from fsm_trainer.engines import hf_train
from fsm_trainer.engines.base import SamplingParams
from fsm_trainer.engines.hf_lora import LoraSettings
from fsm_trainer.engines.hf_rollout import HFRolloutEngine
from fsm_trainer.engines.vllm_local import vllm_engine
from fsm_trainer.engines.vllm_server import vllm_server_engine
from fsm_trainer.engines.weight_sync.directory import DirectoryTransport
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.runtime.host import InlineHost, ProcessHost
from fsm_trainer.trainers.engines import (
    engine_words,
    lora_settings,
    make_rollout_host,
    make_train_engine,
    make_weight_transport,
    rollout_engine_factory,
    sampling_params,
    transport_of,
)

TRAIN_SETTINGS = {
    "lr": 0.5,
    "adam_beta1": 0.8,
    "adam_beta2": 0.7,
    "weight_decay": 0.6,
    "lr_decay_style": "linear",
    "lr_warmup_steps": 3,
    "lr_decay_steps": 50,
    "min_lr": 0.01,
    "grad_clip_norm": 0.3,
    "mini_bs": 7,
    "gradient_accumulation_steps": 5,
    "sequence_packing": "off",
    "gradient_checkpointing": True,
    "torch_compile": True,
    "optimizer": "adamw-8bit",
    "nonfinite": "skip",
    "lora_rank": 3,
    "lora_target_modules": "q_proj, v_proj",
    "temperature": 0.9,
    "grpo_clip_eps": 0.11,
    "gspo_clip_eps": 0.0022,
    "entropy_coef": 0.02,
    "kl_coef": 0.03,
    "reference_refresh_steps": 8,
    "dtype": "bfloat16",
    "threads": 2,
    "seed": 13,
}


@pytest.mark.parametrize(
    ("algo", "objective"),
    [
        ("grpo", Objective(clip_low=0.11, clip_high=0.11, entropy_coef=0.02, kl_coef=0.03, constant_length=4)),
        (
            "async-gspo",
            Objective(
                "sequence", "clip", 0.0022, 0.0022, "sequence-mean", entropy_coef=0.02, kl_coef=0.03, constant_length=4
            ),
        ),
    ],
)
def test_the_train_engine_gets_every_setting(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch, algo: str, objective: Objective
) -> None:
    got: dict[str, Any] = {}
    monkeypatch.setattr(hf_train, "HFTrainEngine", lambda ckpt, **settings: got.update(ckpt=ckpt, **settings))
    config = make_config(algo=algo, **TRAIN_SETTINGS)
    transport = SharedMemoryTransport()
    make_train_engine(config, transport)
    assert got == {
        "transport": transport,
        "ckpt": config.ckpt,
        "objective": objective,
        "loss": policy_loss,
        "reference_refresh_steps": 8,
        "lr": 0.5,
        "betas": (0.8, 0.7),
        "weight_decay": 0.6,
        "lr_decay_style": "linear",
        "warmup": 3,
        "lr_decay_steps": 50,
        "min_lr": 0.01,
        "grad_clip_norm": 0.3,
        "mini_bs": 7,
        "max_tokens_per_micro_batch": None,
        "gradient_accumulation_steps": 5,
        "sequence_packing": "off",
        "gradient_checkpointing": True,
        "torch_compile": True,
        "optimizer": "adamw-8bit",
        "nonfinite": "skip",
        "lora": LoraSettings(3, 6, ("q_proj", "v_proj")),
        "temperature": 0.9,
        "device": "cpu",
        "dtype": "bfloat16",
        "threads": 2,
        "seed": 13,
    }


def test_sampling(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config(n_samples=5, max_new_tokens=9, temperature=0.7, top_p=0.8, top_k=12)
    assert sampling_params(config) == SamplingParams(5, 9, 0.7, 0.8, 12)


def test_the_rollout_engine_can_be_made_elsewhere(make_config: Callable[..., TrainConfig]) -> None:
    config = make_config(dtype="bfloat16", threads=3, lora_rank=4, lora_alpha=5)
    factory = pickle.loads(pickle.dumps(rollout_engine_factory(config, 0)))
    assert factory.func is HFRolloutEngine
    assert factory.args == (config.ckpt, sampling_params(config))
    lora = LoraSettings(4, 5, ("all-linear",))
    assert factory.keywords == {"device": "cpu", "dtype": "bfloat16", "threads": 3, "lora": lora}


def test_without_a_rank_all_weights_are_trained(make_config: Callable[..., TrainConfig]) -> None:
    assert lora_settings(make_config()) is None


def test_the_process_of_an_engine_imports_no_trainer(make_config: Callable[..., TrainConfig]) -> None:
    factory = pickle.dumps(rollout_engine_factory(make_config(), 0))
    code = "import pickle, sys; pickle.load(sys.stdin.buffer); print('fsm_trainer.trainers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], input=factory, capture_output=True, check=True, timeout=120)
    assert done.stdout.split() == [b"False"]


def test_the_host_is_the_configured_one(make_config: Callable[..., TrainConfig]) -> None:
    inline = make_rollout_host(make_config(), 0)
    process = make_rollout_host(make_config(rollout_host="process"), 0)
    try:
        assert isinstance(inline, InlineHost)
        assert isinstance(process, ProcessHost)
        assert (inline.name, process.name) == ("engine-0", "engine-0")
    finally:
        inline.close(30)
        process.kill()


def on_vllm(make_config: Callable[..., TrainConfig], **changes: Any) -> TrainConfig:
    """A resolved configuration of vllm engines on a machine with four GPUs and no vLLM."""
    given = {"rollout_engine": "vllm", "rollout_host": "process", "train_devices": "0", **changes}
    return resolve(make_config(**given), 4)


def test_a_vllm_engine_gets_every_setting(make_config: Callable[..., TrainConfig]) -> None:
    config = on_vllm(
        make_config,
        rollout_devices="1..3,0",
        rollout_tp_size=2,
        dtype="bfloat16",
        seed=13,
        vllm_arg=["max-model-len=20", "enforce-eager=true"],
        policy_sync_transport="shared-memory",
    )
    factories = [pickle.loads(pickle.dumps(rollout_engine_factory(config, engine))) for engine in range(2)]
    assert [factory.func for factory in factories] == [vllm_engine] * 2
    assert factories[0].args == (config.ckpt, sampling_params(config))
    assert factories[0].keywords == {
        "devices": ("cuda:1", "cuda:2"),
        "dtype": "bfloat16",
        "max_model_len": 20,
        "memory_utilization": 0.9,
        "threads": 1,
        "seed": 13,
        "transport": "shared-memory",
        "keep_cache": False,
        "engine_args": {"enforce_eager": True},
    }
    other = factories[1].keywords
    assert (other["devices"], other["memory_utilization"]) == (("cuda:3", "cuda:0"), 0.4)
    assert config.vllm_arg is not None and "max_model_len" in config.vllm_arg, "the configuration is as it was"


def test_the_longest_request_is_that_of_the_run(make_config: Callable[..., TrainConfig]) -> None:
    factory: Any = rollout_engine_factory(on_vllm(make_config, max_prompt_tokens=7, max_new_tokens=5), 0)
    assert factory.keywords["max_model_len"] == 12
    assert factory.keywords["engine_args"] == {}


def test_an_engine_for_each_server(make_config: Callable[..., TrainConfig]) -> None:
    config = resolve(make_config(rollout_host="server", rollout_base_url="http://a:1,http://b:2"), 0)
    factory: Any = rollout_engine_factory(config, 1)
    assert factory.func is vllm_server_engine
    assert factory.args == ("http://b:2", config.ckpt, sampling_params(config))
    told = factory.keywords.pop("warn")
    assert factory.keywords == {
        "dtype": "float32",
        "max_model_len": 12,
        "keep_cache": False,
        "start_timeout_s": 540.0,
    }
    with structlog.testing.capture_logs() as logs:
        told("server_awaited", "it is not up")
    assert logs == [{"event": "server_awaited", "log_level": "warning", "engine": 1, "message": "it is not up"}]
    assert engine_words(config, 1) == "vllm server http://b:2"
    without_limit: Any = rollout_engine_factory(config.model_copy(update={"start_timeout_s": 0.0}), 0)
    assert without_limit.keywords["start_timeout_s"] == float("inf")


@pytest.mark.parametrize("base_url", [None, "http://a:1"])
@pytest.mark.parametrize("kept", ["recompute", "keep"])
def test_vllm_keeps_caches_in_flight_if_asked_to(
    make_config: Callable[..., TrainConfig], kept: str, base_url: str | None
) -> None:
    where = {"rollout_host": "process" if base_url is None else "server", "rollout_base_url": base_url}
    config = on_vllm(make_config, algo="async-grpo", async_sync_mode="inflight", async_inflight_cache=kept, **where)
    engine: Any = rollout_engine_factory(config, 0)()
    assert engine._keep_cache == (kept == "keep")


def test_engines_in_words(make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = version("transformers")
    assert engine_words(resolve(make_config(), 0), 0) == f"hf (transformers {transformers}) on cpu in this process"
    monkeypatch.setattr("fsm_trainer.trainers.engines.check_vllm", lambda: "0.33.0")
    config = on_vllm(make_config, rollout_devices="1,2", rollout_tp_size=2)
    assert engine_words(config, 0) == "vllm (0.33.0) on cuda:1, cuda:2 in its own process"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train_devices": "cpu", "rollout_engine": "hf"}, "shared-memory"),
        ({}, "cuda-ipc"),
        ({"rollout_devices": "1,2"}, "nccl"),
        ({"rollout_devices": "0,1"}, "shared-memory"),
        ({"rollout_devices": "cpu"}, "shared-memory"),
        ({"rollout_devices": "1", "rollout_host": "inline"}, "shared-memory"),
        ({"rollout_host": "server", "rollout_base_url": "http://localhost:1,http://127.0.0.1:2"}, "shared-memory"),
        ({"rollout_host": "server", "rollout_base_url": "http://localhost:1,http://node7:2"}, "directory"),
    ],
)
def test_the_transport_that_auto_means(
    make_config: Callable[..., TrainConfig], changes: dict[str, Any], expected: str
) -> None:
    assert transport_of(on_vllm(make_config, **changes)) == expected


def test_a_transport_that_cannot_be(make_config: Callable[..., TrainConfig]) -> None:
    with pytest.raises(ConfigError, match=r"^--policy-sync-transport nccl needs ") as caught:
        transport_of(on_vllm(make_config, train_devices="cpu", policy_sync_transport="nccl"))
    assert "\n" not in str(caught.value)


def test_weights_in_a_folder_lie_in_the_runs(make_config: Callable[..., TrainConfig], tmp_path: Path) -> None:
    transport = make_weight_transport(resolve(make_config(policy_sync_transport="directory"), 0))
    assert isinstance(transport, DirectoryTransport)
    snapshot = transport.publish([("weight", torch.ones(3))], 5)
    assert Path(snapshot.location).is_relative_to(tmp_path / "run" / "weights")
    transport.close()
