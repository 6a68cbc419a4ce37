"""What the transports that never leave the GPU share: which device it is, and vLLM's description of the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def cuda_device(tensors: dict[str, Tensor], transport: str) -> torch.device:
    """The one CUDA device that all tensors are on. Raises ValueError when there is none."""
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
        return device
    found = ", ".join(sorted(map(str, devices))) or "no device"
    raise ValueError(
        f"policy_sync_transport {transport} takes weights from one CUDA device, but they are on {found}; "
        f"train on a GPU or use shared-memory"
    )


def describe(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Names, dtypes and shapes, in order, as vLLM's update infos have them; ready for JSON."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
