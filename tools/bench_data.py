"""What prompts and materialising cost: per 1,000 samples on their own, and as a share of a step of the tiny recipe.

    python tools/bench_data.py [--steps 60] [--repeats 5]

Encoding is paid once, before the run. The aim is less than 2 % of a step for prompt source and materialising together.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from datasets import Dataset

from fsm_trainer import TrainConfig
from fsm_trainer.algorithms.materialize import materialize
from fsm_trainer.core.events import InputKind, RecordKind
from fsm_trainer.data.prompts import PromptSource
from fsm_trainer.engines.tiny import char_tokenizer
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.presets import preset_settings
from fsm_trainer.trainers import build_trainer
from fsm_trainer.trainers.prepare import prepare

PROMPTS, SAMPLES, TOKENS = 16, 16, 5
"""The tiny recipe's batch."""
WARM_UP_STEPS = 10


def median_s(measure: Callable[[], None], repeats: int) -> float:
    """Median seconds of a call, the first left out."""
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        measure()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def source_costs(repeats: int, rows: int = 1600) -> tuple[float, float]:
    """Milliseconds to encode 1,000 prompts, and to serve those of 1,000 samples."""
    rng = random.Random(0)
    digits = [str(rng.randrange(1000, 10000)) for _ in range(rows)]
    data = Dataset.from_dict({"prompt": [f"{text}=" for text in digits], "solutions": [[text] for text in digits]})
    tokenizer = char_tokenizer()

    def make() -> PromptSource:
        return PromptSource(data, tokenizer, batch_size=PROMPTS, epochs=2, seed=0, max_prompt_tokens=16)

    encode_s = median_s(make, repeats)

    def serve() -> None:
        source, batch_id = sources.pop(), 0
        while source.batch(batch_id) is not None:
            source.settle(batch_id)
            batch_id += 1

    sources = [make() for _ in range(repeats + 1)]
    serve_s = median_s(serve, repeats)
    return encode_s * 1e3 / rows * 1000, serve_s * 1e3 / (2 * rows * SAMPLES) * 1000


def materialise_cost(repeats: int, tokens: int) -> float:
    """Milliseconds to materialise 1,000 samples of so many new tokens."""
    rng = random.Random(0)
    prompts = [tuple(range(5)) for _ in range(PROMPTS)]
    completion = (tuple(range(tokens)), tuple(-rng.random() for _ in range(tokens)))
    completions = [[completion] * SAMPLES for _ in range(PROMPTS)]
    rewards = [[rng.random() for _ in range(SAMPLES)] for _ in range(PROMPTS)]
    taken = median_s(lambda: materialize(prompts, completions, rewards, eos_token_id=2), repeats * 5)
    return taken * 1e3 / (PROMPTS * SAMPLES) * 1000


def shares_of_a_step(steps: int, folder: Path) -> tuple[float, float, float]:
    """Milliseconds a step of the tiny recipe takes, and what of it the prompt source and materialising take."""
    settings = {**preset_settings("quickstart"), "preset": "quickstart", "algo": "async-grpo"}
    settings.update(max_steps=steps, output_dir=str(folder / "run"), log_samples="none", progress="none")
    result = build_trainer(prepare(TrainConfig.build(settings))).fit()
    if result.outcome != "completed":
        raise SystemExit(f"the run to measure {result.message}")
    lines = [json.loads(text) for text in result.run.metrics.read_text().splitlines()]
    kept = lines[WARM_UP_STEPS:]
    step_s = (kept[-1]["time_s"] - lines[WARM_UP_STEPS - 1]["time_s"]) / len(kept)
    loads = [
        r.finished_ns - r.started_ns
        for r in records(read_log(result.run.path).table)
        if r.kind is RecordKind.INPUT and r.trigger == InputKind.LOADED.value and r.finished_ns and r.started_ns
    ]
    materialise_s = statistics.median(line["materialize_s"] for line in kept)
    return step_s * 1e3, statistics.median(loads) / 1e6, materialise_s * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps of the run (default: 60)")
    parser.add_argument("--repeats", type=int, default=5, help="repeats of every other measurement (default: 5)")
    args = parser.parse_args()
    if args.steps <= WARM_UP_STEPS + 1:
        parser.error(f"--steps is {args.steps}, expected more than {WARM_UP_STEPS + 1}")
    encode, serve = source_costs(args.repeats)
    print(f"encoding 1,000 prompts (once)        {encode:8.1f} ms")
    print(f"prompts of 1,000 samples             {serve:8.2f} ms")
    for tokens in (TOKENS, 1000):
        cost = materialise_cost(args.repeats, tokens)
        print(f"materialising 1,000 samples of {tokens:4d}  {cost:8.2f} ms")
    with tempfile.TemporaryDirectory() as folder:
        step, load, materialise = shares_of_a_step(args.steps, Path(folder))
    print(f"a step of the tiny recipe            {step:8.1f} ms")
    print(f"  its prompts                        {load:8.2f} ms   {load / step:6.2%}")
    print(f"  its materialising                  {materialise:8.2f} ms   {materialise / step:6.2%}")
    print(f"  together                           {load + materialise:8.2f} ms   {(load + materialise) / step:6.2%}")


if __name__ == "__main__":
    main()
