"""Weights broadcast over NCCL from the trainer's GPU to those of one vLLM engine, through vLLM's weight-transfer API.

Each load has a group of its own, the trainer's rank 0 and every rank of that engine: engines load at different moments,
and one that was started anew is met like any other. The trainer opens the group's store at a port of that load's own,
which `offer` puts into the snapshot: a load that an engine died in keeps its port until vLLM gives up.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.vllm_versions import weight_source
from fsm_trainer.engines.weight_sync.image import split_tied
from fsm_trainer.engines.weight_sync.on_device import cuda_device, describe
from fsm_trainer.engines.weight_sync.transport import NCCL, WeightTransport

if TYPE_CHECKING:
    from torch import Tensor

_ADDRESS = "127.0.0.1"
_BUFFERS = 2
"""Packed buckets under way at once: one is filled while the other is sent."""


@dataclass(frozen=True, eq=False)
class _Offer:
    """One load of one receiver; another one is another object."""

    version: int
    door: socket.socket
    """Keeps the port until the group's store listens there."""
    port: int


class NcclTransport(WeightTransport):
    """Keeps a copy of each version on the trainer's GPU and sends it to the engines of this machine."""

    def __init__(self, *, ranks: int, bucket_bytes: int) -> None:
        """Each engine has `ranks` GPUs; tensors are sent in packs of about `bucket_bytes`."""
        self._ranks, self._bucket_bytes = ranks, bucket_bytes
        self._lock = threading.Lock()
        self._published: dict[int, dict[str, Tensor]] = {}
        self._offers: dict[int, _Offer] = {}
        """The newest of each receiver."""
        self._senders: dict[int, Any] = {}
        """Of each receiver's newest offer, or of the one before while the newest has not met its engine."""

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
        """Copy the tensors. Raises ValueError if they are not on one CUDA device, OutOfMemoryError if that is full."""
        import torch

        tensors, _ = split_tied(named_tensors)  # as in a checkpoint, vLLM ties them itself
        device = cuda_device(tensors, NCCL)
        # vLLM packs them one after the other without gaps: wide elements first keeps each one aligned in its pack.
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())
        copies = {name: tensors[name].clone(memory_format=torch.contiguous_format) for name in order}
        torch.cuda.synchronize(device)
        self.release(version)
        with self._lock:
            self._published[version] = copies
        payload = encode(describe(copies), self._ranks, self._bucket_bytes)
        return Snapshot(version, f"tcp://{_ADDRESS}", sum(t.nbytes for t in copies.values()), NCCL, payload)

    def offer(self, snapshot: Snapshot, receiver: int) -> Snapshot:
        """The snapshot with a port for this load; an older offer to that engine is void. ValueError if it is released.

        OSError when no port is free.
        """
        door = _reserve_port()
        offer = _Offer(snapshot.version, door, door.getsockname()[1])
        with self._lock:
            if snapshot.version not in self._published:
                door.close()
                raise _gone(snapshot)
            # Only now, so that the older load's port is not taken again by this one.
            if (older := self._offers.get(receiver)) is not None:
                older.door.close()
            self._offers[receiver] = offer
        return at_port(snapshot, offer.port)

    def deliver(self, snapshot: Snapshot, receiver: int) -> None:
        """Meet the engine's ranks and broadcast to them. Raises ValueError for a released version.

        RuntimeError when the engine does not come within vLLM's time limit (300 s), or when `close` or a newer offer to
        that engine made this one void.
        """
        import torch
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = nccl_init_info(snapshot)
        del info["rank_offset"]  # the trainer's rank is 0
        offer, tensors = self._begin(snapshot, receiver, info["master_port"])
        with torch.cuda.device(cuda_device(tensors, NCCL)):
            try:
                sender = WeightTransferTrainerFactory.trainer_init(
                    NCCLTrainerInitInfo(**info, rank=0), client=_EngineTold(), source=weight_source(tensors)
                )
                self._register(sender, offer, receiver)
                sender.send_weights()
            finally:
                offer.door.close()
                tensors.clear()  # the group stays until the next load; a released version's memory must not
        with self._lock:
            if self._senders.get(receiver) is not sender:
                raise _given_up(snapshot.version, receiver)

    def release(self, version: int) -> None:
        """Drop the version's copy; offers of it are void."""
        with self._lock:
            self._published.pop(version, None)
            for receiver, offer in list(self._offers.items()):
                if offer.version == version:
                    self._offers.pop(receiver).door.close()

    def close(self) -> None:
        """Drop every copy; a broadcast under way is aborted and raises."""
        for version in list(self._published):
            self.release(version)
        with self._lock:
            senders = list(self._senders.values())
            self._senders.clear()
        for sender in senders:
            sender.shutdown()

    def _begin(self, snapshot: Snapshot, receiver: int, port: int) -> tuple[_Offer, dict[str, Tensor]]:
        """The offer that a delivery is of, and what is sent; the group of that engine's load before is ended."""
        with self._lock:
            tensors, offer = self._published.get(snapshot.version), self._offers.get(receiver)
            if tensors is None:
                raise _gone(snapshot)
            if offer is None or offer.port != port:
                raise _given_up(snapshot.version, receiver)
            last = self._senders.pop(receiver, None)
        # The engine has all of its last load by now, which the end of the broadcast alone does not say.
        if last is not None:
            last.shutdown()
        return offer, dict(tensors)

    def _register(self, sender: Any, offer: _Offer, receiver: int) -> None:
        """Note who sends, so that it can be ended; one whose offer is void by now is ended at once."""
        with self._lock:
            newest = self._offers.get(receiver) is offer
            if newest:
                self._senders[receiver] = sender
        if not newest:
            sender.shutdown()
            raise _given_up(offer.version, receiver)


def nccl_init_info(snapshot: Snapshot) -> dict[str, Any]:
    """What vLLM's `init_weight_transfer_engine` takes before each load, of a snapshot that was offered."""
    info: dict[str, Any] = json.loads(snapshot.payload)["init"]
    assert "master_port" in info, "a snapshot is offered before it is loaded"
    return info


def nccl_update_info(snapshot: Snapshot) -> dict[str, Any]:
    """What vLLM's `update_weights` takes: names, dtypes and shapes in the order of the broadcast."""
    info: dict[str, Any] = json.loads(snapshot.payload)["update"]
    return info


def encode(description: dict[str, Any], ranks: int, bucket_bytes: int) -> bytes:
    """A published snapshot's payload: who meets, how tensors are packed, and which come."""
    init = {
        "master_address": _ADDRESS,
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "packed": True,
        "packed_buffer_size_bytes": bucket_bytes,
        "packed_num_buffers": _BUFFERS,
    }
    return json.dumps({"init": init, "update": description}).encode()


def at_port(snapshot: Snapshot, port: int) -> Snapshot:
    """The snapshot of one load, which says at which port the trainer is met."""
    payload = json.loads(snapshot.payload)
    payload["init"]["master_port"] = port
    return replace(snapshot, payload=json.dumps(payload).encode())


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


def _gone(snapshot: Snapshot) -> ValueError:
    return ValueError(f"weights of version {snapshot.version} are gone: release versions only after loading")


def _given_up(version: int, receiver: int) -> RuntimeError:
    return RuntimeError(f"sending version {version} to engine {receiver} was given up")


def _reserve_port() -> socket.socket:
    """A bound socket that does not listen: nobody is given its port, but who asks to reuse one may listen there."""
    with ExitStack() as stack:
        door = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((_ADDRESS, 0))
        stack.pop_all()
    return door
