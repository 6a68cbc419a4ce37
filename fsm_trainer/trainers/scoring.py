"""From a finished rollout to a train batch: decode, score, compute advantages, align."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from fsm_trainer.algorithms.materialize import has_policy_gradient, materialize
from fsm_trainer.algorithms.registry import AlgorithmSpec
from fsm_trainer.algorithms.shaping import GroupChoice, OverlongPenalty, choose_groups
from fsm_trainer.core.batch import AsyncTrainBatch, TrainSequence
from fsm_trainer.data.prompts import PromptBatch
from fsm_trainer.data.reward_batch import Completion, PromptRow, RewardBatch
from fsm_trainer.data.reward_contracts import RewardFunction
from fsm_trainer.data.reward_executor import RewardExecutor, ThreadRewards
from fsm_trainer.data.rewards import RewardFn
from fsm_trainer.engines.base import Rollout, Sample
from fsm_trainer.trainers.reward_policy import Judged, RewardPolicy
from fsm_trainer.trainers.scoring_rates import group_rates, overlong_rates, reward_rates


@dataclass(frozen=True)
class Scored:
    """A train batch and what it was made from."""

    batch: AsyncTrainBatch
    sequences: tuple[TrainSequence, ...]
    """Every sample that was generated; the batch has fewer where groups are left out."""
    completions: list[str]
    """Text of every sample, in the order of `sequences`."""
    degenerate: bool
    """No sequence has a gradient of the policy term."""
    function_rewards: dict[str, list[float | None]] = field(default_factory=dict)
    """What each reward function gave each sample, in the same order; None where it gave nothing."""
    reward_metrics: dict[str, float] = field(default_factory=dict)
    """Counts of what went wrong with rewards."""
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Numerator and denominator of what is a rate over the whole batch, groups not trained on included."""
    message: str | None = None
    """What went wrong with rewards, in one line."""


OVERLONG = "overlong_penalty"
"""Name of the length penalty among the reward functions."""
_log = structlog.get_logger("fsm_train")


class Scorer:
    """Scores batches with the user's reward functions; used by several threads at once."""

    def __init__(
        self,
        tokenizer: Any,
        rewards: RewardExecutor | RewardFn,
        algorithm: AlgorithmSpec,
        *,
        policy: RewardPolicy | None = None,
        overlong: OverlongPenalty | None = None,
        groups_per_batch: int | None = None,
    ) -> None:
        """`tokenizer` is a transformers tokenizer; a function instead of an executor is called in this process.

        `groups_per_batch` switches dynamic sampling on: that many prompt groups, only such that have a gradient.
        """
        self._tokenizer = tokenizer
        self._rewards = ThreadRewards([RewardFunction.of(rewards)]) if callable(rewards) else rewards
        self._policy = policy or RewardPolicy([1.0] * len(self._rewards.infos))
        self._algorithm = algorithm
        self._overlong, self._groups_per_batch = overlong, groups_per_batch
        self._short_batches = 0
        self._lock = threading.Lock()

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
        """Names of the reward functions, and of the length penalty where there is one."""
        return [*(info.name for info in self._rewards.infos), *([OVERLONG] if self._overlong else [])]

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
        judged, added = self._judge(asked, rollout, prompts.batch_id)
        scored = time.perf_counter()
        counts = [len(group) for group in rollout.groups]
        sequences, degenerate = materialize(
            prompts.prompt_tokens,
            [[(s.tokens, s.logprobs) for s in group] for group in rollout.groups],
            _regroup(judged.rewards, counts),
            spans=[[s.spans for s in group] for group in rollout.groups],
            eos_token_id=self._tokenizer.eos_token_id,
            advantage=self._algorithm.advantage,
        )
        groups = _regroup(sequences, counts)
        choice = self._choose(groups, prompts.batch_id)
        used = tuple(sequence for index in choice.used for sequence in groups[index])
        batch = AsyncTrainBatch(
            train_sequences=used,
            rollout_policy_version=rollout.version_first,
            epoch=prompts.epoch,
            prompt_batch_id=prompts.batch_id,
            prompt_count=len(choice.used),
            sequence_count=len(used),
            token_count=sum(len(s.tokens) for s in used),
            reward_mean=judged.mean,
            rollout_time_s=rollout_time_s,
            reward_time_s=scored - begin,
            materialize_time_s=time.perf_counter() - scored,
            created_at_s=now_s,
        )
        texts = [completion.text for completion in asked.completions]
        rates = {**reward_rates(judged.rewards, judged.by_function), **group_rates(choice, len(groups))}
        if added:
            rates |= overlong_rates(added)
        return Scored(batch, sequences, texts, degenerate, judged.by_function, judged.metrics, rates, judged.message)

    def _judge(self, asked: RewardBatch, rollout: Rollout, batch_id: int) -> tuple[Judged, list[float]]:
        """The rewards, the length penalty in them, and what that added to each."""
        values = self._rewards.score(asked, first_failure_ends=self._policy.on_error == "fail")
        judged = self._policy.judge(self._rewards.infos, values, batch_id)
        added = self._length_rewards(rollout)
        return (judged.with_function(OVERLONG, added) if added else judged), added

    def _length_rewards(self, rollout: Rollout) -> list[float]:
        """What the length penalty adds to each sample's reward; empty without one."""
        if self._overlong is None:
            return []
        return [self._overlong.reward(len(sample.tokens)) for group in rollout.groups for sample in group]

    def _choose(self, groups: list[list[TrainSequence]], batch_id: int) -> GroupChoice:
        """Which groups are trained on: all of them without dynamic sampling."""
        informative = [any(map(has_policy_gradient, group)) for group in groups]
        if self._groups_per_batch is None:
            return GroupChoice(tuple(range(len(groups))), sum(informative))
        choice = choose_groups(informative, self._groups_per_batch)
        wanted = min(self._groups_per_batch, len(groups))
        if choice.informative < wanted:
            self._tell_short(batch_id, informative=choice.informative, wanted=wanted, generated=len(groups))
        return choice

    def _tell_short(self, batch_id: int, **counts: int) -> None:
        """Warn the 1st, 2nd, 4th, 8th, ... time: on a task that is too easy or too hard every batch is short."""
        with self._lock:
            self._short_batches += 1
            times = self._short_batches
        if times & (times - 1) == 0:
            _log.warning("batch_not_filled", batch_id=batch_id, **counts, times=times)

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


_T = TypeVar("_T")


def _regroup(values: Sequence[_T], counts: list[int]) -> list[list[_T]]:
    """Cut a flat sequence into prompt groups."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [list(values[start : start + n]) for start, n in zip(starts, counts, strict=True)]
