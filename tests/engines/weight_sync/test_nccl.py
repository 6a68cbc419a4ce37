"""What of the NCCL transport runs without a GPU; with vLLM's own classes see tests/vllm."""

import json
import os
import socket

import pytest
import torch

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync import nccl
from fsm_trainer.engines.weight_sync.nccl import NcclTransport, encode, nccl_init_info, nccl_update_info
from fsm_trainer.engines.weight_sync.on_device import describe
from fsm_trainer.engines.weight_sync.transport import read_snapshot

TENSORS = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "scalar": torch.tensor(1.0), "empty": torch.zeros(0, 4)}


def test_the_payload_gives_each_engine_its_port_and_all_of_them_the_tensors():
    payload = encode(describe(TENSORS), [4001, 4002], 4, 1 << 20)
    json.loads(payload)
    snapshot = Snapshot(1, "", 0, "nccl", payload)
    assert nccl_init_info(snapshot, 1) == {
        "master_address": "127.0.0.1",
        "master_port": 4002,
        "rank_offset": 1,
        "world_size": 5,
        "packed": True,
        "packed_buffer_size_bytes": 1 << 20,
        "packed_num_buffers": 2,
    }
    assert nccl_init_info(snapshot, 0)["master_port"] == 4001
    assert nccl_update_info(snapshot) == {
        "names": ["a", "scalar", "empty"],
        "dtype_names": ["bfloat16", "float32", "float32"],
        "shapes": [[2, 3], [], [0, 4]],
    }


def test_weights_on_the_cpu_are_refused_and_leave_nothing():
    transport = NcclTransport(receivers=2, ranks=1, bucket_bytes=100)
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


def test_reserved_ports_are_given_to_nobody_but_can_be_listened_on():
    doors = nccl._reserve_ports(3)
    ports = [door.getsockname()[1] for door in doors]
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as thief, pytest.raises(OSError, match="in use"):
            thief.bind(("127.0.0.1", port))
        with socket.socket() as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("127.0.0.1", port))
            store.listen()
            with socket.create_connection(("127.0.0.1", port)):
                pass
    for door in doors:
        door.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_publication_is_a_copy_on_the_device():
    transport = NcclTransport(receivers=1, ranks=1, bucket_bytes=1 << 20)
    weights = torch.arange(6.0, device="cuda").view(2, 3)
    snapshot = transport.publish([("w", weights), ("tied", weights), ("turned", weights.t())], 1)
    weights.zero_()
    copies = transport._published[1].tensors
    assert copies.keys() == {"w", "turned"}
    assert copies["turned"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert all(copy.is_cuda and copy.is_contiguous() for copy in copies.values())
    assert snapshot.nbytes == 48
    transport.close()
    assert transport._published == {}
