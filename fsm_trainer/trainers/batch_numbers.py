"""What a train step says about its batch: lengths, truncation, speed, and the gaps between logprobs.

Rates come as numerator and denominator, so that they can be averaged over steps without bias.
"""

from __future__ import annotations

import math

from fsm_trainer.core.batch import AsyncTrainBatch
from fsm_trainer.trainers.operations import BatchWork
from fsm_trainer.trainers.scoring_rates import Rates, advantage_rates


def quotient(rate: tuple[float, float]) -> float:
    """The value of a rate; not a number over nothing."""
    numerator, denominator = rate
    return numerator / denominator if denominator else math.nan


def batch_rates(work: BatchWork) -> Rates:
    """Every rate of a batch that was trained on; docs/metrics.md has the meaning of each."""
    assert work.train_batch is not None and work.result is not None
    batch = work.train_batch
    rates = {**_content(batch), **work.result.rates, **work.rates, **_lengths(work), **_speed(work)}
    if work.rescored is not None:
        rates["rescore_gap"] = (work.rescored.absolute, float(work.rescored.tokens))
    return rates


def batch_values(work: BatchWork, rates: Rates) -> dict[str, float]:
    """Least and largest values, and what follows from several rates."""
    assert work.train_batch is not None
    used = [s for s in work.train_batch.train_sequences if any(s.loss_mask)]
    values: dict[str, float] = {}
    if used:
        advantages, lengths = [s.advantage for s in used], [len(s.tokens) - s.prompt_len for s in used]
        values |= {"advantage_min": min(advantages), "advantage_max": max(advantages)}
        values |= {"completion_tokens_min": float(min(lengths)), "completion_tokens_max": float(max(lengths))}
        variance = quotient(rates["advantage_square_mean"]) - quotient(rates["advantage_mean"]) ** 2
        values["advantage_std"] = math.sqrt(max(0.0, variance))
    if work.rescored is not None:
        values["rescore_gap_max"] = work.rescored.largest
    return values


def _content(batch: AsyncTrainBatch) -> Rates:
    """Reward and advantages as the batch itself has them: of a producer's batch there is nothing else."""
    known = sum(not math.isnan(sequence.reward) for sequence in batch.train_sequences)
    return {"reward_mean": (batch.reward_mean * known, float(known)), **advantage_rates(batch.train_sequences)}


def _lengths(work: BatchWork) -> Rates:
    assert work.train_batch is not None
    sequences = work.train_batch.train_sequences
    count = float(len(sequences))
    completion_tokens = float(sum(len(s.tokens) - s.prompt_len for s in sequences))
    rates = {
        "prompt_tokens_mean": (float(sum(s.prompt_len for s in sequences)), count),
        "completion_tokens_mean": (completion_tokens, count),
        "span_old_fraction": (float(sum(s.old_tokens for s in sequences)), completion_tokens),
    }
    if work.rollout is not None:
        reasons = [sample.finish_reason for group in work.rollout.groups for sample in group]
        rates["completion_truncated_fraction"] = (float(reasons.count("length")), float(len(reasons)))
    return rates


def _speed(work: BatchWork) -> Rates:
    """Per second of a train call and of a generation; the model's share of the peak weighs each second alike."""
    assert work.train_batch is not None and work.result is not None
    rates: Rates = {}
    tokens, speed = float(work.train_batch.token_count), work.result.metrics.get("tokens_per_s")
    if speed:
        rates["tokens_per_s"] = (tokens, tokens / speed)
        if "mfu" in work.result.metrics:
            rates["mfu"] = (work.result.metrics["mfu"] * tokens / speed, tokens / speed)
    if work.rollout is not None and work.rollout_s > 0:
        generated = sum(len(sample.tokens) for group in work.rollout.groups for sample in group)
        rates["rollout_tokens_per_s"] = (float(generated), work.rollout_s)
    return rates
