"""Weights in anonymous shared memory: one safetensors image per version, which engines on this machine map.

The image lives in a memfd, so engines in this process or another one map it without a copy of their own, and the
kernel frees it when the publisher dies, however it dies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.image import no_room, split_tied, write_image
from fsm_trainer.engines.weight_sync.transport import BUCKET_BYTES, SHARED_MEMORY, WeightTransport

if TYPE_CHECKING:
    from torch import Tensor


class SharedMemoryTransport(WeightTransport):
    """Publishes into memfds, one per version."""

    def __init__(self, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        """`bucket_bytes` is how much is copied off a GPU at once."""
        self._bucket_bytes = bucket_bytes
        self._fds: dict[int, int] = {}

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
        """Write one image. Raises OSError when there is no room for it."""
        tensors, aliases = split_tied(named_tensors)
        fd = os.memfd_create(f"fsm-weights-{version}")
        try:
            # Written rather than mapped: faster, and memory that is not there is an error instead of a SIGBUS.
            with open(fd, "wb", closefd=False) as file:
                size = write_image(file, tensors, aliases, version, self._bucket_bytes)
        except OSError as error:
            os.close(fd)
            raise no_room(error, tensors.values(), version, "of shared memory") from error
        except BaseException:
            os.close(fd)
            raise
        self.release(version)
        self._fds[version] = fd
        return Snapshot(version, f"/proc/{os.getpid()}/fd/{fd}", size, SHARED_MEMORY)

    def release(self, version: int) -> None:
        """Close the version's descriptor; readers that mapped it keep what they mapped."""
        fd = self._fds.pop(version, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Release every version."""
        for version in list(self._fds):
            self.release(version)
