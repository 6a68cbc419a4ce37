"""vLLM's own weight-transfer classes at both ends of our GPU transports, on a machine without a GPU.

Real are vLLM's rendezvous, packing, unpacking, checks and info classes; CUDA's streams are left out, and the
communicator sends what it is given through the store of the group.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync import cuda_ipc, nccl
from fsm_trainer.engines.weight_sync.on_device import describe

BUCKET = 1000
TENSORS = {
    "embed": torch.arange(700.0),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "half": torch.ones(301, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "wide": torch.arange(200, dtype=torch.float64),
}


class Model:
    """Takes weights as vLLM's models do."""

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        self.loaded.update({name: tensor.clone() for name, tensor in weights})


class OverStore:
    """In place of vLLM's NCCL communicator."""

    sent: list[int] = []  # noqa: RUF012
    on_send: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, group: Any, device: Any) -> None:
        self._group, self.available, self.disabled = group, True, False

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        if self._group.rank == src:
            self.sent.append(tensor.nbytes)
            self.on_send()
        tensor.copy_(self._group.broadcast(tensor, src))

    def destroy(self) -> None:
        self._group = None


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> type[OverStore]:
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import packed_tensor

    streams = (SimpleNamespace(synchronize=lambda: None),) * 2
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda device, count: streams[:count])
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", OverStore)
    monkeypatch.setattr(nccl, "cuda_device", lambda tensors, transport: torch.device("cpu"))
    monkeypatch.setattr(OverStore, "sent", [])
    return OverStore


def worker(rank: int, ranks: int, model: Model, device: str = "cpu") -> Any:
    """What vLLM's weight-transfer engines ask of their worker."""
    parallel = SimpleNamespace(data_parallel_index=0, world_size=ranks, rank=rank)
    return None, SimpleNamespace(parallel_config=parallel, model_config=None), torch.device(device), model


