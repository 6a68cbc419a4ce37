"""Whole runs with the step's settings: adapters from trainer to engine to checkpoint, budgets, skipped steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fsm_trainer import AsyncPolicyTrainer
from fsm_trainer.config import TrainConfig
from fsm_trainer.trainers import RunResult
from tests.trainers.helpers import ROWS, metrics_of, varied_reward

Make = Callable[..., TrainConfig]


def fit(config: TrainConfig) -> RunResult:
    result = AsyncPolicyTrainer(config, reward_fn=varied_reward, dataset=ROWS).fit()
    assert result.exit_code == 0, result.message
    return result


def test_adapters_are_trained_served_and_saved(make_config: Make, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # peft's progress bar, when this test loads the adapters, would start a thread.
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    budget: dict[str, Any] = {"max_tokens_per_micro_batch": 30, "sequence_packing": "on"}
    config = make_config(lora_rank=2, lora_alpha=8, lr=1e-2, kl_coef=0.01, gradient_checkpointing=True, **budget)
    result = fit(config)
    lines = metrics_of(result.run.path)
    fresh = [line for line in lines if line["staleness_max"] == 0]
    assert fresh[0]["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert lines[-1]["kl"] > 0, "the policy has moved from the base model"
    checkpoint = result.run.checkpoint(4)
    assert not list(checkpoint.glob("model*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([[5, 6, 14]])
    before = base(ids).logits
    merged = PeftModel.from_pretrained(base, str(checkpoint)).merge_and_unload()
    assert not torch.equal(merged(ids).logits, before)


def test_a_layer_that_is_not_there_is_refused_with_the_names(make_config: Make) -> None:
    config = make_config(lora_rank=2, lora_target_modules="q_proj, c_attn")
    with pytest.raises(
        ValueError, match=r"names 'c_attn', which matches no layer of the Qwen3ForCausalLM; it has .*q_proj"
    ):
        fit(config)
    assert not Path(str(config.output_dir)).exists()
