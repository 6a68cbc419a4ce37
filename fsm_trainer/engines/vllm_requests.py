"""From a rollout request to vLLM's requests and back: sampling, seeds, and the versions stamped on what comes out.

Shared by the engine that holds vLLM in a process of this run and the one that talks to a server. Imports nothing of
vLLM.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsm_trainer.engines.base import EngineLost, Rollout, RolloutRequest, Sample, SamplingParams, VersionSpan

FINISHED = frozenset({"stop", "length"})


@dataclass(frozen=True)
class Completion:
    """What vLLM returned for one sample."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    spans: Sequence[tuple[str, int]]
    """Tag of the weights and number of tokens they drew, in order."""


@dataclass(frozen=True)
class Tags:
    """What this run calls the versions it loads into one engine: nobody else's weights carry such a tag."""

    nonce: str

    def of(self, version: int) -> str:
        """The tag of a version."""
        return f"{self.nonce}-{version}"

    def version(self, tag: str | None) -> int:
        """The version of a tag. EngineLost when it is not one of this run's."""
        nonce, _, number = (tag or "").rpartition("-")
        if nonce != self.nonce or not number.isdigit():
            raise EngineLost(
                f"vLLM serves weights {tag!r}, which this run has not loaded into it: it was restarted, or somebody "
                f"else loads weights into it"
            )
        return int(number)


def check_filters(sampling: SamplingParams) -> None:
    """ValueError where vLLM cannot say what the policy's logprobs were before top-p and top-k.

    It gives them either of the filtered distribution at the sampling temperature, or of the whole one at temperature 1.
    """
    if _filters(sampling) and sampling.temperature != 1.0:
        raise ValueError(
            f"temperature {sampling.temperature:g} with top_p {sampling.top_p:g} and top_k {sampling.top_k}: vLLM has "
            f"the policy's logprobs before these filters at temperature 1 only; set --temperature 1 or switch them off"
        )


def logprobs_mode(sampling: SamplingParams) -> str:
    """The mode of vLLM that gives the policy's logprobs at the sampling temperature, before filters."""
    return "raw_logprobs" if _filters(sampling) or sampling.temperature == 0.0 else "processed_logprobs"


def _filters(sampling: SamplingParams) -> bool:
    return sampling.top_p < 1.0 or sampling.top_k > 0


def requested(sampling: SamplingParams) -> int:
    """Samples of one prompt that vLLM is asked for: one when it is greedy, since it refuses to draw all alike."""
    return 1 if sampling.temperature == 0.0 else sampling.n_samples


def sampling_arguments(sampling: SamplingParams, eos: Sequence[int]) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams` for one prompt's samples, all but their seed."""
    return {
        "n": requested(sampling),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "logprobs": 0,
        # By name, and nothing else: what vLLM itself takes for the end depends on files it reads.
        "stop_token_ids": list(eos),
        "ignore_eos": True,
        "detokenize": False,
    }


SCORING_ARGUMENTS: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
"""Arguments of `vllm.SamplingParams` that make it score a prompt, without a look into its prefix cache."""


def group_seed(request: RolloutRequest, index: int) -> int:
    """The seed of one prompt's samples; vLLM adds a sample's number to it, so that none are drawn alike."""
    digest = hashlib.sha256(f"{request.seed}:{request.batch_id}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2


def to_sample(found: Completion, tags: Tags) -> Sample:
    """One finished sample. EngineLost when it was cut off, or drawn by weights that are not this run's."""
    if found.finish_reason not in FINISHED:
        raise EngineLost(f"vLLM ended a completion with {found.finish_reason!r} after {len(found.tokens)} tokens")
    spans = tuple(VersionSpan(tags.version(tag), tokens) for tag, tokens in found.spans)
    counts = (len(found.tokens), len(found.logprobs), sum(span.tokens for span in spans))
    if not spans or len(set(counts)) > 1:
        raise EngineLost("vLLM returned {} tokens, logprobs of {} and weight versions of {}".format(*counts))
    if not all(map(math.isfinite, found.logprobs)):
        raise FloatingPointError(f"weights of version {spans[-1].version} give logprobs that are not finite")
    return Sample(tuple(found.tokens), tuple(found.logprobs), found.finish_reason, spans)


def to_group(found: Sequence[Completion], sampling: SamplingParams, tags: Tags) -> list[Sample]:
    """One prompt's samples; copies of the one that was asked for when it is greedy. EngineLost as `to_sample`, too."""
    asked, longest = requested(sampling), max((len(completion.tokens) for completion in found), default=0)
    if len(found) != asked or longest > sampling.max_new_tokens:
        raise EngineLost(
            f"vLLM returned {len(found)} completions of up to {longest} tokens for a prompt, expected {asked} of up to "
            f"{sampling.max_new_tokens}"
        )
    return [to_sample(completion, tags) for completion in found] * (sampling.n_samples // asked)


def to_rollout(groups: Sequence[Sequence[Sample]], began: int | None = None) -> Rollout:
    """The samples by prompt; spans stay only where weights were loaded in between.

    `began`: the version served when the batch was asked for, where what that computed may count for later tokens too.
    """
    first = min(sample.spans[0].version for group in groups for sample in group)
    first = first if began is None else min(first, began)
    last = max(sample.spans[-1].version for group in groups for sample in group)
    if first == last:
        groups = [[Sample(s.tokens, s.logprobs, s.finish_reason) for s in group] for group in groups]
    return Rollout(tuple(map(tuple, groups)), first, last)


def check_request(request: RolloutRequest, longest: int, max_new_tokens: int) -> None:
    """ValueError for a batch that vLLM would refuse."""
    if not request.prompts:
        raise ValueError(f"batch {request.batch_id} has no prompts, expected at least one")
    for index, prompt in enumerate(request.prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty, expected at least one token")
        if len(prompt) + max_new_tokens > longest:
            raise ValueError(
                f"prompt {index} of {len(prompt)} tokens and {max_new_tokens} new tokens need "
                f"{len(prompt) + max_new_tokens} positions but vLLM was started for {longest}; lower max_new_tokens or "
                f"max_prompt_tokens"
            )
