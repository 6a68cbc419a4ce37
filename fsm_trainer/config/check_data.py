"""The dataset's share of the checks before a run: does the path name something, and is there a batch in it.

Knows nothing of models, devices or rewards.
"""

from __future__ import annotations

from typing import Any

from fsm_trainer.config import hub
from fsm_trainer.config.errors import ConfigError, one_line
from fsm_trainer.config.objective_settings import spare_prompts
from fsm_trainer.config.train_config import TrainConfig
from fsm_trainer.data.datasets import (
    DATASET_FORMS,
    Rows,
    check_rows,
    is_local,
    load_training_rows,
    local_path,
    split_hub_name,
)
from fsm_trainer.data.prompts import PromptSource
from fsm_trainer.data.reasoning_gym import is_reasoning_gym, parse_spec
from fsm_trainer.data.tokenizer import takes_thinking


def check_dataset_path(dataset_path: str, *, has_loader: bool) -> bool:
    """Refuse a path that names nothing, without opening it; whether it needs the hub.

    A user's loader may take any text, so only what looks like one of our own forms is checked then.
    """
    if is_reasoning_gym(dataset_path):
        _refused_as_config(parse_spec, dataset_path)
        return False
    if is_local(dataset_path):
        if not local_path(dataset_path)[0].exists():
            raise ConfigError(f"--dataset-path {dataset_path} does not exist; give {DATASET_FORMS}")
        return False
    if has_loader and not hub.is_hub_name(dataset_path.split(":")[0]):
        return False
    name = _refused_as_config(split_hub_name, dataset_path)[0]
    if not hub.is_hub_name(name):
        raise ConfigError(f"--dataset-path {dataset_path} does not exist; give {DATASET_FORMS}")
    return True


def _refused_as_config(parse: Any, text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(one_line(error)) from error


def open_prompts(config: TrainConfig, tokenizer: Any, dataset: Rows | None) -> tuple[Rows, PromptSource]:
    """The rows and the prompt source of a run; `dataset` stands in for the configuration's path."""
    if dataset is None:
        name = config.dataset_loader_fn or str(config.dataset_path)
        dataset = load_training_rows(str(config.dataset_path), config.dataset_loader_fn)
    else:
        name = "given as an object"
        check_rows(dataset, name)
    source = PromptSource(
        dataset,
        tokenizer,
        batch_size=config.batch_size,
        spare=spare_prompts(config),
        epochs=config.epochs,
        seed=config.seed,
        max_prompt_tokens=config.max_prompt_tokens,
        overlong=config.overlong_prompts,
        shuffle=config.shuffle,
        drop_last=config.drop_last,
        max_attempts=config.max_prompt_attempts,
        thinking=not config.disable_thinking,
        may_come_back=config.prompts_may_come_back,
        name=name,
    )
    return dataset, source


def data_warnings(config: TrainConfig, prompts: PromptSource, tokenizer: Any) -> list[str]:
    """What will be left out or has no effect, in words."""
    found = []
    if prompts.overlong_rows:
        found.append(
            f"{prompts.overlong_rows} of {prompts.dataset_rows} prompts have more than --max-prompt-tokens "
            f"{config.max_prompt_tokens} tokens and are left out"
        )
    if prompts.dropped_rows_per_epoch:
        found.append(
            f"{prompts.dropped_rows_per_epoch} of {prompts.usable_rows} rows fill no whole batch and are left out of "
            f"each epoch, {'different ones each time' if config.shuffle else 'always the last ones'}; --no-drop-last "
            f"makes a smaller batch of them"
        )
    if config.disable_thinking and not takes_thinking(tokenizer):
        found.append("--disable-thinking changes nothing: the tokenizer's chat template has no enable_thinking")
    return found
