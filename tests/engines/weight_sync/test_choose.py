"""Which transport a run gets."""

import pytest

from fsm_trainer.engines.weight_sync.choose import choose_transport, make_transport
from fsm_trainer.engines.weight_sync.cuda_ipc import CudaIpcTransport
from fsm_trainer.engines.weight_sync.directory import DirectoryTransport
from fsm_trainer.engines.weight_sync.nccl import NcclTransport
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.engines.weight_sync.transport import TRANSPORTS


def choose(asked="auto", train="cuda:0", rollout=("cuda:1",), engine="vllm", host="process", **more):
    return choose_transport(asked, train_device=train, rollout_devices=rollout, engine=engine, host=host, **more)


@pytest.mark.parametrize(
    ("expected", "setting"),
    [
        ("shared-memory", {"train": "cpu", "rollout": ("cpu",)}),
        ("shared-memory", {"train": "cpu", "rollout": ("cpu",), "engine": "hf"}),
        ("shared-memory", {"rollout": ("cpu",)}),
        ("shared-memory", {"train": "cpu", "rollout": ("cuda:0",)}),
        ("shared-memory", {"engine": "hf"}),
        ("shared-memory", {"engine": "hf", "rollout": ("cuda:0",)}),
        ("cuda-ipc", {"rollout": ("cuda:0",)}),
        ("cuda-ipc", {"train": "cuda", "rollout": ("cuda:0",)}),
        ("nccl", {}),
        ("nccl", {"rollout": ("cuda:1", "cuda:2", "cuda:3")}),
        ("shared-memory", {"rollout": ("cuda:0", "cuda:1")}),
        ("shared-memory", {"rollout": ("cuda:1", "cpu")}),
        ("shared-memory", {"host": "inline"}),
        ("shared-memory", {"host": "inline", "rollout": ("cuda:0",)}),
        ("directory", {"host": "server"}),
        ("directory", {"host": "server", "train": "cpu", "rollout": ("cpu",)}),
        ("shared-memory", {"host": "server", "local_servers": True}),
        ("shared-memory", {"host": "server", "local_servers": True, "train": "cpu", "rollout": ("cpu",)}),
    ],
)
def test_auto(expected, setting):
    assert choose(**setting) == expected
    assert choose(expected, **setting) == expected, "what auto takes may be asked for"


@pytest.mark.parametrize(
    ("asked", "setting", "message"),
    [
        ("shared-memory", {"host": "server"}, "needs every server on this machine"),
        ("nccl", {"train": "cpu"}, "needs GPUs on both sides, but it trains on cpu and generates on cuda:1"),
        ("nccl", {"rollout": ("cuda:1", "cpu")}, "needs GPUs on both sides.*generates on cuda:1, cpu"),
        ("nccl", {"engine": "hf"}, "needs the vllm engine, which the engine hf is not"),
        ("nccl", {"rollout": ("cuda:1", "cuda:0")}, "needs other GPUs for the engines.*both have cuda:0"),
        ("nccl", {"host": "inline"}, "needs engines in processes that this run starts.*rollout_host inline"),
        ("cuda-ipc", {}, "needs all engines on the trainer's GPU, but it trains on cuda:0 and generates on cuda:1"),
        ("cuda-ipc", {"train": "cpu", "rollout": ("cpu",)}, "needs all engines on the trainer's GPU"),
        ("cuda-ipc", {"rollout": ("cuda:0", "cuda:1")}, "needs all engines on the trainer's GPU"),
        ("cuda-ipc", {"rollout": ("cuda:0",), "host": "server", "local_servers": True}, "needs engines in processes"),
        ("rdma", {}, "policy_sync_transport is 'rdma', expected one of auto, shared-memory, directory, nccl, cuda-ipc"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(asked, setting, message):
    with pytest.raises(ValueError, match=message) as caught:
        choose(asked, **setting)
    assert "\n" not in str(caught.value)


def test_a_directory_may_always_be_asked_for():
    assert choose("directory", train="cpu", rollout=("cpu",), engine="hf", host="inline") == "directory"


def test_each_is_made_and_touches_nothing_yet(tmp_path):
    kinds = (SharedMemoryTransport, DirectoryTransport, NcclTransport, CudaIpcTransport)
    for name, kind in zip(TRANSPORTS, kinds, strict=True):
        transport = make_transport(name, bucket_bytes=1 << 26, directory=tmp_path / "weights", ranks=4)
        assert type(transport) is kind
        transport.close()
    assert list(tmp_path.iterdir()) == []
