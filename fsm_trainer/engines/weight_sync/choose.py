"""Which transport a run uses, and making it. Devices are plain names such as `cpu` and `cuda:1`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fsm_trainer.engines.weight_sync.transport import (
    CUDA_IPC,
    DIRECTORY,
    NCCL,
    SHARED_MEMORY,
    TRANSPORTS,
    WeightTransport,
)

AUTO = "auto"


def choose_transport(
    asked: str,
    *,
    train_device: str,
    rollout_devices: Sequence[str],
    engine: str,
    host: str,
    local_servers: bool = False,
) -> str:
    """The transport for `asked`, which may be auto.

    `rollout_devices` are those of all engines, whose kind is `engine` (hf, vllm, ...), and `host` is where they live
    (inline, process, server). `local_servers` says that servers are known to be on this machine. Raises ValueError when
    what is asked for cannot work.
    """
    if asked == AUTO:
        return _best(train_device, rollout_devices, engine, host, local_servers)
    if asked not in TRANSPORTS:
        raise ValueError(f"policy_sync_transport is {asked!r}, expected one of {', '.join((AUTO, *TRANSPORTS))}")
    obstacle = _obstacle(asked, train_device, rollout_devices, engine, host, local_servers)
    if obstacle is not None:
        raise ValueError(f"policy_sync_transport {asked} needs {obstacle}; use {AUTO}, or change that")
    return asked


def make_transport(
    name: str, *, bucket_bytes: int, directory: str | os.PathLike[str], ranks: int = 1
) -> WeightTransport:
    """The transport of that name. `directory` is for directory; `ranks`, the GPUs of each engine, for nccl."""
    if name == SHARED_MEMORY:
        from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(bucket_bytes=bucket_bytes)
    if name == DIRECTORY:
        from fsm_trainer.engines.weight_sync.directory import DirectoryTransport

        return DirectoryTransport(directory, bucket_bytes=bucket_bytes)
    if name == NCCL:
        from fsm_trainer.engines.weight_sync.nccl import NcclTransport

        return NcclTransport(ranks=ranks, bucket_bytes=bucket_bytes)
    assert name == CUDA_IPC, name
    from fsm_trainer.engines.weight_sync.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport()


def _best(train_device: str, rollout_devices: Sequence[str], engine: str, host: str, local_servers: bool) -> str:
    if host == "server" and not local_servers:
        return DIRECTORY
    # For engines on transformers a copy through the host is short beside a generation.
    for name in (CUDA_IPC, NCCL) if engine == "vllm" else ():
        if _obstacle(name, train_device, rollout_devices, engine, host, local_servers) is None:
            return name
    return SHARED_MEMORY


def _obstacle(
    name: str, train_device: str, rollout_devices: Sequence[str], engine: str, host: str, local_servers: bool
) -> str | None:
    """What is missing for a transport, in words; None when nothing is."""
    trainer, rollout = _normal(train_device), [_normal(device) for device in rollout_devices]
    if name == SHARED_MEMORY and host == "server" and not local_servers:
        return "every server on this machine (a base URL of localhost)"
    if name not in (NCCL, CUDA_IPC):
        return None
    if host != "process":
        return f"engines in processes that this run starts, but they are of rollout_host {host}"
    if name == CUDA_IPC and (not trainer.startswith("cuda") or any(device != trainer for device in rollout)):
        return f"all engines on the trainer's GPU, but it trains on {trainer} and generates on {', '.join(rollout)}"
    if name == NCCL and engine != "vllm":
        return f"the vllm engine, which the engine {engine} is not"
    if name == NCCL and not all(device.startswith("cuda") for device in (trainer, *rollout)):
        return f"GPUs on both sides, but it trains on {trainer} and generates on {', '.join(rollout)}"
    if name == NCCL and trainer in rollout:
        return f"other GPUs for the engines than the trainer's, but both have {trainer}"
    return None


def _normal(device: str) -> str:
    return "cuda:0" if device == "cuda" else device
