"""From rollouts and rewards to rows that can be trained on: tokens, logprobs, mask and advantages, aligned.

Takes plain sequences, so it knows neither engines nor tensors. An empty completion (no token at all) keeps its place:
its reward counts in its group's baseline, and its row holds the prompt alone with nothing in the loss. A completion
without a reward (None) is masked: it keeps its place too, counts in no baseline and has nothing in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsm_trainer.algorithms.advantages import AdvantageFn, group_advantages
from fsm_trainer.core.batch import TrainSequence, VersionSpans

Completion = tuple[Sequence[int], Sequence[float]]
"""The tokens of one completion and their logprobs under the sampling distribution."""


def materialize(
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[Completion]],
    rewards: Sequence[Sequence[float | None]],
    *,
    spans: Sequence[Sequence[VersionSpans]] | None = None,
    eos_token_id: int | None = None,
    advantage: AdvantageFn = group_advantages,
) -> tuple[tuple[TrainSequence, ...], bool]:
    """Build the train sequences of one prompt batch, group by group in the order given, and say if it is degenerate.

    Degenerate means that no sequence has a non-zero advantage and a token in the loss, so the policy term has no
    gradient; whether another term (an entropy bonus) makes a step worth while is the caller's decision.
    `spans` are the policy versions of each completion's tokens; None: one version drew everything.
    Raises ValueError when prompts, groups, rewards and spans do not match.
    """
    spans = [[()] * len(group) for group in groups] if spans is None else spans
    _check_shapes(prompts, groups, rewards)
    sequences = tuple(
        _sequence(prompt, completion, reward, value, versions, eos_token_id)
        for prompt, group, group_rewards, values, group_spans in zip(
            prompts, groups, rewards, _advantages(rewards, advantage), spans, strict=True
        )
        for completion, reward, value, versions in zip(group, group_rewards, values, group_spans, strict=True)
    )
    return sequences, not any(has_policy_gradient(sequence) for sequence in sequences)


def has_policy_gradient(sequence: TrainSequence) -> bool:
    """Whether the policy term can move anything on this sequence."""
    return sequence.advantage != 0.0 and any(sequence.loss_mask)


def _advantages(rewards: Sequence[Sequence[float | None]], advantage: AdvantageFn) -> list[list[float]]:
    """Advantages over the rewards there are; 0 for a completion without one."""
    places = [[i for i, reward in enumerate(group) if reward is not None] for group in rewards]
    known = [[reward for reward in group if reward is not None] for group in rewards]
    spread = [[0.0] * len(group) for group in rewards]
    # A group that is masked as a whole has no baseline; an advantage function need not know of such.
    filled = [index for index, group in enumerate(known) if group]
    for index, values in zip(filled, advantage([known[index] for index in filled]), strict=True):
        for place, value in zip(places[index], values, strict=True):
            spread[index][place] = value
    return spread


def _sequence(
    prompt: Sequence[int],
    completion: Completion,
    reward: float | None,
    advantage: float,
    versions: VersionSpans,
    eos_token_id: int | None,
) -> TrainSequence:
    tokens, logprobs = completion
    if len(tokens) != len(logprobs):
        raise ValueError(f"a completion has {len(tokens)} tokens but {len(logprobs)} logprobs, expected one for each")
    if not all(math.isfinite(logprob) for logprob in logprobs):
        raise ValueError(f"a completion's logprobs are {list(logprobs)}, expected finite numbers; check the engine")
    return TrainSequence(
        tokens=(*prompt, *tokens),
        logprobs=(*(0.0,) * len(prompt), *logprobs),
        prompt_len=len(prompt),
        loss_mask=(*(0,) * len(prompt), *(0 if reward is None else 1,) * len(tokens)),
        advantage=advantage,
        reward=math.nan if reward is None else float(reward),
        eos_token_id=eos_token_id,
        version_spans=_merged(versions),
    )


def _merged(spans: VersionSpans) -> VersionSpans:
    """The spans, neighbours of one version put together; empty if that leaves one: weights may be loaded again."""
    merged: list[tuple[int, int]] = []
    for version, tokens in spans:
        if merged and merged[-1][0] == version:
            tokens += merged.pop()[1]
        merged.append((version, tokens))
    return tuple(merged) if len(merged) > 1 else ()


def _check_shapes(
    prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Completion]], rewards: Sequence[Sequence[float | None]]
) -> None:
    if not len(prompts) == len(groups) == len(rewards):
        raise ValueError(
            f"got {len(prompts)} prompts, {len(groups)} groups and {len(rewards)} reward groups, "
            f"expected as many of each"
        )
    for index, (group, group_rewards) in enumerate(zip(groups, rewards, strict=True)):
        if len(group) != len(group_rewards):
            raise ValueError(
                f"prompt group {index} has {len(group)} completions but {len(group_rewards)} rewards, "
                f"expected one for each"
            )
