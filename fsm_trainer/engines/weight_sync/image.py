"""Safetensors images of named tensors: writing and reading them, tied tensors, and the version in the metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.transport import DIRECTORY, SHARED_MEMORY

if TYPE_CHECKING:
    from torch import Tensor

_VERSION = "fsm.version"
_ALIAS = "fsm.alias."
_UNSEEN = {
    SHARED_MEMORY: "this process may not see the publisher's files (a container, another user, a tunnel): "
    "--policy-sync-transport directory, whose folder it must see by the same path",
    DIRECTORY: "this process may not see the run's folder (not on a file system that this machine shares, another "
    "user): let it read that folder by the same path",
}
"""By transport, what else it may be where no weights are found, and what to do."""
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


def no_room(error: OSError, tensors: Iterable[Tensor], version: int, where: str) -> OSError:
    """The system's error of a publish that failed, with what it was about, for users."""
    need = sum(tensor.nbytes for tensor in tensors) / 1e6
    return OSError(
        error.errno,
        f"{error.strerror}: the weights of version {version} need {need:.0f} MB {where}; free some, or use another "
        f"policy_sync_transport",
    )


def unreadable(error: OSError, place: str | os.PathLike[str], snapshot: Snapshot) -> ValueError:
    """The system's error of a read that failed, with what it was about, for users."""
    weights, unseen = f"weights of version {snapshot.version}", _UNSEEN[snapshot.transport]
    if isinstance(error, PermissionError):
        return ValueError(f"{weights} cannot be read from {place}: {unseen} ({error})")
    return ValueError(f"{weights} are gone from {place}: released, their publisher died, or {unseen} ({error})")


def split_tied(named_tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate the tensors to store, detached, from further names: {name: the name that it shares a tensor with}."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in named_tensors:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        first = seen.setdefault(place, name) if tensor.numel() else name
        if first == name:
            tensors[name] = tensor.detach()
        else:
            aliases[name] = first
    return tensors, aliases


def write_image(
    file: IO[bytes], tensors: dict[str, Tensor], aliases: dict[str, str], version: int, bucket_bytes: int
) -> int:
    """Write the tensors and their further names as one image; returns its size in bytes.

    At most a bucket is copied off a GPU at once. Raises ValueError for a dtype that the format does not have.
    """
    header, order = _layout(tensors, aliases, version)
    file.write(header)
    for name in order:
        _write_tensor(file, tensors[name], bucket_bytes)
    return len(header) + sum(tensor.nbytes for tensor in tensors.values())


def _layout(tensors: dict[str, Tensor], aliases: dict[str, str], version: int) -> tuple[bytes, list[str]]:
    """The safetensors header, and the order of the tensors behind it."""
    notes = {"format": "pt", _VERSION: str(version), **{_ALIAS + name: first for name, first in aliases.items()}}
    entries: dict[str, object] = {"__metadata__": notes}
    # Wide elements first keeps every tensor aligned without gaps, which the format forbids.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    position = 0
    for name in order:
        tensor = tensors[name]
        dtype = _DTYPES.get(str(tensor.dtype))
        if dtype is None:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(_DTYPES)}")
        end = position + tensor.nbytes
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _write_tensor(file: IO[bytes], tensor: Tensor, bucket_bytes: int) -> None:
    """Write a tensor's bytes in row-major order; from a GPU through page-locked memory, which is read fastest."""
    import torch

    flat = tensor.reshape(-1)
    step = max(1, bucket_bytes // tensor.element_size())
    staging = torch.empty(min(step, len(flat)), dtype=tensor.dtype, pin_memory=True) if tensor.is_cuda else None
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        if staging is not None:
            part = staging[: len(part)].copy_(part)
        file.write(part.view(torch.uint8).numpy().data)


def read_images(
    paths: Sequence[str], snapshot: Snapshot, expected: Sequence[frozenset[str]] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one version's images, mapped, after all have been found whole and of that version.

    `expected` are the names that each image stores. Raises ValueError otherwise.
    """
    with ExitStack() as stack:
        images = [stack.enter_context(_open_image(path, snapshot)) for path in paths]
        for path, image, names in zip(paths, images, expected or (), strict=expected is not None):
            if set(image.keys()) != names:
                raise ValueError(f"weights of version {snapshot.version} are incomplete: {path} holds other tensors")
        for image in images:
            for name in image.keys():  # noqa: SIM118  (not a dict)
                yield name, image.get_tensor(name)
            for key, first in (image.metadata() or {}).items():
                if key.startswith(_ALIAS):
                    yield key.removeprefix(_ALIAS), image.get_tensor(first)


def _open_image(path: str, snapshot: Snapshot) -> Any:
    from safetensors import SafetensorError, safe_open

    gone = f"weights of version {snapshot.version} are gone from {path}: "
    try:
        # safetensors says of whatever it cannot open that it is not there.
        with open(path, "rb"):
            image: Any = safe_open(path, framework="pt")
    except OSError as error:
        raise unreadable(error, path, snapshot) from error
    except SafetensorError as error:
        # In a container the publisher's number may be that of another process, and this a file of that one.
        unseen = _UNSEEN[snapshot.transport]
        raise ValueError(
            f"{gone}released, cut off, or {unseen}; no whole file of weights is there ({error})"
        ) from error
    # A descriptor's number is used again, so the place alone does not say which version is there.
    found = (image.metadata() or {}).get(_VERSION)
    if found != str(snapshot.version):
        raise ValueError(f"{gone}version {found} is there now; release versions only after loading")
    return image
