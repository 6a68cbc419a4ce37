"""What another system calls a setting leads to ours, spelt as where it stood."""

from __future__ import annotations

import re

import pytest

from fsm_trainer.cli.flags import parse
from fsm_trainer.config.errors import ConfigError
from fsm_trainer.config.other_words import OTHER_WORDS, meaning_here
from fsm_trainer.config.train_config import TrainConfig
from fsm_trainer.config.yaml_file import read_config_file


def test_every_setting_named_is_there_and_no_word_is_ours() -> None:
    named = {name for text in OTHER_WORDS.values() for name in re.findall(r"\{(\w+)\}", text)}
    assert named - set(TrainConfig.model_fields) == set()
    assert [name for name in TrainConfig.model_fields if meaning_here(name) is not None] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num-generations 8", "unknown flag --num-generations; here it is --n-samples"),
        ("--num_generations=8", "unknown flag --num_generations; here it is --n-samples"),
        ("--beta 0.04", "unknown flag --beta; here it is --kl-coef"),
        ("--learning-rate 1e-6", "unknown flag --learning-rate; here it is --lr"),
        ("--world-size 1", "unknown flag --world-size; the devices say it: --train-devices"),
        ("--eval-steps 10", "unknown flag --eval-steps; this version evaluates nothing while it trains"),
        ("--actor.clip_ratio_high 0.3", "unknown flag --actor.clip_ratio_high; here it is --clip-eps-high"),
        ("actor_rollout_ref.rollout.n=8", "'actor_rollout_ref.rollout.n=8'; here it is --n-samples; every setting"),
    ],
)
def test_flags(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(arguments.split())


def test_a_file_and_python_say_it_in_their_spelling(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("max_completion_length: 4\n")
    with pytest.raises(ConfigError, match=re.escape("(value 4) in run.yaml; here it is max-new-tokens")):
        read_config_file("run.yaml")
    with pytest.raises(ConfigError, match="unknown setting 'max_completion_length'; here it is max_new_tokens"):
        TrainConfig.build({"max_completion_length": 4})
