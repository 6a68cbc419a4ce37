"""What runs inside vLLM's own workers: reading a published snapshot into the live model.

vLLM mixes this class into its worker (`worker_extension_cls`), so `self` is a worker. It imports nothing of vLLM.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.transport import read_snapshot

if TYPE_CHECKING:
    from torch import Tensor

PATH = f"{__name__}.WeightReceiver"
"""How vLLM finds the class."""
METHOD = "fsm_load_weights"
"""The method as `collective_rpc` names it."""


def written(snapshot: Snapshot) -> str:
    """A snapshot as text, for `collective_rpc`: a server takes nothing else."""
    fields = {**vars(snapshot), "payload": base64.b64encode(snapshot.payload).decode()}
    return json.dumps(fields)


class WeightReceiver:
    """The worker's side of the transports that are read by the one who loads."""

    def fsm_load_weights(self, snapshot: str) -> int:
        """Replace the model's weights by a snapshot's, layer by layer; returns the bytes read.

        Through `reload_weights`, because a live model's weights are repacked for its kernels and cannot be written to.
        """
        fields = json.loads(snapshot)
        counter = _Counter(Snapshot(**{**fields, "payload": base64.b64decode(fields["payload"])}))
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(counter))
        return counter.nbytes


class _Counter:
    """The tensors of a snapshot, and how many bytes of them were taken."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.nbytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_snapshot(self._snapshot):
            self.nbytes += tensor.nbytes
            yield name, tensor
