"""Weights in anonymous shared memory: one safetensors image per version, which engines on this machine map.

The image lives in a memfd, so engines in this process or another one map it without a copy of their own, and the
kernel frees it when the publisher dies, however it dies.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.image import layout, split_tied
from fsm_trainer.engines.weight_sync.transport import SHARED_MEMORY, WeightTransport

if TYPE_CHECKING:
    from torch import Tensor


class SharedMemoryTransport(WeightTransport):
    """Publishes into memfds (a temporary file where the system has none), one per version."""

    def __init__(self, *, use_memfd: bool | None = None) -> None:
        """Use memfds if the system has them, unless told."""
        self._use_memfd = hasattr(os, "memfd_create") if use_memfd is None else use_memfd
        self._fds: dict[int, int] = {}

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
        """Write one image. Raises OSError when there is no room for it."""
        tensors, aliases = split_tied(named_tensors)
        header, offsets, size = layout(tensors, aliases, version)
        fd = self._open(version)
        try:
            _reserve(fd, size, version)
            _write_image(fd, header, tensors, offsets, size)
        except BaseException:
            os.close(fd)
            raise
        self.release(version)
        self._fds[version] = fd
        return Snapshot(version, f"/proc/{os.getpid()}/fd/{fd}", size, SHARED_MEMORY)

    def deliver(self, snapshot: Snapshot, receiver: int) -> None:
        """Nothing: engines map the image by themselves."""

    def release(self, version: int) -> None:
        """Close the version's descriptor; readers that mapped it keep what they mapped."""
        fd = self._fds.pop(version, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Release every version."""
        for version in list(self._fds):
            self.release(version)

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions that can be read now, in ascending order."""
        return tuple(sorted(self._fds))

    def _open(self, version: int) -> int:
        if self._use_memfd:
            return os.memfd_create(f"fsm-weights-{version}")
        # Unlinked at once, so that this one too is gone with its last descriptor.
        fd, path = tempfile.mkstemp(prefix=f"fsm-weights-{version}-")
        os.unlink(path)
        return fd


def _reserve(fd: int, size: int, version: int) -> None:
    """Give the file its size and all its memory: a mapping that finds none while it is written is a SIGBUS."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        what = f"{error.strerror}: the weights of version {version} need {size / 1e6:.0f} MB of shared memory"
        raise OSError(error.errno, f"{what}; free some, or use another policy_sync_transport") from error


def _write_image(fd: int, header: bytes, tensors: dict[str, Tensor], offsets: dict[str, int], size: int) -> None:
    """Copy the tensors straight into the mapped file: one copy, whatever device they are on."""
    import torch

    with mmap.mmap(fd, size) as image:
        image[: len(header)] = header
        for name, tensor in tensors.items():
            if tensor.numel():
                view = torch.frombuffer(image, dtype=tensor.dtype, count=tensor.numel(), offset=offsets[name])
                view.view(tensor.shape).copy_(tensor)
                del view  # An mmap with a view on it cannot be closed.
