"""Weights that correct for the policy that sampled a token being another than the one that trains on it.

With rho = proximal / rollout, the probability of a taken token under the trained weights at the start of the step over
that under the weights (and the engine) that sampled it, each token's loss is multiplied by a function of rho that
carries no gradient. Knows nothing of which loss that is.
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


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's tokens in the loss, [rows, 1]; `values` is 0 outside `mask`, an empty row's mean is 0."""
    return values.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)
