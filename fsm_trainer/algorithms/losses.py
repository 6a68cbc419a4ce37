"""The policy losses on one micro-batch: GRPO (token ratio) and GSPO (sequence ratio), each with an entropy bonus.

The importance ratio is taken to the logprobs that the ROLLOUT recorded, so off-policy data is corrected, and it
is 1 on a fresh batch only. A loss is a sum over the micro-batch divided by a count over the whole optimiser batch, so
adding the gradients of the micro-batches gives the gradient of the batch however it is cut. Knows tensors
only: no models, no engines, no optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MAX_LOG_RATIO = 80.0
"""Above it, exp overflows float32; no ratio that far from 1 means anything but that something is wrong."""


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch. Per-token tensors are [rows, completion tokens], right-padded; padding has mask 0."""

    logprobs: Tensor
    """Of the taken tokens under the current policy, at the sampling temperature; carries the gradient."""
    rollout_logprobs: Tensor
    """The same under the policy that generated them, as recorded."""
    mask: Tensor
    """1 where a token takes part in the loss."""
    advantages: Tensor
    """[rows]."""
    entropy: Tensor
    """Of the current policy at each token; needs a gradient only if it has a coefficient."""


@dataclass(frozen=True)
class Normalizers:
    """Counts over the whole optimiser batch, all micro-batches together."""

    tokens: int
    """Tokens in the loss."""
    sequences: int
    """Sequences with at least one of them; an empty completion does not count."""


@dataclass(frozen=True)
class LossOutput:
    """What a loss gives for one micro-batch."""

    loss: Tensor
    """Its share of the batch's loss: shares add up."""
    metrics: dict[str, tuple[Tensor, float]]
    """Numerator (this micro-batch) and denominator (the whole batch): numerators add up."""
    ratio_max: Tensor


class LossFn(Protocol):
    """A loss as the registry holds it."""

    def __call__(
        self,
        inputs: LossInputs,
        normalizers: Normalizers,
        *,
        clip_low: float,
        clip_high: float,
        entropy_coef: float = 0.0,
    ) -> LossOutput:
        """Compute one micro-batch's share of the loss and of the metrics."""


@dataclass(frozen=True)
class _PolicyTerm:
    """The policy's part of a loss, and the ratio it was about: one per token (GRPO) or per sequence (GSPO)."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    weight: Tensor
    """1 where a ratio counts."""
    units: int
    """How many ratios count in the whole batch."""


def grpo_loss(
    inputs: LossInputs, normalizers: Normalizers, *, clip_low: float, clip_high: float, entropy_coef: float = 0.0
) -> LossOutput:
    """Clipped surrogate on each token's ratio, averaged over all tokens of the batch (Shao et al. 2024, eq. 3).

    The token mean over the batch replaces the paper's mean of sequence means, which favours short
    completions. There is no KL term to a reference model.
    """
    log_ratio = _masked_log_ratio(inputs)
    ratio = log_ratio.exp()
    surrogate, clipped = _clipped_surrogate(ratio, inputs.advantages.unsqueeze(-1), clip_low, clip_high)
    loss = -(surrogate * inputs.mask).sum() / normalizers.tokens
    term = _PolicyTerm(loss, ratio, clipped, inputs.mask, normalizers.tokens)
    return _output(term, log_ratio, inputs, normalizers, entropy_coef)


def gspo_loss(
    inputs: LossInputs, normalizers: Normalizers, *, clip_low: float, clip_high: float, entropy_coef: float = 0.0
) -> LossOutput:
    """Clipped surrogate on each sequence's length-normalised ratio, sequence mean (Zheng et al. 2025, eq. 5-7).

    The ratio is the geometric mean of the token ratios, so its clipping range is far smaller than GRPO's. The
    mean is over sequences that have a token in the loss.
    """
    log_ratio = _masked_log_ratio(inputs)
    lengths = inputs.mask.sum(dim=-1)
    present = (lengths > 0).to(log_ratio.dtype)
    ratio = (log_ratio.sum(dim=-1) / lengths.clamp(min=1)).exp()
    surrogate, clipped = _clipped_surrogate(ratio, inputs.advantages, clip_low, clip_high)
    loss = -(surrogate * present).sum() / normalizers.sequences
    term = _PolicyTerm(loss, ratio, clipped, present, normalizers.sequences)
    return _output(term, log_ratio, inputs, normalizers, entropy_coef)


def _masked_log_ratio(inputs: LossInputs) -> Tensor:
    # Selected, not multiplied: padding may hold anything, and 0 times infinity is not 0. Bounded for the same reason:
    # an infinite ratio would make a loss that is not a number of a token without advantage.
    return torch.where(inputs.mask > 0, inputs.logprobs - inputs.rollout_logprobs, 0.0).clamp(max=MAX_LOG_RATIO)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return the surrogate and where its clipping took the gradient away."""
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages)
    clipped = ((ratio > 1.0 + high) & (advantages > 0)) | ((ratio < 1.0 - low) & (advantages < 0))
    return surrogate, clipped


def _output(
    term: _PolicyTerm, log_ratio: Tensor, inputs: LossInputs, normalizers: Normalizers, entropy_coef: float
) -> LossOutput:
    """Add the entropy bonus and the metrics."""
    tokens, units = float(normalizers.tokens), float(term.units)
    entropy = torch.where(inputs.mask > 0, inputs.entropy, 0.0).sum()
    loss = term.loss - entropy_coef * entropy / tokens if entropy_coef else term.loss
    with torch.no_grad():
        # Schulman's estimator k3 of KL(rollout || current): never negative, low variance.
        kl = torch.where(inputs.mask > 0, log_ratio.exp() - 1.0 - log_ratio, 0.0).sum()
        metrics = {
            "ratio_mean": ((term.ratio * term.weight).sum(), units),
            "clip_fraction": ((term.clipped * term.weight).sum(), units),
            "entropy": (entropy.detach(), tokens),
            "approx_kl": (kl, tokens),
        }
        ratio_max = torch.where(term.weight > 0, term.ratio, 0.0).max()
    return LossOutput(loss=loss, metrics=metrics, ratio_max=ratio_max)
