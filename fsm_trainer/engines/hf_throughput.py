"""How fast a step was: tokens a second, and model FLOPs utilisation (MFU) where the device's peak is known.

FLOPs of a step count forward and backward once, without what is computed again to save memory (Chowdhery et al. 2022,
appendix B):

    6 x trunk parameters x tokens + 6 x head parameters x tokens in the loss
    + 6 x layers x width x sum of squared sequence lengths

The last term is causal attention, half of the full square; width is heads x head dimension. With LoRA the
frozen weights have no gradient of their own, so 4 stands for the first two 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEAK_FLOPS: dict[str, dict[torch.dtype, float]] = {
    "B200": {torch.bfloat16: 2250e12, torch.float32: 75e12},
    "GH200": {torch.bfloat16: 989e12, torch.float32: 67e12},
    "H200": {torch.bfloat16: 989e12, torch.float32: 67e12},
    "H100 PCIe": {torch.bfloat16: 756e12, torch.float32: 51e12},
    "H100": {torch.bfloat16: 989e12, torch.float32: 67e12},
    "A100": {torch.bfloat16: 312e12, torch.float32: 19.5e12},
    "L40S": {torch.bfloat16: 362e12, torch.float32: 91.6e12},
    "L4": {torch.bfloat16: 121e12, torch.float32: 30.3e12},
    "A10": {torch.bfloat16: 125e12, torch.float32: 31.2e12},
}
"""Part of a device's name -> dense FLOP/s by the vendor's data sheet. The first that matches counts."""


@dataclass(frozen=True)
class ModelShape:
    """What the FLOPs of a step depend on."""

    trunk_parameters: int
    """Without the table of input embeddings, which is looked up and not multiplied."""
    head_parameters: int
    layers: int
    attention_width: int
    frozen: bool
    """Whether only adapters are trained."""


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Read a model's shape from its modules and configuration."""
    config = model.config.get_text_config(decoder=True)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables = {id(p): p.numel() for module in (embeddings, head) if module is not None for p in module.parameters()}
    total = sum(p.numel() for p in model.parameters())
    heads = getattr(config, "num_attention_heads", 0) or 0
    width = heads * (getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else 0))
    return ModelShape(
        trunk_parameters=total - sum(tables.values()),
        head_parameters=sum(p.numel() for p in head.parameters()) if head is not None else 0,
        layers=int(config.num_hidden_layers),
        attention_width=width,
        frozen=not all(p.requires_grad for p in model.parameters()),
    )


def step_flops(shape: ModelShape, lengths: Sequence[int], loss_tokens: int) -> float:
    """FLOPs of one step on sequences of these lengths (tokens); see the module's formula."""
    passes = 4.0 if shape.frozen else 6.0
    matrices = passes * (shape.trunk_parameters * sum(lengths) + shape.head_parameters * loss_tokens)
    return matrices + 6.0 * shape.layers * shape.attention_width * sum(length**2 for length in lengths)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s that a device is built for; None when it is not in the table."""
    return next((peaks.get(dtype) for part, peaks in PEAK_FLOPS.items() if part in device_name), None)


def speed_metrics(
    shape: ModelShape,
    lengths: Sequence[int],
    loss_tokens: int,
    seconds: float,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, float]:
    """`tokens_per_s` of all tokens of the step, and `mfu` (0 to 1) on a device whose peak is known."""
    metrics = {"tokens_per_s": sum(lengths) / seconds}
    peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
    if peak is not None:
        metrics["mfu"] = step_flops(shape, lengths, loss_tokens) / seconds / peak
    return metrics
