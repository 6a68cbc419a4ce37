"""Weights broadcast over NCCL from the trainer's GPU to those of one vLLM engine, through vLLM's weight-transfer API.

Each load has a group of its own, the trainer's rank 0 and every rank of that engine: engines load at different moments,
and one that was started anew is met like any other. The trainer opens the group's store at a port that the snapshot
names.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.vllm_versions import weight_source
from fsm_trainer.engines.weight_sync.image import split_tied
from fsm_trainer.engines.weight_sync.on_device import cuda_device, describe
from fsm_trainer.engines.weight_sync.transport import BUCKET_BYTES, NCCL, WeightTransport

if TYPE_CHECKING:
    from torch import Tensor

_ADDRESS = "127.0.0.1"
_BUFFERS = 2
"""Packed buckets under way at once: one is filled while the other is sent."""


@dataclass(frozen=True)
class _Published:
    tensors: dict[str, Tensor]
    doors: list[socket.socket]
    """Sockets that keep a port for each receiver until the group's store listens there."""


class NcclTransport(WeightTransport):
    """Keeps a copy of each version on the trainer's GPU and sends it to the engines of this machine."""

    def __init__(self, *, receivers: int, ranks: int, bucket_bytes: int = BUCKET_BYTES) -> None:
        """There are `receivers` engines of `ranks` GPUs each; tensors are sent in packs of about `bucket_bytes`."""
        self._receivers, self._ranks, self._bucket_bytes = receivers, ranks, bucket_bytes
        self._published: dict[int, _Published] = {}
        self._lock = threading.Lock()
        self._senders: dict[int, Any] = {}

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
        """Copy the tensors. Raises ValueError if they are not on one CUDA device, OutOfMemoryError if that is full."""
        import torch

        tensors, _ = split_tied(named_tensors)  # as in a checkpoint, vLLM ties them itself
        device = cuda_device(tensors, NCCL)
        # vLLM packs them one after the other without gaps: wide elements first keeps each one aligned in its pack.
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())
        copies = {name: tensors[name].clone(memory_format=torch.contiguous_format) for name in order}
        torch.cuda.synchronize(device)
        doors = _reserve_ports(self._receivers)
        self.release(version)
        self._published[version] = _Published(copies, doors)
        payload = encode(describe(copies), [door.getsockname()[1] for door in doors], self._ranks, self._bucket_bytes)
        return Snapshot(version, f"tcp://{_ADDRESS}", sum(t.nbytes for t in copies.values()), NCCL, payload)

    def deliver(self, snapshot: Snapshot, receiver: int) -> None:
        """Meet the engine's ranks and broadcast to them. Raises ValueError for a released version.

        RuntimeError when the engine does not come within vLLM's time limit (300 s), or when `close` or a newer load of
        that engine ended it.
        """
        import torch
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        published = self._published.get(snapshot.version)
        if published is None:
            raise ValueError(f"weights of version {snapshot.version} are gone: release versions only after loading")
        info = nccl_init_info(snapshot, receiver)
        del info["rank_offset"]  # the trainer's rank is 0
        # The engine has all of its last load by now, which the end of the broadcast alone does not say.
        self._drop(receiver)
        tensors = dict(published.tensors)
        with torch.cuda.device(cuda_device(tensors, NCCL)):
            sender = WeightTransferTrainerFactory.trainer_init(
                NCCLTrainerInitInfo(**info, rank=0), client=_EngineTold(), source=weight_source(tensors)
            )
            with self._lock:
                self._senders[receiver] = sender
            try:
                sender.send_weights()
            finally:
                tensors.clear()  # the group stays until the next load; a released version's memory must not
        with self._lock:
            if self._senders.get(receiver) is not sender:
                raise RuntimeError(f"sending version {snapshot.version} to engine {receiver} was given up")

    def release(self, version: int) -> None:
        """Drop the version's copy."""
        published = self._published.pop(version, None)
        for door in published.doors if published is not None else ():
            door.close()

    def close(self) -> None:
        """Drop every copy; a broadcast under way is aborted and raises."""
        for version in list(self._published):
            self.release(version)
        for receiver in list(self._senders):
            self._drop(receiver)

    def _drop(self, receiver: int) -> None:
        with self._lock:
            sender = self._senders.pop(receiver, None)
        if sender is not None:
            sender.shutdown()


def nccl_init_info(snapshot: Snapshot, receiver: int) -> dict[str, Any]:
    """What vLLM's `init_weight_transfer_engine` takes in engine `receiver`, before each load."""
    payload = json.loads(snapshot.payload)
    return {**payload["init"], "master_port": payload["ports"][receiver]}


def nccl_update_info(snapshot: Snapshot) -> dict[str, Any]:
    """What vLLM's `update_weights` takes: names, dtypes and shapes in the order of the broadcast."""
    info: dict[str, Any] = json.loads(snapshot.payload)["update"]
    return info


def encode(description: dict[str, Any], ports: list[int], ranks: int, bucket_bytes: int) -> bytes:
    """A snapshot's payload: where each receiver meets the trainer, how tensors are packed, and which come."""
    init = {
        "master_address": _ADDRESS,
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "packed": True,
        "packed_buffer_size_bytes": bucket_bytes,
        "packed_num_buffers": _BUFFERS,
    }
    return json.dumps({"init": init, "ports": ports, "update": description}).encode()


class _EngineTold:
    """vLLM's client of an engine, for one that is told by its own `load_weights` what to do meanwhile."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Nothing to tell."""

    def start_weight_update(self) -> None:
        """Nothing to tell."""

    def update_weights(self, update_info: Any) -> None:
        """Nothing to tell."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Nothing to tell."""


def _reserve_ports(count: int) -> list[socket.socket]:
    """Bound sockets that do not listen: nobody is given their ports, but who asks to reuse one may listen there."""
    with ExitStack() as stack:
        doors = []
        for _ in range(count):
            door = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            door.bind((_ADDRESS, 0))
            doors.append(door)
        stack.pop_all()
    return doors
