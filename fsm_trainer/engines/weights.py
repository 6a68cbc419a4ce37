"""How trained weights reach the rollout engines: one safetensors image per version, in anonymous shared memory.

The image lives in a memfd, so engines in this process or another one map it without a copy of their own, and the
kernel frees it when the publisher dies, however it dies. Knows nothing of models: it carries named tensors.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from fsm_trainer.engines.base import Snapshot

if TYPE_CHECKING:
    from torch import Tensor

_VERSION = "fsm.version"
_ALIAS = "fsm.alias."
_DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


class WeightTransport(Protocol):
    """Publishes versions of the weights for others to read, until they are released."""

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
        """Copy the tensors out as `version` and say where they can be read."""

    def release(self, version: int) -> None:
        """Free a published version; unknown or already released versions are ignored."""

    def close(self) -> None:
        """Free every version."""


class SharedMemoryTransport:
    """Publishes into memfds (a temporary file where the system has none), one per version."""

    def __init__(self, *, use_memfd: bool | None = None) -> None:
        """Use memfds if the system has them, unless told."""
        self._use_memfd = hasattr(os, "memfd_create") if use_memfd is None else use_memfd
        self._fds: dict[int, int] = {}

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
        """Write one image; publishing a version again replaces it."""
        tensors, aliases = _split_tied(named_tensors)
        header, offsets, size = _layout(tensors, {_VERSION: str(version), **aliases})
        fd = self._open(version)
        try:
            _write_image(fd, header, tensors, offsets, size)
        except BaseException:
            os.close(fd)
            raise
        self.release(version)
        self._fds[version] = fd
        return Snapshot(version, f"/proc/{os.getpid()}/fd/{fd}", size)

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


def read_snapshot(snapshot: Snapshot) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a snapshot, mapped rather than copied; copy what you keep.

    Raises ValueError when the snapshot has been released or its publisher has died.
    """
    from safetensors import SafetensorError, safe_open

    gone = f"weights of version {snapshot.version} are gone from {snapshot.location}: "
    try:
        image: Any = safe_open(snapshot.location, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{gone}released, or their publisher died ({error})") from error
    with image:
        metadata = image.metadata() or {}
        # A descriptor's number is used again, so the place alone does not say which version is there.
        if metadata.get(_VERSION) != str(snapshot.version):
            raise ValueError(
                f"{gone}version {metadata.get(_VERSION)} is there now; release versions only after loading"
            )
        for name in image.keys():  # noqa: SIM118  (not a dict)
            yield name, image.get_tensor(name)
        for key, original in metadata.items():
            if key.startswith(_ALIAS):
                yield key.removeprefix(_ALIAS), image.get_tensor(original)


def _split_tied(named_tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate the tensors to store from names that share one already stored."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in named_tensors:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        first = seen.setdefault(place, name) if tensor.numel() else name
        if first == name:
            tensors[name] = tensor.detach()
        else:
            aliases[_ALIAS + name] = first
    return tensors, aliases


def _layout(tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return the safetensors header, where each tensor's bytes start in the file, and the file's size."""
    entries: dict[str, object] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    position = 0
    # Wide elements first keeps every tensor aligned without gaps, which the format forbids.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        end = position + tensor.numel() * tensor.element_size()
        dtype = _DTYPES.get(str(tensor.dtype))
        if dtype is None:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(_DTYPES)}")
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        starts[name], position = position, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + position


def _write_image(fd: int, header: bytes, tensors: dict[str, Tensor], offsets: dict[str, int], size: int) -> None:
    """Copy the tensors straight into the mapped file: one copy, whatever device they are on."""
    import torch

    os.ftruncate(fd, size)
    with mmap.mmap(fd, size) as image:
        image[: len(header)] = header
        for name, tensor in tensors.items():
            if tensor.numel():
                view = torch.frombuffer(image, dtype=tensor.dtype, count=tensor.numel(), offset=offsets[name])
                view.view(tensor.shape).copy_(tensor)
                del view  # An mmap with a view on it cannot be closed.
