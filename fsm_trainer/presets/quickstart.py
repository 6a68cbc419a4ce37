"""The quickstart: a tiny model learns to copy four digits, `4821=` -> `4821`, in about half a minute on one core.

Model, tokenizer, data and reward are made locally; nothing is downloaded. It knows nothing of the run besides the
folder it writes to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROWS = 512
DIGITS = 4

SETTINGS: dict[str, Any] = {
    "algo": "async-grpo",
    "batch_size": 16,
    "n_samples": 16,
    "max_prompt_tokens": 8,
    "max_new_tokens": DIGITS + 1,
    "mini_bs": 256,
    "lr": 2e-3,
    # At a constant rate and less entropy some seeds stall or break late; these settings learn on every seed tried.
    "lr_decay_style": "cosine",
    "lr_decay_steps": 250,
    "min_lr": 1e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "grad_clip_norm": 1.0,
    "grpo_clip_eps": 0.2,
    "entropy_coef": 0.05,
    "max_steps": 250,
    "epochs": 100,
    "threads": 1,
    # The reward is a line of arithmetic that cannot hang: sending it to a process would cost more than it does.
    "reward_executor": "thread",
}

REWARD = '''"""Reward of the copy task: the share of positions that match, over the longer of the two texts."""


def reward_fn(record):
    """1.0 for the exact answer, less for each wrong, missing or surplus character."""
    longest = max(len(record.answer), len(record.completion))
    hits = sum(a == b for a, b in zip(record.answer, record.completion))
    return hits / longest
'''


def copy_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of random digits with the digits themselves as solution."""
    draw = random.Random(seed)
    texts = ["".join(draw.choice("0123456789") for _ in range(DIGITS)) for _ in range(count)]
    return [{"prompt": f"{text}=", "solutions": [text]} for text in texts]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars: writing this model takes no time."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def write_files(folder: Path, *, seed: int, keep: frozenset[str] = frozenset()) -> dict[str, str]:
    """Write model, data and reward below `folder`, except the settings named in `keep`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, str] = {}
    if "ckpt" not in keep:
        # Builds with torch: imported here so that `--help` stays quick.
        from fsm_trainer.engines.tiny import build_tiny_checkpoint

        with _quiet():
            build_tiny_checkpoint(folder / "model", seed=seed)
        made["ckpt"] = str(folder / "model")
    if "dataset_path" not in keep:
        lines = [json.dumps(row) for row in copy_rows(ROWS, seed)]
        (folder / "data.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        made["dataset_path"] = str(folder / "data.jsonl")
    if "reward_fn_path" not in keep:
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        made["reward_fn_path"] = str(folder / "reward.py")
    return made
