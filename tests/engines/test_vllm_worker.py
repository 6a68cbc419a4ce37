"""What runs inside vLLM's workers: a snapshot is read into the model, and a load that ends part way is remembered."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config

from fsm_trainer.engines.base import EngineLost, Snapshot
from fsm_trainer.engines.vllm_worker import METHOD, PATH, SHAPE_METHOD, WeightReceiver, bytes_read, model_shape, written
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
NBYTES = 24 + 10


class Worker(WeightReceiver):
    """As vLLM makes one of its own class and this."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.refuses: str | None = None
        self.whole = True

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.whole = False  # vLLM takes its model apart first
        for name, tensor in weights_iterator:
            if name == self.refuses:
                raise AssertionError
            self.loaded[name] = tensor.clone()
        self.whole = True


@pytest.fixture
def snapshot() -> Iterator[Snapshot]:
    transport = SharedMemoryTransport()
    yield transport.publish(TENSORS.items(), 4)
    transport.close()


def test_the_class_and_its_method_are_where_vllm_is_told_to_look() -> None:
    module, _, name = PATH.rpartition(".")
    assert (module, name) == (WeightReceiver.__module__, WeightReceiver.__name__)
    assert callable(getattr(WeightReceiver, METHOD))


def test_a_worker_says_the_sizes_of_its_model() -> None:
    worker, config = Worker(), Qwen3Config(vocab_size=20, hidden_size=64, num_hidden_layers=2)
    worker.model_config = SimpleNamespace(hf_config=config)  # type: ignore[attr-defined]
    shape = getattr(worker, SHAPE_METHOD)()
    assert shape == {**model_shape(config), "half_loaded": False}
    assert (shape["vocab_size"], shape["hidden_size"], shape["num_hidden_layers"]) == (20, 64, 2)


def test_a_snapshot_crosses_as_text_and_is_read_whole(snapshot: Snapshot) -> None:
    worker = Worker()
    assert bytes_read([worker.fsm_load_weights(written(snapshot))]) == NBYTES
    assert worker.loaded.keys() == TENSORS.keys()
    assert all(torch.equal(worker.loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_snapshot_that_is_gone_can_be_followed_by_a_good_one(snapshot: Snapshot) -> None:
    worker = Worker()
    with pytest.raises(ValueError, match="weights of version 9 are gone"):
        bytes_read([worker.fsm_load_weights(written(Snapshot(9, "/proc/self/fd/9999", 1)))])
    assert worker.whole, "or a server would die of whatever it is asked next"
    assert bytes_read([worker.fsm_load_weights(written(snapshot))]) == NBYTES


def test_a_load_that_ends_part_way_is_the_last(snapshot: Snapshot) -> None:
    worker = Worker()
    worker.refuses = "b"
    with pytest.raises(EngineLost, match="^vLLM cannot load the weights of version 4: AssertionError; .*started anew$"):
        bytes_read([worker.fsm_load_weights(written(snapshot))])
    worker.refuses = None
    worker.model_config = SimpleNamespace(hf_config=Qwen3Config())  # type: ignore[attr-defined]
    assert worker.fsm_model_shape()["half_loaded"]
    with pytest.raises(EngineLost, match="^an earlier load of weights ended part way; .*started anew$"):
        bytes_read([worker.fsm_load_weights(written(snapshot))])


def test_one_worker_of_several_that_fails_fails_the_load(snapshot: Snapshot) -> None:
    good, bad = Worker(), Worker()
    bad.refuses = "a"
    results: list[dict[str, Any]] = [worker.fsm_load_weights(written(snapshot)) for worker in (good, bad)]
    with pytest.raises(EngineLost, match="cannot load the weights"):
        bytes_read(results)
