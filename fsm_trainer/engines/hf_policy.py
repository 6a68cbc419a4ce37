"""The model of a train step: its settings for speed and memory, and the logprobs that a loss is made of.

Owns no weights' changes: no optimiser, no loss. What is set here never changes the gradient beyond rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.hf_batch import MicroBatch, collate
from fsm_trainer.engines.hf_logprobs import SplitModel, split_model, token_logprobs
from fsm_trainer.engines.hf_model import resolve_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKING = ("auto", "on", "off")


@dataclass(frozen=True)
class PolicySettings:
    """How a pass is computed. Raises ValueError for an unknown choice."""

    temperature: float = 1.0
    """The rollout's; 0 (greedy) recorded untempered logprobs, so it counts as 1."""
    dtype: str = "float32"
    """Of the computation (autocast); trained weights are float32."""
    packing: str = "auto"
    """`auto` packs where attention skips what lies outside a sequence (flash attention), else pads."""
    gradient_checkpointing: bool = False
    torch_compile: bool = False

    def __post_init__(self) -> None:
        """Check the choices."""
        if resolve_dtype(self.dtype) == torch.float16:
            raise ValueError("dtype is 'float16', whose gradients underflow; train in 'bfloat16' or 'float32'")
        if self.packing not in PACKING:
            raise ValueError(f"sequence_packing is {self.packing!r}, expected one of {', '.join(PACKING)}")


class Policy:
    """A model that is being trained, and how to get logprobs out of it."""

    def __init__(self, model: PreTrainedModel, settings: PolicySettings, pad: int) -> None:
        """Prepare the model. Raises ValueError when it cannot do what the settings ask for."""
        self.model, self._settings, self._pad = model, settings, pad
        self.dtype = resolve_dtype(settings.dtype)
        _choose_attention(model, self.dtype)
        if settings.gradient_checkpointing:
            _checkpoint_layers(model)
        # What is tried out here is computed as a step computes: flash attention takes no float32.
        with self.autocast():
            self.packed = _resolve_packing(settings.packing, model)
            self._split: SplitModel = split_model(model, compile_trunk=settings.torch_compile)

    def collate(self, sequences: Sequence[TrainSequence]) -> MicroBatch | None:
        """Make a micro-batch; None when no sequence has a token in the loss."""
        return collate(sequences, self._pad, self.model.device, packed=self.packed)

    def logprobs(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of the tokens in the loss, [rows, width]; see `token_logprobs`."""
        with self.autocast():
            return token_logprobs(
                self._split,
                batch,
                temperature=self._settings.temperature or 1.0,
                entropy_gradient=entropy_gradient,
            )

    def autocast(self) -> AbstractContextManager[object]:
        """Compute in the settings' dtype."""
        return torch.autocast(self.model.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)


def _choose_attention(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Use flash attention where it is installed and can be used: it is what makes packing pay."""
    from transformers.utils import is_flash_attn_2_available

    if model.device.type == "cuda" and dtype == torch.bfloat16 and is_flash_attn_2_available():
        model.set_attn_implementation("flash_attention_2")


def _resolve_packing(choice: str, model: PreTrainedModel) -> bool:
    flash = "flash" in str(model.config._attn_implementation)
    if choice == "off" or (choice == "auto" and not flash):
        return False
    if keeps_packed_apart(model):
        return True
    if choice == "on":
        raise ValueError(
            f"sequence_packing is on, but a {type(model).__name__} lets packed sequences see each other; give "
            f"auto or off"
        )
    return False


@torch.no_grad()
def keeps_packed_apart(model: PreTrainedModel) -> bool:
    """Whether two sequences in one line give the logits that each gives alone, tried on a few tokens.

    A model that carries a state along the line, or counts positions by itself, does not.
    """
    ids = torch.arange(1, 9, device=model.device).unsqueeze(0)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=model.device)
    try:
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.chunk(2, dim=1)], dim=1)
    except TypeError:  # a model without positions
        return False
    tolerance = 1e-3 if packed.dtype == torch.float32 else 5e-2
    return torch.allclose(packed.float(), alone.float(), rtol=tolerance, atol=tolerance)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only each layer's input and compute the layer again in the backward pass.

    transformers does so in training mode only, so the layers, and nothing in them, are put into it; whatever dropout
    a layer applies by itself is taken out, since the model must stay what the rollout engine has.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"gradient_checkpointing is on, but a {type(model).__name__} has no layers that can do it")
    for layer in layers:
        layer.training = True
        for name, value in vars(layer).items():
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)
