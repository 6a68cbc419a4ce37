"""Drawing one token for each row: the policy, what the filters leave of it, and a draw of one uniform number a row.

Tensors only. The randomness of a row depends on nothing but its own number, so rows never disturb each other.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from fsm_trainer.engines.base import SamplingParams


def check_sampling(sampling: SamplingParams) -> None:
    """Raise ValueError for parameters that define no distribution."""
    if sampling.n_samples < 1:
        raise ValueError(f"n_samples is {sampling.n_samples}, expected at least 1")
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}, expected at least 1")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise ValueError(f"temperature is {sampling.temperature}, expected 0 (greedy) or above")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p is {sampling.top_p}, expected above 0 and at most 1 (off)")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise ValueError(f"top_k is {sampling.top_k}, expected -1 (off) or at least 1")


def batch_generator(seed: int, batch_id: int) -> torch.Generator:
    """Make the random generator of one batch: a function of the run's seed and the batch's id alone."""
    digest = hashlib.sha256(f"{seed}:{batch_id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def batch_uniforms(seed: int, batch_id: int, rows: int, steps: int) -> Tensor:
    """Draw all random numbers of a batch at once, [rows, steps]; on the CPU, so every device draws the same."""
    return torch.rand(rows, steps, generator=batch_generator(seed, batch_id), dtype=torch.float64)


def policy_logprobs(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the policy at the sampling temperature: the distribution that is trained.

    At temperature 0 the draw is greedy, and the distribution is the untempered one.
    """
    return torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)


def filtered(policy: Tensor, sampling: SamplingParams) -> Tensor:
    """Log-probabilities of the distribution that is drawn from: the policy's after top-k, then top-p, renormalised."""
    if sampling.temperature == 0.0:
        return policy
    if 0 < sampling.top_k < policy.shape[-1]:
        policy = _keep_top_k(policy, sampling.top_k)
    if sampling.top_p < 1.0:
        policy = _keep_top_p(policy, sampling.top_p)
    return policy


def draw(logprobs: Tensor, uniforms: Tensor, *, greedy: bool) -> Tensor:
    """Draw one token a row by inverting its cumulative distribution, [rows]."""
    if greedy:
        return logprobs.argmax(dim=-1)
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    # `right`: a token of probability zero adds nothing to the sum, so it can never be the first one above.
    tokens = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * cumulative[:, -1:], right=True)
    # Only a row of NaN ends up outside; its NaN logprob then tells the caller.
    return tokens.clamp(max=logprobs.shape[-1] - 1).squeeze(-1)


def _keep_top_k(logprobs: Tensor, k: int) -> Tensor:
    values, indices = logprobs.topk(k, dim=-1)
    return torch.full_like(logprobs, -torch.inf).scatter(-1, indices, torch.log_softmax(values, dim=-1))


def _keep_top_p(logprobs: Tensor, p: float) -> Tensor:
    """Keep the fewest most probable tokens whose probability reaches p; always at least one."""
    values, indices = logprobs.sort(dim=-1, descending=True, stable=True)
    probabilities = values.exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    # The first is kept by name: rounding must not leave a row without any token.
    drop = before >= p
    drop[..., 0] = False
    values = torch.log_softmax(values.masked_fill(drop, -torch.inf), dim=-1)
    return torch.full_like(logprobs, -torch.inf).scatter(-1, indices, values)
