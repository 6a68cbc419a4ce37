"""Logprobs and entropies of given tokens without ever holding all their logits.

The model is split in its trunk, which gives hidden states, and its head, which makes logits of them. Logits are made
only for the tokens that are asked for, a chunk at a time, and made again in the backward pass, so that memory
grows with the chunk and not with vocabulary x length. Knows nothing of losses or optimisers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsm_trainer.engines.hf_batch import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_LOGITS = 2**25
"""Logits held at once: 128 MiB in float32, 220 tokens at a vocabulary of 152 thousand."""


@dataclass(frozen=True)
class SplitModel:
    """A causal language model as two functions; their composition is its forward pass."""

    trunk: Callable[[Tensor, Tensor | None], Tensor]
    """Input ids and position ids, [lines, length] -> hidden states, [lines, length, hidden]."""
    head: Callable[[Tensor], Tensor]
    """Hidden states, [n, hidden] -> logits, [n, vocabulary], with whatever the model scales or caps them by."""
    vocabulary: int


def split_model(model: PreTrainedModel, compile_trunk: bool = False) -> SplitModel:
    """Split a model where its own forward pass goes from the trunk to the head.

    The head is the model's own forward pass with the trunk passed over, so scaled and capped logits come out right
    without a list of models. One that is built otherwise has its whole forward as the trunk: its logits are held at
    once, though nothing more of that size is.
    """
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    base = model.base_model
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _PassedOver()}

    def run_head(hidden: Tensor) -> Tensor:
        logits: Tensor = head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
        return logits.squeeze(0)

    if _splits(model, base, run_head):
        run: Any = torch.compile(base, dynamic=True) if compile_trunk else base
        return SplitModel(lambda ids, at: _call(run, ids, at).last_hidden_state, run_head, vocabulary)
    run = torch.compile(model, dynamic=True) if compile_trunk else model
    return SplitModel(lambda ids, at: _call(run, ids, at).logits, lambda logits: logits, vocabulary)


def token_logprobs(
    split: SplitModel, batch: MicroBatch, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Run the model and return logprobs and entropies of the tokens in the loss, [rows, width], 0 elsewhere.

    Logprobs are natural, of the distribution at `temperature` over the whole vocabulary, in float32 (float64 if the
    model is). They carry a gradient where gradients are on; the entropies only with `entropy_gradient`.
    """
    hidden = split.trunk(batch.input_ids, batch.position_ids).flatten(0, 1)[batch.sources]

    def score(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return _score(split.head(states), targets, temperature, entropy_gradient)

    size = max(1, CHUNK_LOGITS // split.vocabulary)
    if len(hidden) <= size:
        logprobs, entropy = score(hidden, batch.targets)
        return batch.spread(logprobs), batch.spread(entropy)
    chunks = [
        checkpoint(score, states, targets, use_reentrant=False, preserve_rng_state=False)
        for states, targets in zip(torch.split(hidden, size), torch.split(batch.targets, size), strict=True)
    ]
    logprobs, entropy = (torch.cat(part) for part in zip(*chunks, strict=True))
    return batch.spread(logprobs), batch.spread(entropy)


def _score(logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    """Logprob of each target and entropy of each row, [n]."""
    if logits.dtype != torch.float64:
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    distribution = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = torch.special.entr(distribution.exp()).sum(dim=-1)
    return distribution.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


class _PassedOver(torch.nn.Module):
    """Stands where the trunk was: hidden states come in as embeddings and go out as they are."""

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> object:
        """Return what a trunk returns."""
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)


def _call(module: Any, ids: Tensor, positions: Tensor | None) -> Any:
    # Positions are given only when needed: not every model takes them.
    extra = {} if positions is None else {"position_ids": positions}
    return module(input_ids=ids, use_cache=False, **extra)


@torch.no_grad()
def _splits(model: PreTrainedModel, base: Any, head: Callable[[Tensor], Tensor]) -> bool:
    """Whether head after trunk is the model's forward pass, tried on a few tokens."""
    if base is model:
        return False
    ids = torch.arange(4, device=model.device).unsqueeze(0)
    whole = model(input_ids=ids, use_cache=False).logits
    try:
        parts = head(_call(base, ids, None).last_hidden_state[0])
    except (AttributeError, TypeError, RuntimeError):  # a model whose forward reaches into its trunk
        return False
    return parts.shape == whole[0].shape and torch.allclose(parts, whole[0], rtol=1e-4, atol=1e-4)
