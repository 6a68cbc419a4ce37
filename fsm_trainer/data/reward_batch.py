"""The completions of one prompt batch on their way to the reward functions, and what comes back for each.

Rows and prompts are held once a prompt, not once a completion, so that a part of a batch is small to send to another
process. Knows nothing of contracts, processes or policies.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from fsm_trainer.data.rewards import RewardRecord, make_reward_record


class PromptRow(NamedTuple):
    """What the completions of one prompt share."""

    row: Mapping[str, Any]
    """The dataset's row."""
    text: str
    """The prompt as the model saw it."""
    tokens: Sequence[int]


class Completion(NamedTuple):
    """One sample of a prompt."""

    prompt: int
    """Its prompt's place in the batch."""
    text: str
    rendered: str
    """With special tokens."""
    tokens: Sequence[int]
    logprobs: Sequence[float]
    metadata: Mapping[str, Any]


class RewardBatch(NamedTuple):
    """Completions in the order of their prompts."""

    prompts: Sequence[PromptRow]
    completions: Sequence[Completion]

    def part(self, start: int, stop: int) -> RewardBatch:
        """The completions `start` to `stop` and the prompts they need."""
        if (start, stop) == (0, len(self.completions)):
            return self
        chosen = self.completions[start:stop]
        first, last = chosen[0].prompt, chosen[-1].prompt
        moved = [completion._replace(prompt=completion.prompt - first) for completion in chosen]
        return RewardBatch(self.prompts[first : last + 1], moved)

    def packed(self) -> RewardBatch:
        """The same with numbers in arrays, which take a tenth of the time to pickle."""
        return RewardBatch(
            [prompt._replace(tokens=array("q", prompt.tokens)) for prompt in self.prompts],
            [c._replace(tokens=array("q", c.tokens), logprobs=array("d", c.logprobs)) for c in self.completions],
        )

    def groups(self) -> list[tuple[int, int]]:
        """Start and stop of each prompt's completions."""
        bounds = [i for i, c in enumerate(self.completions) if i == 0 or c.prompt != self.completions[i - 1].prompt]
        return list(zip(bounds, [*bounds[1:], len(self.completions)], strict=True))

    def record(self, index: int) -> RewardRecord:
        """The record of one completion; it shares nothing that a reward function could change for the others."""
        completion = self.completions[index]
        prompt = self.prompts[completion.prompt]
        return make_reward_record(
            prompt.row,
            prompt=prompt.text,
            completion=completion.text,
            rendered_completion=completion.rendered,
            tokens=[*prompt.tokens, *completion.tokens],
            logprobs=[*[0.0] * len(prompt.tokens), *completion.logprobs],
            loss_mask=[*[0] * len(prompt.tokens), *[1] * len(completion.tokens)],
            metadata=completion.metadata,
        )


class RewardFailure(NamedTuple):
    """Why a completion has no reward: what its reward function did, as text that crosses processes."""

    kind: str
    """error (it raised, or returned no reward), timeout (a call took too long) or crash (its process ended)."""
    type: str
    message: str
    traceback: str = ""
    where: str = ""
    """`file.py:line` in the user's code."""


Value: TypeAlias = "float | RewardFailure | None"
"""A reward, why there is none, or None for a completion that a function calls not scorable."""
