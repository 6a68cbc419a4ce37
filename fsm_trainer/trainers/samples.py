"""Keeps every sample of a batch for people to read: one Parquet file a prompt batch in the run's `samples/`."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fsm_trainer.core.batch import AsyncTrainBatch
from fsm_trainer.data.prompts import PromptBatch
from fsm_trainer.engines.base import Rollout

SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("batch_id", pa.int64()),
        pa.field("epoch", pa.int64()),
        pa.field("row", pa.int64(), metadata={"meaning": "row of the dataset, from 0"}),
        pa.field("sample", pa.int64(), metadata={"meaning": "completion of the prompt group, from 0"}),
        pa.field("prompt", pa.utf8()),
        pa.field("completion", pa.utf8()),
        pa.field("tokens", pa.list_(pa.int64()), metadata={"meaning": "token ids of prompt and completion"}),
        pa.field("logprobs", pa.list_(pa.float64()), metadata={"meaning": "aligned with tokens, 0 on the prompt"}),
        pa.field("reward", pa.float64()),
        pa.field("advantage", pa.float64()),
        pa.field("finish_reason", pa.utf8()),
        pa.field("rollout_version_first", pa.int64()),
        pa.field("rollout_version_last", pa.int64()),
    ]
)


def write_samples(
    folder: Path, prompts: PromptBatch, rollout: Rollout, completions: list[str], batch: AsyncTrainBatch
) -> Path:
    """Write one batch's samples, whole or not at all; returns the file."""
    path = folder / f"batch-{batch.prompt_batch_id:06d}.parquet"
    samples = [s for group in rollout.groups for s in group]
    per_prompt = [len(group) for group in rollout.groups]
    sequences = batch.train_sequences
    columns = {
        "batch_id": [batch.prompt_batch_id] * len(samples),
        "epoch": [batch.epoch] * len(samples),
        "row": _spread(prompts.row_indices, per_prompt),
        "sample": [i for n in per_prompt for i in range(n)],
        "prompt": _spread(prompts.prompt_texts, per_prompt),
        "completion": completions,
        "tokens": [s.tokens for s in sequences],
        "logprobs": [s.logprobs for s in sequences],
        "reward": [s.reward for s in sequences],
        "advantage": [s.advantage for s in sequences],
        "finish_reason": [s.finish_reason for s in samples],
        "rollout_version_first": [rollout.version_first] * len(samples),
        "rollout_version_last": [rollout.version_last] * len(samples),
    }
    partial = path.with_suffix(".partial")
    pq.write_table(pa.table(columns, schema=SAMPLE_SCHEMA), partial, compression="zstd")
    partial.rename(path)
    return path


def _spread(values: tuple[object, ...], counts: list[int]) -> list[object]:
    """Repeat each prompt's value for each of its samples."""
    return [value for value, n in zip(values, counts, strict=True) for _ in range(n)]
