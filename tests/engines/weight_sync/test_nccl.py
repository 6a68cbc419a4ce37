"""What of the NCCL transport runs without a GPU; with vLLM's own classes see tests/vllm."""

import gc
import json
import os
import socket

import pytest
import torch

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync import nccl
from fsm_trainer.engines.weight_sync.nccl import NcclTransport, at_port, encode, nccl_init_info, nccl_update_info
from fsm_trainer.engines.weight_sync.on_device import describe
from fsm_trainer.engines.weight_sync.transport import read_snapshot

TENSORS = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "scalar": torch.tensor(1.0), "empty": torch.zeros(0, 4)}


@pytest.fixture
def transport(monkeypatch):
    """Publishes tensors of the CPU, too; its doors are referred to by others, as by a delivery."""
    gc.collect()  # what other tests forgot must not be closed while descriptors are counted
    reserve, doors = nccl._reserve_port, []
    monkeypatch.setattr(nccl, "_reserve_port", lambda: doors.append(reserve()) or doors[-1])
    monkeypatch.setattr(nccl, "cuda_device", lambda tensors, transport: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    transport = NcclTransport(ranks=1, bucket_bytes=1 << 20)
    yield transport
    transport.close()


def port_of(snapshot):
    return nccl_init_info(snapshot)["master_port"]


def is_free(port):
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_the_payload_gives_one_load_its_port_and_every_load_the_tensors():
    payload = encode(describe(TENSORS), 4, 1 << 20)
    json.loads(payload)
    snapshot = at_port(Snapshot(1, "", 0, "nccl", payload), 4002)
    assert nccl_init_info(snapshot) == {
        "master_address": "127.0.0.1",
        "master_port": 4002,
        "rank_offset": 1,
        "world_size": 5,
        "packed": True,
        "packed_buffer_size_bytes": 1 << 20,
        "packed_num_buffers": 2,
    }
    assert nccl_update_info(snapshot) == {
        "names": ["a", "scalar", "empty"],
        "dtype_names": ["bfloat16", "float32", "float32"],
        "shapes": [[2, 3], [], [0, 4]],
    }


def test_weights_on_the_cpu_are_refused_and_leave_nothing():
    gc.collect()
    transport = NcclTransport(ranks=1, bucket_bytes=100)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="nccl takes weights from one CUDA device, but they are on cpu"):
        transport.publish(TENSORS.items(), 1)
    assert set(os.listdir("/proc/self/fd")) == before
    transport.close()


def test_a_snapshot_that_is_sent_cannot_be_read():
    with pytest.raises(ValueError, match="version 3 are sent by nccl, which this engine cannot receive"):
        read_snapshot(Snapshot(3, "tcp://127.0.0.1", 8, "nccl"))
    with pytest.raises(ValueError, match="transport 'pigeon' is unknown, expected one of shared-memory, "):
        read_snapshot(Snapshot(3, "", 8, "pigeon"))


def test_the_port_of_an_offer_is_given_to_nobody_but_can_be_listened_on(transport):
    snapshot = transport.publish(TENSORS.items(), 1)
    offered = transport.offer(snapshot, 0)
    assert (offered.version, offered.nbytes, nccl_update_info(offered)) == (1, 16, nccl_update_info(snapshot))
    port = port_of(offered)
    assert not is_free(port)
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("127.0.0.1", port))
        store.listen()
        with socket.create_connection(("127.0.0.1", port)):
            pass


def test_every_load_has_a_port_of_its_own_until_a_newer_one_or_the_release(transport):
    first, second = (transport.publish(TENSORS.items(), version) for version in (1, 2))
    before = len(os.listdir("/proc/self/fd"))
    loads = [(first, 0), (first, 1), (first, 0), (second, 1), (second, 2)]
    ports = [port_of(transport.offer(*load)) for load in loads]
    assert ports[2] != ports[0] and ports[3] != ports[1]
    # The newest of each receiver are kept; what is free may be given out again.
    assert len({*ports[2:]}) == 3
    assert not any(map(is_free, ports[2:]))
    assert len(os.listdir("/proc/self/fd")) == before + 3
    transport.release(1)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    assert not any(map(is_free, ports[3:]))
    transport.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_released_is_not_offered(transport):
    snapshot = transport.publish(TENSORS.items(), 1)
    transport.release(1)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match="version 1 are gone: release versions only after loading"):
        transport.offer(snapshot, 0)
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_publication_is_a_copy_on_the_device():
    transport = NcclTransport(ranks=1, bucket_bytes=1 << 20)
    weights = torch.arange(6.0, device="cuda").view(2, 3)
    snapshot = transport.publish([("w", weights), ("tied", weights), ("turned", weights.t())], 1)
    weights.zero_()
    copies = transport._published[1]
    assert copies.keys() == {"w", "turned"}
    assert copies["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert all(copy.is_cuda and copy.is_contiguous() for copy in copies.values())
    assert snapshot.nbytes == 48
    transport.close()
    assert transport._published == {}
