"""From a finished rollout to a train batch: decode, score, compute advantages, align."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from fsm_trainer.algorithms.materialize import materialize
from fsm_trainer.algorithms.registry import AlgorithmSpec
from fsm_trainer.core.batch import AsyncTrainBatch
from fsm_trainer.data.prompts import PromptBatch
from fsm_trainer.data.rewards import RewardFn, RewardRecord, make_reward_record, score
from fsm_trainer.engines.base import Rollout, Sample


class ScoringAborted(RuntimeError):
    """The run ended while rewards were computed."""


@dataclass(frozen=True)
class Scored:
    """A train batch and what it was made from."""

    batch: AsyncTrainBatch
    completions: list[str]
    """Text of every sample, in the order of `batch.train_sequences`."""
    degenerate: bool
    """No sequence has a gradient of the policy term."""


class Scorer:
    """Scores batches with the user's reward function; used by several threads at once."""

    def __init__(self, tokenizer: Any, reward_fn: RewardFn, algorithm: AlgorithmSpec) -> None:
        """`tokenizer` is a transformers tokenizer."""
        self._tokenizer = tokenizer
        self._reward_fn = reward_fn
        self._algorithm = algorithm
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Make running and later calls of `score` raise before their next sample."""
        self._aborted.set()

    def score(self, prompts: PromptBatch, rollout: Rollout, *, rollout_time_s: float, now_s: float) -> Scored:
        """Reward every sample and materialise the batch. What the user's code raises passes through."""
        begin = time.perf_counter()
        records = [
            self._record(prompts, p, i, sample)
            for p, group in enumerate(rollout.groups)
            for i, sample in enumerate(group)
        ]
        rewards = [self._score_one(record) for record in records]
        scored = time.perf_counter()
        grouped = _regroup(rewards, [len(group) for group in rollout.groups])
        sequences, degenerate = materialize(
            prompts.prompt_tokens,
            [[(s.tokens, s.logprobs) for s in group] for group in rollout.groups],
            grouped,
            eos_token_id=self._tokenizer.eos_token_id,
            advantage=self._algorithm.advantage,
        )
        batch = AsyncTrainBatch(
            train_sequences=sequences,
            rollout_policy_version=rollout.version_first,
            epoch=prompts.epoch,
            prompt_batch_id=prompts.batch_id,
            prompt_count=len(prompts.prompt_tokens),
            sequence_count=len(sequences),
            token_count=sum(len(s.tokens) for s in sequences),
            reward_mean=sum(rewards) / len(rewards),
            rollout_time_s=rollout_time_s,
            reward_time_s=scored - begin,
            materialize_time_s=time.perf_counter() - scored,
            created_at_s=now_s,
        )
        return Scored(batch, [record.completion for record in records], degenerate)

    def _score_one(self, record: RewardRecord) -> float:
        if self._aborted.is_set():
            raise ScoringAborted("scoring aborted")
        return score(self._reward_fn, record)

    def _record(self, prompts: PromptBatch, prompt: int, sample_index: int, sample: Sample) -> RewardRecord:
        prompt_tokens = prompts.prompt_tokens[prompt]
        tokens = list(sample.tokens)
        return make_reward_record(
            prompts.rows[prompt],
            prompt=prompts.prompt_texts[prompt],
            completion=self._tokenizer.decode(tokens, skip_special_tokens=True),
            rendered_completion=self._tokenizer.decode(tokens, skip_special_tokens=False),
            tokens=[*prompt_tokens, *tokens],
            logprobs=[*[0.0] * len(prompt_tokens), *sample.logprobs],
            loss_mask=[*[0] * len(prompt_tokens), *[1] * len(tokens)],
            metadata={
                "batch_id": prompts.batch_id,
                "epoch": prompts.epoch,
                "group": prompt,
                "sample": sample_index,
                "finish_reason": sample.finish_reason,
            },
        )


def _regroup(values: list[float], counts: list[int]) -> list[list[float]]:
    """Cut a flat list into prompt groups."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [values[start : start + n] for start, n in zip(starts, counts, strict=True)]
