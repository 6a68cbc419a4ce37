"""Settings of the step: what goes together, and what the machine must have for it."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.cli.train import main
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.check_step import check_step_needs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"max_tokens_per_micro_batch": 100, "max_prompt_tokens": 90, "max_new_tokens": 20},
            "--max-tokens-per-micro-batch is 100, but --max-prompt-tokens 90 and --max-new-tokens 20 allow a sequence "
            "of 110; give at least that",
        ),
        (
            {"max_tokens_per_micro_batch": 4096, "gradient_accumulation_steps": 100},
            "--gradient-accumulation-steps counts micro-batches of --mini-bs sequences and has no meaning with "
            "--max-tokens-per-micro-batch; leave it out",
        ),
        ({"lora_alpha": 8}, "--lora-alpha has no meaning without --lora-rank; give both or neither"),
        (
            {"lora_target_modules": "q_proj"},
            "--lora-target-modules has no meaning without --lora-rank; give both or neither",
        ),
        (
            {"lora_rank": 8, "lora_target_modules": "q_proj,"},
            "--lora-target-modules is q_proj,, expected names of layers with commas between, such as q_proj,v_proj",
        ),
        ({"lora_rank": 0}, "--lora-rank is 0, expected at least 1"),
        ({"dtype": "float16"}, "--dtype is float16, expected one of float32, bfloat16"),
        ({"nonfinite": "ignore"}, "--nonfinite is ignore, expected one of error, skip"),
        ({"optimizer": "sgd"}, "--optimizer is sgd, expected one of adamw, adamw-8bit"),
        ({"sequence_packing": "yes"}, "--sequence-packing is yes, expected one of auto, on, off"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.build(values)
    assert str(caught.value) == message


def test_a_budget_stands_for_the_number_of_sequences() -> None:
    config = TrainConfig.build({"max_tokens_per_micro_batch": 2048})
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("values", "library", "message"),
    [
        ({"lora_rank": 8}, "peft", "--lora-rank needs the extra lora: pip install 'fsm-trainer[lora]'"),
        (
            {"optimizer": "adamw-8bit"},
            "bitsandbytes",
            "--optimizer adamw-8bit needs the extra bitsandbytes: pip install 'fsm-trainer[bitsandbytes]'",
        ),
    ],
)
def test_an_extra_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], library: str, message: str
) -> None:
    there = True
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if there or name != library else None)
    check_step_needs(TrainConfig.build(values))
    there = False
    check_step_needs(TrainConfig.build({}))
    with pytest.raises(ConfigError) as caught:
        check_step_needs(TrainConfig.build(values))
    assert str(caught.value) == message


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    check_step_needs(TrainConfig.build({"torch_compile": True, "train_devices": "0"}))
    with pytest.raises(ConfigError, match="needs a C\\+\\+ compiler, and g\\+\\+ is not there"):
        check_step_needs(TrainConfig.build({"torch_compile": True, "train_devices": "cpu"}))


EOS = {"config.json": "eos_token_id", "tokenizer_config.json": "eos_token", "generation_config.json": "eos_token_id"}


def named_only_in(model: Path, folder: Path, where: str | None) -> Path:
    """A copy of the model whose EOS token stands in one file, or in none."""
    shutil.copytree(model, folder)
    for name, key in EOS.items():
        values = json.loads((folder / name).read_text())
        if name != where:
            del values[key]
        (folder / name).write_text(json.dumps(values))
    return folder


def test_a_checkpoint_needs_a_token_that_ends_a_completion(
    refused: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    folder = named_only_in(model, tmp_path / "model", None)
    assert refused(ckpt=str(folder)) == (
        f"--ckpt {folder} names no EOS token; give its tokenizer an eos_token, or config.json an eos_token_id"
    )
    (folder / "generation_config.json").write_text("{")
    assert "its generation_config.json cannot be read" in refused(ckpt=str(folder))
    (folder / "generation_config.json").write_text("[]")
    assert "names no EOS token" in refused(ckpt=str(folder))


def test_adapters_larger_than_their_layers_are_refused(refused: Callable[..., str], model: Path) -> None:
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    assert refused(lora_rank=str(width + 1)).startswith(
        f"--lora-rank is {width + 1}, but the model's layers are {width} wide"
    )


@pytest.mark.parametrize("where", EOS)
def test_any_file_may_name_it(inputs: dict[str, str], model: Path, tmp_path: Path, where: str) -> None:
    flags = {**inputs, "--ckpt": str(named_only_in(model, tmp_path / "model", where))}
    assert main([*(part for pair in flags.items() for part in pair), "--dry-run"]) == 0
