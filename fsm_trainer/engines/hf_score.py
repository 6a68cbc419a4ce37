"""Scoring tokens that are given, and comparing logprobs: what the checks between rollout and trainer are made of.

One forward pass without a KV cache, so nothing that an engine keeps between calls can enter. Knows nothing of limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsm_trainer.engines.base import Scores
from fsm_trainer.engines.logprob_gap import LogprobGap

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 512
"""Tokens of one forward pass, unless one sequence has more; and of one softmax in float32. Few are scored."""


@torch.inference_mode()
def score_sequences(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], *, pad: int, temperature: float
) -> Scores:
    """Natural-log probability of every token but the first of each sequence; see `engines.base.Scores`."""
    scores: Scores = []
    width = max(map(len, sequences), default=0)
    rows_at_once = max(1, _TOKENS // max(width, 1))
    for start in range(0, len(sequences), rows_at_once):
        rows = sequences[start : start + rows_at_once]
        # Padded on the right: with causal attention no token looks at it.
        ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows], device=model.device)
        taken = _taken(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:], temperature).tolist()
        scores.extend(tuple(values[: len(row) - 1]) for values, row in zip(taken, rows, strict=True))
    return scores


def _taken(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Logprobs of the targets, [rows, length], from logits [rows, length, vocabulary]."""
    parts = zip(torch.split(logits.flatten(0, 1), _TOKENS), torch.split(targets.flatten(), _TOKENS), strict=True)
    scores = [
        torch.log_softmax(part.float() / temperature, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        for part, tokens in parts
    ]
    return torch.cat(scores).view(targets.shape)


@torch.no_grad()
def gap_sums(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[|difference| summed, difference summed, largest |difference|] of one micro-batch, where `mask` is not 0.

    All three arguments have one shape; float64, on their device, so that nothing waits for a GPU here.
    """
    # Selected, not multiplied: padding may hold anything.
    difference = torch.where(mask > 0, logprobs.detach().double() - rollout_logprobs.double(), 0.0)
    size = difference.abs()
    return torch.stack([size.sum(), difference.sum(), size.max()])


def gap_of(sums: Sequence[Tensor], tokens: int) -> LogprobGap:
    """The gap of a whole batch from its micro-batches' `gap_sums`; `tokens` in the loss."""
    absolute, signed, largest = torch.stack(list(sums)).unbind(-1)
    return LogprobGap(tokens, float(absolute.sum()), float(signed.sum()), float(largest.max()))
