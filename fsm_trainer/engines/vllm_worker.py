"""What runs inside vLLM's own workers: reading a published snapshot into the live model.

vLLM mixes this class into its worker (`worker_extension_cls`), so `self` is a worker. It imports nothing of vLLM.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from fsm_trainer.engines.base import EngineLost, Snapshot
from fsm_trainer.engines.weight_sync.transport import read_snapshot

if TYPE_CHECKING:
    from torch import Tensor

PATH = f"{__name__}.WeightReceiver"
"""How vLLM finds the class."""
METHOD = "fsm_load_weights"
"""The method as `collective_rpc` names it."""
SHAPE_METHOD = "fsm_model_shape"
"""The method that says what model is served."""
REPORT = ("nbytes", "error", "half_loaded")
"""What the one that loads returns."""
_SHAPE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
HALF_LOADED = "an earlier load of weights ended part way"
MUST_RESTART = "vLLM cannot be mended, and must be started anew"
_log = logging.getLogger(__name__)


def written(snapshot: Snapshot) -> str:
    """A snapshot as text, for `collective_rpc`: a server takes nothing else."""
    fields = {**vars(snapshot), "payload": base64.b64encode(snapshot.payload).decode()}
    return json.dumps(fields)


def model_shape(config: Any) -> dict[str, int]:
    """The sizes of a model's configuration (transformers' own) by which others than its weights do not fit."""
    text = config.get_text_config()
    return {name: int(getattr(text, name)) for name in _SHAPE if isinstance(getattr(text, name, None), int)}


def bytes_read(results: Sequence[Mapping[str, Any]]) -> int:
    """The bytes that each worker read, from what their `fsm_load_weights` returned.

    ValueError when a worker did not load and can be asked again, EngineLost when it cannot.
    """
    for result in results:
        if (error := result["error"]) is not None:
            raise EngineLost(f"{error}; {MUST_RESTART}") if result["half_loaded"] else ValueError(error)
    return int(results[0]["nbytes"])


class WeightReceiver:
    """The worker's side of the transports that are read by the one who loads."""

    fsm_half_loaded = False
    """Whether a load ended part way: vLLM has taken its model apart then, and cannot put it together again."""

    def fsm_model_shape(self) -> dict[str, int]:
        """Sizes of the model that is served, and whether it is whole."""
        worker: Any = self
        return {**model_shape(worker.model_config.hf_config), "half_loaded": self.fsm_half_loaded}

    def fsm_load_weights(self, snapshot: str) -> dict[str, Any]:
        """Replace the model's weights by a snapshot's, layer by layer; returns the bytes read, or what went wrong.

        Through `reload_weights`, because a live model's weights are repacked for its kernels and cannot be written to.
        """
        if self.fsm_half_loaded:
            return self._fsm_report(0, HALF_LOADED)
        fields = json.loads(snapshot)
        counter = _Counter(Snapshot(**{**fields, "payload": base64.b64decode(fields["payload"])}))
        worker: Any = self
        try:
            # vLLM takes its model apart before it reads: what cannot be read at all is to leave the old one whole.
            tensors = iter(counter)
            first = list(islice(tensors, 1))
            worker.reload_weights(weights_iterator=chain(first, tensors))
        except Exception as error:
            # Told instead of raised, because of most errors vLLM passes nothing on.
            self.fsm_half_loaded = counter.nbytes > 0
            if isinstance(error, ValueError) and not self.fsm_half_loaded:
                return self._fsm_report(0, str(error))  # the snapshot could not be read
            _log.exception("loading weights failed")
            version, said = fields["version"], " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
            return self._fsm_report(counter.nbytes, f"vLLM cannot load the weights of version {version}: {said}")
        return self._fsm_report(counter.nbytes, None)

    def _fsm_report(self, nbytes: int, error: str | None) -> dict[str, Any]:
        return {"nbytes": nbytes, "error": error, "half_loaded": self.fsm_half_loaded}


class _Counter:
    """The tensors of a snapshot, and how many bytes of them were taken."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.nbytes = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_snapshot(self._snapshot):
            self.nbytes += tensor.nbytes
            yield name, tensor
