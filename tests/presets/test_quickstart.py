"""The quickstart's files: made locally, fixed by the seed, and the user's own paths kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsm_trainer.cli.flags import parse
from fsm_trainer.config import TrainConfig
from fsm_trainer.presets import prepare_preset, preset_config, preset_settings
from fsm_trainer.presets.quickstart import ROWS, copy_rows


def test_settings_are_the_measured_recipe() -> None:
    config = TrainConfig(**preset_settings("quickstart"))
    assert (config.algo, config.batch_size, config.n_samples, config.max_new_tokens) == ("async-grpo", 16, 16, 5)
    assert (config.lr, config.lr_decay_style, config.weight_decay) == (2e-3, "cosine", 0.0)
    assert (config.adam_beta1, config.adam_beta2, config.grad_clip_norm) == (0.9, 0.95, 1.0)
    assert (config.grpo_clip_eps, config.entropy_coef, config.temperature) == (0.2, 0.05, 1.0)
    assert config.mini_bs == config.rows_per_batch


def test_from_python_as_from_the_command_line() -> None:
    argv = ["--preset", "quickstart", "--seed", "3", "--lr", "0.001"]
    assert preset_config("quickstart", seed=3, lr=0.001) == parse(argv).config
    with pytest.raises(ValueError, match="^preset is 'slow', expected one of quickstart$"):
        preset_config("slow")


def test_data_is_fixed_by_the_seed() -> None:
    rows = copy_rows(50, seed=3)
    assert rows == copy_rows(50, seed=3)
    assert rows != copy_rows(50, seed=4)
    for row in rows:
        (digits,) = row["solutions"]
        assert len(digits) == 4
        assert digits.isdigit()
        assert row["prompt"] == f"{digits}="


def test_files(tmp_path: Path) -> None:
    config = prepare_preset(TrainConfig(preset="quickstart"), tmp_path / "preset")
    assert config.ckpt == str(tmp_path / "preset" / "model")
    assert (tmp_path / "preset" / "model" / "config.json").is_file()
    assert config.dataset_path is not None
    lines = Path(config.dataset_path).read_text().splitlines()
    assert [json.loads(line) for line in lines] == copy_rows(ROWS, seed=0)


def test_given_paths_are_kept(tmp_path: Path) -> None:
    given = TrainConfig(preset="quickstart", ckpt="mine", dataset_path="my.jsonl")
    config = prepare_preset(given, tmp_path / "preset")
    assert (config.ckpt, config.dataset_path) == ("mine", "my.jsonl")
    assert [path.name for path in (tmp_path / "preset").iterdir()] == ["reward.py"]


def test_no_preset_writes_nothing(tmp_path: Path) -> None:
    config = TrainConfig(ckpt="mine")
    assert prepare_preset(config, tmp_path / "preset") is config
    assert list(tmp_path.iterdir()) == []
