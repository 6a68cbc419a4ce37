"""From a finished rollout to a train batch: decode, score, compute advantages, align."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsm_trainer.algorithms.materialize import materialize
from fsm_trainer.algorithms.registry import AlgorithmSpec
from fsm_trainer.core.batch import AsyncTrainBatch
from fsm_trainer.data.prompts import PromptBatch
from fsm_trainer.data.reward_batch import Completion, PromptRow, RewardBatch
from fsm_trainer.data.reward_contracts import RewardFunction
from fsm_trainer.data.reward_executor import RewardExecutor, ThreadRewards
from fsm_trainer.data.rewards import RewardFn
from fsm_trainer.engines.base import Rollout, Sample
from fsm_trainer.trainers.reward_policy import RewardPolicy


@dataclass(frozen=True)
class Scored:
    """A train batch and what it was made from."""

    batch: AsyncTrainBatch
    completions: list[str]
    """Text of every sample, in the order of `batch.train_sequences`."""
    degenerate: bool
    """No sequence has a gradient of the policy term."""
    function_rewards: dict[str, list[float | None]] = field(default_factory=dict)
    """What each reward function gave each sample, in the same order; None where it gave nothing."""
    reward_metrics: dict[str, float] = field(default_factory=dict)
    """Counts of what went wrong with rewards, and the mean of each function where there are several."""
    message: str | None = None
    """What went wrong with rewards, in one line."""


class Scorer:
    """Scores batches with the user's reward functions; used by several threads at once."""

    def __init__(
        self,
        tokenizer: Any,
        rewards: RewardExecutor | RewardFn,
        algorithm: AlgorithmSpec,
        *,
        policy: RewardPolicy | None = None,
    ) -> None:
        """`tokenizer` is a transformers tokenizer; a function instead of an executor is called in this process."""
        self._tokenizer = tokenizer
        self._rewards = ThreadRewards([RewardFunction.of(rewards)]) if callable(rewards) else rewards
        self._policy = policy or RewardPolicy([1.0] * len(self._rewards.infos))
        self._algorithm = algorithm

    def start(self, output: Path | None = None) -> None:
        """Begin to load the reward functions; what they print goes to `output`, where that can be kept apart."""
        self._rewards.start(output)

    def abort(self) -> None:
        """Make running and later calls of `score` raise RewardsAborted."""
        self._rewards.abort()

    def close(self) -> None:
        """Leave no process and no thread behind."""
        self._rewards.close()

    @property
    def functions(self) -> list[str]:
        """Names of the reward functions."""
        return [info.name for info in self._rewards.infos]

    def score(
        self,
        prompts: PromptBatch,
        rollout: Rollout,
        *,
        rollout_time_s: float,
        now_s: float,
        completions: list[Completion] | None = None,
    ) -> Scored:
        """Reward every sample and materialise the batch. RewardError if a function fails and that fails the run.

        `completions` saves decoding the rollout again.
        """
        begin = time.perf_counter()
        asked = self._asked(prompts, self.completions(prompts, rollout) if completions is None else completions)
        values = self._rewards.score(asked, first_failure_ends=self._policy.on_error == "fail")
        judged = self._policy.judge(self._rewards.infos, values, prompts.batch_id)
        scored = time.perf_counter()
        sequences, degenerate = materialize(
            prompts.prompt_tokens,
            [[(s.tokens, s.logprobs) for s in group] for group in rollout.groups],
            _regroup(judged.rewards, [len(group) for group in rollout.groups]),
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
            reward_mean=judged.mean,
            rollout_time_s=rollout_time_s,
            reward_time_s=scored - begin,
            materialize_time_s=time.perf_counter() - scored,
            created_at_s=now_s,
        )
        texts = [completion.text for completion in asked.completions]
        return Scored(batch, texts, degenerate, judged.by_function, judged.metrics, judged.message)

    def completions(self, prompts: PromptBatch, rollout: Rollout) -> list[Completion]:
        """Every sample decoded, in the order of the groups."""
        return [
            self._completion(prompts, rollout.version_first, p, i, sample)
            for p, group in enumerate(rollout.groups)
            for i, sample in enumerate(group)
        ]

    def _asked(self, prompts: PromptBatch, completions: list[Completion]) -> RewardBatch:
        rows = [
            PromptRow(row, text, tokens)
            for row, text, tokens in zip(prompts.rows, prompts.prompt_texts, prompts.prompt_tokens, strict=True)
        ]
        return RewardBatch(rows, completions)

    def _completion(self, prompts: PromptBatch, version: int, prompt: int, index: int, sample: Sample) -> Completion:
        tokens = list(sample.tokens)
        return Completion(
            prompt,
            self._tokenizer.decode(tokens, skip_special_tokens=True),
            self._tokenizer.decode(tokens, skip_special_tokens=False),
            sample.tokens,
            sample.logprobs,
            {
                "batch_id": prompts.batch_id,
                "epoch": prompts.epoch,
                "group": prompt,
                "sample": index,
                "finish_reason": sample.finish_reason,
                "policy_version": version,
            },
        )


def _regroup(values: list[float | None], counts: list[int]) -> list[list[float | None]]:
    """Cut a flat list into prompt groups."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [values[start : start + n] for start, n in zip(starts, counts, strict=True)]
