"""Safetensors images of named tensors: their layout, tied tensors, the version in the metadata, and reading them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

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


def layout(tensors: dict[str, Tensor], aliases: dict[str, str], version: int) -> tuple[bytes, dict[str, int], int]:
    """The safetensors header, where each tensor's bytes start in the file in ascending order, and the file's size.

    Raises ValueError for a dtype that the format does not have.
    """
    notes = {"format": "pt", _VERSION: str(version), **{_ALIAS + name: first for name, first in aliases.items()}}
    entries: dict[str, object] = {"__metadata__": notes}
    starts: dict[str, int] = {}
    position = 0
    # Wide elements first keeps every tensor aligned without gaps, which the format forbids.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        end = position + tensor.nbytes
        dtype = _DTYPES.get(str(tensor.dtype))
        if dtype is None:
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected one of {', '.join(_DTYPES)}")
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        starts[name], position = position, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}, len(header) + position


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
        image: Any = safe_open(path, framework="pt")
    except OSError as error:
        raise ValueError(f"{gone}released, or their publisher died ({error})") from error
    except SafetensorError as error:
        raise ValueError(f"{gone}released, or cut off; no whole file of weights is there ({error})") from error
    # A descriptor's number is used again, so the place alone does not say which version is there.
    found = (image.metadata() or {}).get(_VERSION)
    if found != str(snapshot.version):
        raise ValueError(f"{gone}version {found} is there now; release versions only after loading")
    return image