def load(transport: nccl.NcclTransport, snapshot: Snapshot, receiver: int, ranks: int) -> list[dict[str, Tensor]]:
    """One load by an engine that has just been started; returns what each of its ranks got."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    offered = transport.offer(snapshot, receiver)

    def receive(rank: int) -> dict[str, Tensor]:
        model = Model()
        engine = NCCLWeightTransferEngine(*worker(rank, ranks, model))
        engine.init_transfer_engine(engine.parse_init_info(nccl.nccl_init_info(offered)))
        engine.update_weights(nccl.nccl_update_info(offered))
        engine.shutdown()
        return model.loaded

    with ThreadPoolExecutor(ranks) as pool:
        received = [pool.submit(receive, rank) for rank in range(ranks)]
        transport.deliver(offered, receiver)
        return [each.result() for each in received]


def check(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


def test_every_rank_of_an_engine_gets_every_tensor_in_buckets(no_gpu: type[OverStore]) -> None:
    transport = nccl.NcclTransport(ranks=2, bucket_bytes=BUCKET)
    snapshot = transport.publish([*TENSORS.items(), ("tied", TENSORS["embed"])], 1)
    for receiver in (0, 1):
        no_gpu.sent.clear()
        for got in load(transport, snapshot, receiver, ranks=2):
            check(got, TENSORS)
        # By hand: wide elements first, and a pack ends with the tensor that takes it past 1000 bytes.
        assert no_gpu.sent == [1600, 2800, 24 + 4 + 0 + 602]
    transport.close()


def test_a_later_version_and_an_engine_started_anew_are_met_like_the_first(no_gpu: type[OverStore]) -> None:
    transport = nccl.NcclTransport(ranks=1, bucket_bytes=BUCKET)
    first = transport.publish(TENSORS.items(), 1)
    for _ in range(2):
        check(*load(transport, first, 0, ranks=1), TENSORS)
    offered = transport.offer(first, 0)
    transport.release(1)
    with pytest.raises(ValueError, match="version 1 are gone"):
        transport.deliver(offered, 0)
    newer = {name: tensor + 1 for name, tensor in TENSORS.items()}
    check(*load(transport, transport.publish(newer.items(), 2), 0, ranks=1), newer)
    transport.close()


def test_a_load_that_an_engine_died_in_leaves_the_next_one_alone(
    no_gpu: type[OverStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed import utils
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    waits = threading.Event()
    make_store = utils.create_tcp_store

    def create_tcp_store(*args: Any, **more: Any) -> Any:
        waits.set()  # the trainer's end listens by now
        return make_store(*args, **more)

    monkeypatch.setattr(utils, "create_tcp_store", create_tcp_store)
    transport = nccl.NcclTransport(ranks=1, bucket_bytes=BUCKET)
    snapshot = transport.publish(TENSORS.items(), 1)
    lost = transport.offer(snapshot, 0)
    with ThreadPoolExecutor(1) as pool:
        delivery = pool.submit(transport.deliver, lost, 0)
        assert waits.wait(60)
        # The restarted engine loads the same version.
        check(*load(transport, snapshot, 0, ranks=1), TENSORS)
        sender = transport._senders[0]
        assert not delivery.done()
        late = NCCLWeightTransferEngine(*worker(0, 1, Model()))
        late.init_transfer_engine(late.parse_init_info(nccl.nccl_init_info(lost)))
        with pytest.raises(RuntimeError, match="sending version 1 to engine 0 was given up"):
            delivery.result(60)
        late.shutdown()
    assert transport._senders == {0: sender} and sender.model_update_group is not None
    with pytest.raises(RuntimeError, match="sending version 1 to engine 0 was given up"):
        transport.deliver(lost, 0)
    assert transport._senders == {0: sender}
    check(*load(transport, snapshot, 0, ranks=1), TENSORS)
    transport.close()


def test_closing_ends_a_delivery_with_an_error(no_gpu: type[OverStore], monkeypatch: pytest.MonkeyPatch) -> None:
    transport = nccl.NcclTransport(ranks=1, bucket_bytes=BUCKET)
    snapshot = transport.publish(TENSORS.items(), 1)
    closes = iter([transport.close])
    monkeypatch.setattr(no_gpu, "on_send", staticmethod(lambda: next(closes, lambda: None)()))
    monkeypatch.setattr(no_gpu, "destroy", lambda self: None)
    with pytest.raises(RuntimeError, match="sending version 1 to engine 0 was given up"):
        load(transport, snapshot, 0, ranks=1)


def test_vllms_ipc_engine_takes_our_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import ipc_engine

    def rebuild(*args: Any) -> Tensor:
        assert args[6] == 1, "the receiver's number of the device"
        return list(TENSORS.values())[args[7][0]]

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(ipc_engine, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=f"GPU-{n}"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    handles = [(None, (1,), (1,), 0, None, None, 0, bytes([n]), *range(7)) for n in range(len(TENSORS) + 1)]
    payload = cuda_ipc.encode(describe(TENSORS), {"tied": "embed"}, "GPU-1", handles)
    model = Model()
    engine = ipc_engine.IPCWeightTransferEngine(*worker(0, 1, model, "cuda:1"))
    engine.init_transfer_engine(engine.parse_init_info({}))
    engine.update_weights(cuda_ipc.ipc_update_info(Snapshot(1, "", 0, "cuda-ipc", payload)))
    check(model.loaded, TENSORS)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None or torch.cuda.device_count() < 2,
    reason="needs vLLM and two CUDA devices",
)
def test_nccl_between_two_gpus() -> None:
    """The receiver in a process of its own, with vLLM's engine and communicator as they are."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    transport = nccl.NcclTransport(ranks=1, bucket_bytes=BUCKET)
    tensors = {name: tensor.to("cuda:0") for name, tensor in TENSORS.items()}
    with context.Pool(1) as pool:
        for version in (1, 2):
            snapshot = transport.offer(transport.publish(tensors.items(), version), 0)
            load = pool.apply_async(receive_on_second_gpu, (snapshot,))
            transport.deliver(snapshot, 0)
            check(load.get(timeout=120), TENSORS)
            transport.release(version)
    transport.close()


def receive_on_second_gpu(snapshot: Snapshot) -> dict[str, Tensor]:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    torch.cuda.set_device(1)
    model = Model()
    engine = NCCLWeightTransferEngine(*worker(0, 1, model, "cuda:1"))
    engine.init_transfer_engine(engine.parse_init_info(nccl.nccl_init_info(snapshot)))
    engine.update_weights(nccl.nccl_update_info(snapshot))
    engine.shutdown()
    return {name: tensor.cpu() for name, tensor in model.loaded.items()}
