"""Weights that correct for the policy that sampled a token being another than the one that trains on it.

With rho = proximal / rollout, the probability of a taken token under the trained weights at the start of the step over
that under the weights (and the engine) that sampled it, each token's loss is multiplied by a function of rho that
carries no gradient. Knows nothing of which loss that is.

A span is a run of tokens of one sample that one version drew; old ones are all but the sample's last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsm_trainer.algorithms.objective import Objective

MAX_LOG_RATIO = 80.0
"""Above it, exp overflows float32; no ratio that far from 1 means anything but that something is wrong."""


@dataclass(frozen=True)
class CorrectionWeights:
    """Both [rows, width], without gradient."""

    weights: Tensor
    """What a token's loss is multiplied by; 1 everywhere without a correction."""
    changed: Tensor
    """Where the correction truncated or masked, as a boolean; padding may hold anything."""
    capped_spans: Tensor | None = None
    """Where an old span's weight was truncated; None without such spans."""


def correction_weights(log_rho: Tensor, mask: Tensor, objective: Objective) -> CorrectionWeights:
    """Weights of one micro-batch from log rho: [rows, width], without gradient, 0 where `mask` is 0 (not in the loss).

    - `token-truncate`: min(rho_t, cap); truncated importance sampling (Ionides 2008; Yao et al. 2025).
    - `sequence-truncate`: min(prod_t rho_t, cap), the same for all tokens of a sequence.
    - `token-mask`: rho_t inside the band, else 0; IcePop (Ling team 2025, "Every Step Evolves").
    - `sequence-mask`: rho_t where the geometric mean of the sequence's rho is inside the band, else 0 for all of it.
    - `decoupled`: rho_t; decoupled PPO (Hilton et al. 2021, section 3; AReaL, Fu et al. 2025).
    """
    log_rho = log_rho.clamp(max=MAX_LOG_RATIO)
    rho = log_rho.exp()
    low, high = objective.band
    match objective.correction:
        case "token-truncate":
            return CorrectionWeights(rho.clamp(max=objective.correction_cap), rho > objective.correction_cap)
        case "sequence-truncate":
            whole = log_rho.sum(dim=-1, keepdim=True).clamp(max=MAX_LOG_RATIO).exp().expand_as(rho)
            return CorrectionWeights(whole.clamp(max=objective.correction_cap), whole > objective.correction_cap)
        case "token-mask":
            outside = (rho < low) | (rho > high)
            return CorrectionWeights(torch.where(outside, 0.0, rho), outside)
        case "sequence-mask":
            mean = sequence_mean(log_rho, mask).exp().expand_as(rho)
            outside = (mean < low) | (mean > high)
            return CorrectionWeights(torch.where(outside, 0.0, rho), outside)
        case "decoupled":
            return CorrectionWeights(rho, torch.zeros_like(rho, dtype=torch.bool))
        case "none":
            return CorrectionWeights(torch.ones_like(rho), torch.zeros_like(rho, dtype=torch.bool))


def mixed_weights(log_rho: Tensor, mask: Tensor, spans: Tensor, objective: Objective) -> CorrectionWeights:
    """Weights where samples have old spans: those of `span_weights` there, the correction's on the newest tokens.

    The correction sees the newest tokens alone, also where it looks at whole sequences. `spans`: [rows, width], whole
    numbers; 0 on the newest tokens and on padding, each row's old spans count from 1.
    """
    old = spans > 0
    newest = correction_weights(torch.where(old, 0.0, log_rho), torch.where(old, 0.0, mask), objective)
    older = span_weights(log_rho, mask, spans, objective.correction_cap)
    weights = torch.where(old, older.weights, newest.weights)
    return CorrectionWeights(weights, newest.changed & ~old, older.changed & old)


def span_weights(log_rho: Tensor, mask: Tensor, spans: Tensor, cap: float) -> CorrectionWeights:
    """One weight for each old span, min(exp(mean of log rho over its tokens in the loss), cap); 1 elsewhere.

    The geometric mean is GSPO's ratio (Zheng et al. 2025, eq. 7), of a span in place of the completion: a product
    would grow or vanish with the span's length. Its truncation is that of Ionides 2008.
    """
    weights = torch.ones_like(log_rho)
    for number in range(1, int(spans.max()) + 1):
        inside = spans == number
        mean = sequence_mean(torch.where(inside, log_rho, 0.0), torch.where(inside, mask, 0.0))
        weights = torch.where(inside, mean.clamp(max=MAX_LOG_RATIO).exp(), weights)
    return CorrectionWeights(weights.clamp(max=cap), weights > cap)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's tokens in the loss, [rows, 1]; `values` is 0 outside `mask`, an empty row's mean is 0."""
    return values.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
