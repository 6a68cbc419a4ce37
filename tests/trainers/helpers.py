"""Data, rewards and hand-made batches of the tests in this room."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsm_trainer.core.batch import AsyncTrainBatch, TrainSequence
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.data.prompts import PromptBatch
from fsm_trainer.data.rewards import RewardRecord
from fsm_trainer.engines.base import Rollout, Sample, VersionSpan
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.replay.verify import verify

ROWS = [{"prompt": f"{i:03d}=", "solutions": [f"{i:03d}"]} for i in range(40)]

DOCUMENTED = (
    *("step", "train_version", "reward_mean", "loss", "grad_norm", "ratio_mean", "staleness_mean", "staleness_max"),
    *("queue_len", "rollout_s", "reward_s", "train_s", "sync_s", "wait_s", "tokens"),
)
"""Keys that every line of metrics.jsonl has."""


def varied_reward(record: RewardRecord) -> float:
    """Differs between almost any two completions."""
    return sum(record.tokens[-4:]) % 11 / 10


def prompt_batch() -> PromptBatch:
    """Two prompts of different lengths: `12=` and `4=`, as build_tiny_checkpoint's tokenizer encodes them."""
    rows = ({"prompt": "12=", "solutions": ["12"]}, {"prompt": "4=", "solutions": ["4"]})
    return PromptBatch(
        batch_id=7,
        epoch=2,
        row_indices=(5, 3),
        rows=rows,
        prompt_texts=("12=", "4="),
        prompt_tokens=((5, 6, 14), (8, 14)),
    )


def rollout() -> Rollout:
    """Two completions of each prompt of `prompt_batch`, all different; 2 is <eos>."""
    groups = (
        (Sample((5, 6, 2), (-0.1, -0.2, -0.3), "stop"), Sample((9, 9), (-1.1, -1.2), "length")),
        (Sample((8, 2), (-2.1, -2.2), "stop"), Sample((4, 5, 6, 7), (-3.1, -3.2, -3.3, -3.4), "length")),
    )
    return Rollout(groups, version_first=3, version_last=4)


def mixed_rollout() -> Rollout:
    """The same, but weights were loaded while its first and its last completion were drawn."""
    (first, second), (third, last) = rollout().groups
    first = replace(first, spans=(VersionSpan(3, 2), VersionSpan(4, 1)))
    last = replace(last, spans=(VersionSpan(3, 1), VersionSpan(4, 3)))
    return replace(rollout(), groups=((first, second), (third, last)))


def sequence(*, advantage: float = 1.0, tokens: tuple[int, ...] = (5, 6, 14, 5, 6)) -> TrainSequence:
    """One sequence with two tokens to learn from."""
    n = len(tokens)
    return TrainSequence(
        tokens=tokens,
        logprobs=(0.0,) * (n - 2) + (-3.4, -3.4),
        prompt_len=n - 2,
        loss_mask=(0,) * (n - 2) + (1, 1),
        advantage=advantage,
        reward=advantage,
        eos_token_id=2,
    )


def train_batch(batch_id: int, version: int, **changes: Any) -> AsyncTrainBatch:
    """What a producer outside the run might put into its queue."""
    sequences = (sequence(advantage=1.0), sequence(advantage=-1.0, tokens=(7, 8, 14, 9, 4)))
    values: dict[str, Any] = {
        "train_sequences": sequences,
        "rollout_policy_version": version,
        "epoch": 0,
        "prompt_batch_id": batch_id,
        "prompt_count": 1,
        "sequence_count": len(sequences),
        "token_count": sum(len(s.tokens) for s in sequences),
        "reward_mean": 0.5,
        "rollout_time_s": 0.25,
        "reward_time_s": 0.125,
        "materialize_time_s": 0.0625,
        "created_at_s": 1.0,
    }
    return AsyncTrainBatch(**{**values, **changes})


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a number that is no JSON is an error."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def log_of(run: Path) -> list[Record]:
    """The log's rows, after verifying every decision in them."""
    result = verify(run)
    assert result.ok, result.divergence
    assert result.complete
    assert result.decisions > 0
    return list(records(read_log(run).table))


def run_end(run: Path) -> Record:
    """The last row, which says how the run ended."""
    last = log_of(run)[-1]
    assert last.kind is RecordKind.RUN_END
    return last


def rewards_in_order(run: Path) -> list[float]:
    """Mean reward of each step."""
    return [line["reward_mean"] for line in metrics_of(run)]
