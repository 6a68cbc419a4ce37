"""What a user's reward function gets and must return. Knows nothing of engines, batches or advantages."""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fsm_trainer.data.user_code import load_function

REWARD_FUNCTION = "reward_fn"
MAX_REWARD = 1e30
"""Largest size of a reward: beyond it a group's spread has no finite square in the precision of training."""


@dataclass(frozen=True)
class RewardRecord:
    """One completion to score."""

    prompt: str
    """The prompt as the model saw it."""
    completion: str
    """The completion's text, without special tokens."""
    rendered_completion: str | None = None
    """The completion's text with its special tokens."""
    final_answer: str | None = None
    """What the rollout ended with; without tools it is the completion."""
    answer: Any = None
    """The row's first `solutions` entry, or its `answer` or `solution`."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The prompt's chat messages, if it was given as such."""
    trace: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tool_results: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    """Token ids of prompt and completion."""
    logprobs: list[float] = field(default_factory=list)
    """Aligned with `tokens`; 0.0 on the prompt."""
    loss_mask: list[int] = field(default_factory=list)
    """Aligned with `tokens`; 1 on what was sampled."""
    source_record: dict[str, Any] = field(default_factory=dict)
    """The dataset's row."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Where it comes from: batch_id, epoch, group, sample, finish_reason."""


RewardFn = Callable[[RewardRecord], Any]


def row_answer(row: Mapping[str, Any]) -> Any:
    """The reference answer of a row: first of `solutions`, else `answer`, else `solution`, else None."""
    solutions = row.get("solutions")
    if isinstance(solutions, Sequence) and not isinstance(solutions, str):
        return solutions[0] if solutions else None
    for name in ("solutions", "answer", "solution"):
        if row.get(name) is not None:
            return row[name]
    return None


def make_reward_record(
    row: Mapping[str, Any],
    *,
    prompt: str,
    completion: str,
    tokens: Sequence[int] = (),
    logprobs: Sequence[float] = (),
    loss_mask: Sequence[int] = (),
    rendered_completion: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> RewardRecord:
    """The record of one completion of a dataset row."""
    chat = row.get("prompt")
    return RewardRecord(
        prompt=prompt,
        completion=completion,
        rendered_completion=completion if rendered_completion is None else rendered_completion,
        final_answer=completion,
        answer=row_answer(row),
        messages=list(chat) if isinstance(chat, list) else [],
        tokens=list(tokens),
        logprobs=list(logprobs),
        loss_mask=list(loss_mask),
        source_record=dict(row),
        metadata=dict(metadata or {}),
    )


def load_reward_fn(spec: str) -> RewardFn:
    """The reward function of `FILE.py` (named `reward_fn`) or `FILE.py:FUNCTION`."""
    return load_function(spec, REWARD_FUNCTION, "reward")


def score(reward_fn: RewardFn, record: RewardRecord) -> float:
    """The reward of a record: a finite number. What the user's code raises passes through with its own traceback."""
    return checked_number(getattr(reward_fn, "__name__", type(reward_fn).__name__), reward_fn(record))


def checked_number(name: str, value: Any) -> float:
    """What the reward function `name` returned for one completion, as a float; ValueError unless it is finite."""
    # numpy's and torch's scalars; an array, even of one element, is not one number.
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, numbers.Real):
        hint = "; does it end without a return?" if value is None else ""
        raise ValueError(f"{name} returned {_short(value)} ({type(value).__name__}), expected one finite number{hint}")
    # Compared before it becomes a float, which a whole number may be too large for.
    if not abs(cast("float", number)) <= MAX_REWARD:
        raise ValueError(
            f"{name} returned {_short(value)}, expected a finite number of at most {MAX_REWARD:g} in size; check its "
            f"divisions and logarithms"
        )
    return float(number)


def _short(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception as error:  # a user's class, or a number with too many digits to print
        return f"what cannot be shown ({type(error).__name__})"
