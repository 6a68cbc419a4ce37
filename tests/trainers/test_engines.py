"""The engines a configuration asks for get the settings it names."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from fsm_trainer.algorithms.losses import policy_loss
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.config import TrainConfig
from fsm_trainer.engines import hf_train
from fsm_trainer.engines.base import SamplingParams
from fsm_trainer.engines.hf_lora import LoraSettings
from fsm_trainer.engines.hf_rollout import HFRolloutEngine
from fsm_trainer.runtime.host import InlineHost, ProcessHost
from fsm_trainer.trainers.engines import (
    lora_settings,
    make_rollout_host,
    make_train_engine,
    rollout_engine_factory,
    sampling_params,
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
    make_train_engine(config)
    assert got == {
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
