"""Weights in GPU memory that an engine process on the same device maps: CUDA IPC, in the form of vLLM's `ipc` backend.

Each version is a copy of its own, since training goes on meanwhile. Copies are used again and never freed while the
process lives: torch counts the uses of an exported tensor, and one whose version no engine ever loaded would count as
used for ever. So the device holds as many copies as versions were ever published at once.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.image import split_tied
from fsm_trainer.engines.weight_sync.on_device import cuda_device, describe
from fsm_trainer.engines.weight_sync.transport import CUDA_IPC, WeightTransport

if TYPE_CHECKING:
    from torch import Tensor

_RELEASED = -1
_TENSOR_CLASS, _STORAGE_CLASS, _DTYPE, _DEVICE = 0, 4, 5, 6
"""Places among the 15 arguments of `rebuild_cuda_tensor`, which are a handle: what is known without it, and the number
of the device, which is not the same for sender and receiver."""


@dataclass(frozen=True)
class _Copy:
    """Exported tensors, the handle of each, and last in both which version they hold (int64, [])."""

    tensors: dict[str, Tensor]
    version: Tensor
    handles: list[tuple[Any, ...]]


class CudaIpcTransport(WeightTransport):
    """Publishes copies on the trained weights' own device."""

    def __init__(self) -> None:
        """Nothing is on the device before the first publish."""
        self._published: dict[int, _Copy] = {}
        self._free: list[_Copy] = []

    def publish(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> Snapshot:
        """Copy the tensors. Raises ValueError if they are not on one CUDA device, OutOfMemoryError if that is full."""
        import torch

        tensors, aliases = split_tied(named_tensors)
        device = cuda_device(tensors, CUDA_IPC)
        if not self._free:
            self._free.append(_export(tensors))
        copy = self._free[-1]
        assert describe(copy.tensors) == describe(tensors), "a run trains one set of tensors"
        for name, tensor in tensors.items():
            copy.tensors[name].copy_(tensor)
        copy.version.fill_(version)
        torch.cuda.synchronize(device)
        self._free.pop()
        self.release(version)
        self._published[version] = copy
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        return Snapshot(
            version, f"gpu {uuid}", nbytes, CUDA_IPC, encode(describe(tensors), aliases, uuid, copy.handles)
        )

    def release(self, version: int) -> None:
        """Let the version's copy be used again; who reads it must have copied by then."""
        import torch

        copy = self._published.pop(version, None)
        if copy is not None:
            copy.version.fill_(_RELEASED)
            torch.cuda.synchronize(copy.version.device)
            self._free.append(copy)

    def close(self) -> None:
        """Release every version; what engines still map is freed with this process."""
        for version in list(self._published):
            self.release(version)
        self._free.clear()


def ipc_update_info(snapshot: Snapshot) -> dict[str, Any]:
    """What vLLM's `update_weights` takes for the `ipc` backend, not packed.

    vLLM unpickles the handles only where VLLM_ALLOW_INSECURE_SERIALIZATION=1.
    """
    payload = json.loads(snapshot.payload)
    named = [{payload["uuid"]: handle} for handle in _handles(payload)[:-1]]
    pickled = base64.b64encode(pickle.dumps(named)).decode()
    return {**payload["tensors"], "ipc_handles_pickled": pickled}


def encode(
    description: dict[str, Any], aliases: dict[str, str], uuid: str, handles: Sequence[tuple[Any, ...]]
) -> bytes:
    """A snapshot's payload: the description, tied names, the device, and the handles, the version's last.

    Not pickled, since who can reach a server's workers could then run code there.
    """
    plain = [[_plain(place, value) for place, value in enumerate(handle)] for handle in handles]
    return json.dumps({"tensors": description, "aliases": aliases, "uuid": uuid, "handles": plain}).encode()


def _plain(place: int, value: Any) -> Any:
    if place in (_TENSOR_CLASS, _STORAGE_CLASS, _DTYPE):
        return None
    return {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value


def _handles(payload: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The handles of a payload as torch made them, for tensors and then the version."""
    import torch

    dtypes = [*(getattr(torch, name) for name in payload["tensors"]["dtype_names"]), torch.int64]
    handles = []
    for plain, dtype in zip(payload["handles"], dtypes, strict=True):
        known = {_TENSOR_CLASS: torch.Tensor, _STORAGE_CLASS: torch.storage.TypedStorage, _DTYPE: dtype}
        handles.append(tuple(known.get(place, _value(value)) for place, value in enumerate(plain)))
    return handles


def _value(plain: Any) -> Any:
    if isinstance(plain, dict):
        return base64.b64decode(plain["bytes"])
    return tuple(plain) if isinstance(plain, list) else plain


def read_handles(snapshot: Snapshot) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a snapshot, mapped, in another process than the publisher's that has its device.

    Raises ValueError when the device is not visible here, the publisher died, or another version is there by now.
    """
    from torch.multiprocessing import reductions

    rebuild: Any = reductions.rebuild_cuda_tensor  # has no types
    payload = json.loads(snapshot.payload)
    device = _device_number(payload["uuid"], snapshot.version)
    handles = _handles(payload)
    gone = f"weights of version {snapshot.version} are gone from {snapshot.location}: "
    try:
        *tensors, version = [rebuild(*handle[:_DEVICE], device, *handle[_DEVICE + 1 :]) for handle in handles]
        found = int(version)
    except RuntimeError as error:
        raise ValueError(f"{gone}their publisher died, or is this process ({error})") from error
    if found != snapshot.version:
        what = "they were released" if found == _RELEASED else f"version {found} is there now"
        raise ValueError(f"{gone}{what}; release versions only after loading")
    named = dict(zip(payload["tensors"]["names"], tensors, strict=True))
    yield from named.items()
    yield from ((alias, named[first]) for alias, first in payload["aliases"].items())


def _device_number(uuid: str, version: int) -> int:
    """The number that the device with that UUID has in this process."""
    import torch

    for number in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(number).uuid) == uuid:
            return number
    raise ValueError(
        f"weights of version {version} are on GPU {uuid}, which this engine does not have; "
        f"use another policy_sync_transport than {CUDA_IPC}"
    )


def _export(tensors: dict[str, Tensor]) -> _Copy:
    """Make room for a copy of the tensors, and handles of it."""
    import torch
    from torch.multiprocessing import reductions

    reduce: Any = reductions.reduce_tensor  # has no types
    device = next(iter(tensors.values())).device
    # All memory before any handle: what was exported is not freed again.
    copies = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in tensors.items()}
    version = torch.full((), _RELEASED, dtype=torch.int64, device=device)
    return _Copy(copies, version, [reduce(tensor)[1] for tensor in (*copies.values(), version)])
