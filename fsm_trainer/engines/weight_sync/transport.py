"""What a weight transport does, and how a published version is read.

Knows nothing of models or engines: named tensors go in, named tensors come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from fsm_trainer.engines.base import Snapshot

if TYPE_CHECKING:
    from torch import Tensor

SHARED_MEMORY, DIRECTORY, NCCL, CUDA_IPC = TRANSPORTS = ("shared-memory", "directory", "nccl", "cuda-ipc")
"""The transports' names, as in `Snapshot.transport` and `--policy-sync-transport`."""
BUCKET_BYTES = 64 * 2**20
"""How much is copied at once by those that copy in buckets, unless told."""


class WeightTransport(Protocol):
    """Publishes versions of the weights for rollout engines, until they are released.

    A publish that fails leaves nothing behind. `offer` and `deliver` may be called by several threads at once, the rest
    by one.
    """

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
        """Copy the tensors out as `version` and say where they are; publishing a version again replaces it."""

    def offer(self, snapshot: Snapshot, receiver: int) -> Snapshot:
        """What engine `receiver` is given for this one load: the very snapshot where engines read by themselves."""
        return snapshot

    def deliver(self, snapshot: Snapshot, receiver: int) -> None:
        """Take the trainer's part in a load, while engine `receiver` loads what it was offered; return when it is done.

        There is none where engines read a snapshot by themselves.
        """
        return

    def release(self, version: int) -> None:
        """Free a published version; unknown or already released versions are ignored."""

    def close(self) -> None:
        """Free every version and give up deliveries under way."""


def read_snapshot(snapshot: Snapshot) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a snapshot, mapped rather than copied; copy what you keep.

    Nothing is yielded before all of it has been found. Raises ValueError when the snapshot was released, its publisher
    died, another version or part of one is there, or it cannot be read but only received (nccl).
    """
    # Here, since the readers know this module, and torch is needed by some of them.
    if snapshot.transport == SHARED_MEMORY:
        from fsm_trainer.engines.weight_sync.image import read_images

        return read_images([snapshot.location], snapshot)
    if snapshot.transport == DIRECTORY:
        from fsm_trainer.engines.weight_sync.directory import read_directory

        return read_directory(snapshot)
    if snapshot.transport == CUDA_IPC:
        from fsm_trainer.engines.weight_sync.cuda_ipc import read_handles

        return read_handles(snapshot)
    if snapshot.transport == NCCL:
        raise ValueError(
            f"weights of version {snapshot.version} are sent by nccl, which this engine cannot receive; "
            f"use another policy_sync_transport, or the vllm engine"
        )
    raise ValueError(f"transport {snapshot.transport!r} is unknown, expected one of {', '.join(TRANSPORTS)}")
