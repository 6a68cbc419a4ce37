"""The optimisers by name: AdamW in float32, or with its two moments in 8 bits through `bitsandbytes`.

8 bits save 6 bytes a trained parameter, three quarters of what AdamW keeps. They pay where that is what does not fit:
full training of a model of a billion parameters or more on one GPU. With LoRA there is next to nothing to save.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

OPTIMIZERS = ("adamw", "adamw-8bit")


def check_optimizer(name: str) -> None:
    """Raise ValueError for a name that is unknown, or one whose library is not installed."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer is {name!r}, expected one of {', '.join(OPTIMIZERS)}")
    if name == "adamw-8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("optimizer adamw-8bit needs the extra 'bitsandbytes': pip install 'fsm-trainer[bitsandbytes]'")


def make_optimizer(
    name: str,
    parameters: Sequence[torch.nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> torch.optim.Optimizer:
    """Build the optimiser over two groups: matrices with weight decay, norms and biases without.

    Shrinking norms and biases is no regularisation. 8-bit moments are quantised in blocks of 256 values; parameters of
    less than 4096 values keep theirs in float32 (Dettmers et al. 2022).
    """
    check_optimizer(name)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
    library: Any = importlib.import_module("bitsandbytes.optim")
    optimizer: torch.optim.Optimizer = library.AdamW8bit(groups, lr=lr, betas=betas)
    return optimizer
