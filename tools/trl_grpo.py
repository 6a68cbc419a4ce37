"""The quickstart's task under TRL's GRPOTrainer. Run by `bench_vs_trl.py`, in TRL's own environment.

    .venv-trl/bin/python tools/trl_grpo.py MODEL_FOLDER DATA.jsonl SETTINGS.json

Prints one JSON line: seconds of each step, the mean reward of each, the peak resident memory. Knows nothing of
fsm_trainer: the shapes and the optimiser's settings come in SETTINGS.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """Notes the time after each optimiser step."""

    def __init__(self) -> None:
        """Nothing has run."""
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first step begins."""
        self.times.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step has ended."""
        self.times.append(time.perf_counter())


def copy_reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of positions that match, over the longer of the two texts: the quickstart's reward."""
    pairs = zip(completions, answer, strict=True)
    return [
        sum(a == b for a, b in zip(text, right, strict=False)) / max(len(text), len(right)) for text, right in pairs
    ]


def grpo_config(settings: dict[str, Any], folder: str) -> GRPOConfig:
    """The same shapes and the same optimiser; the token mean over the batch is TRL's `dapo`."""
    rows = settings["batch_size"] * settings["n_samples"]
    return GRPOConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        per_device_train_batch_size=rows,
        num_generations=settings["n_samples"],
        max_completion_length=settings["max_new_tokens"],
        max_steps=settings["max_steps"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta1=settings["adam_beta1"],
        adam_beta2=settings["adam_beta2"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["grad_clip_norm"],
        epsilon=settings["grpo_clip_eps"],
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        gradient_checkpointing=False,
        seed=settings["seed"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train and print what was measured."""
    model_folder, data, settings = sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())
    torch.set_num_threads(settings["threads"])
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": row["prompt"], "answer": row["solutions"][0]} for row in rows])
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32"),
            reward_funcs=copy_reward,
            args=grpo_config(settings, folder),
            train_dataset=dataset,
            processing_class=AutoTokenizer.from_pretrained(model_folder),
            callbacks=[clock],
        )
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"step_s": steps, "reward": rewards, "peak_mb": peak_mb}))


if __name__ == "__main__":
    main()
