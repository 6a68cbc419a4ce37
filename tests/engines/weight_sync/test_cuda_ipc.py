"""CUDA IPC: all that a machine without a GPU can run, and two processes on one that has one."""

import base64
import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import reductions

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.cuda_ipc import CudaIpcTransport, encode, ipc_update_info
from fsm_trainer.engines.weight_sync.on_device import describe
from fsm_trainer.engines.weight_sync.transport import read_snapshot

ROOT = Path(__file__).parents[3]
TENSORS = {"a": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.zeros(0, 4)}


def handles(version):
    """Of the form of torch's, with a number in place of the driver's handle of the memory, and where it has none."""
    return [
        (
            *(torch.Tensor, tensor.size(), tensor.stride(), 0, torch.storage.TypedStorage, tensor.dtype, 99),
            *(bytes([number, 255]) if tensor.numel() else None, tensor.nbytes, 512, False),
            *(b"/torch_1_2", 3, b"event", True),
        )
        for number, tensor in enumerate(memory(version))
    ]


def memory(version):
    return [*TENSORS.values(), torch.tensor(version)]


def snapshot(uuid="GPU-b"):
    return Snapshot(3, "gpu", 30, "cuda-ipc", encode(describe(TENSORS), {"tied": "a"}, uuid, handles(3)))


@pytest.fixture
def devices(monkeypatch):
    """Two GPUs, whose memory is this process's."""

    @dataclasses.dataclass
    class Properties:
        uuid: str

    held = {"version": 3}

    def rebuild(*args):
        expected = dict(zip(handles(3), memory(held["version"]), strict=True))
        assert args[6] == 1, "the receiver's number of the device"
        return expected[(*args[:6], 99, *args[7:])]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: Properties(["GPU-a", "GPU-b"][n]))
    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    return held


def test_handles_are_rebuilt_on_the_device_with_the_uuid(devices):
    got = dict(read_snapshot(snapshot()))
    assert got.keys() == {*TENSORS, "tied"}
    for name, tensor in TENSORS.items():
        assert torch.equal(got[name], tensor)
    assert torch.equal(got["tied"], TENSORS["a"])


@pytest.mark.parametrize(("holds", "what"), [(-1, "they were released"), (4, "version 4 is there now")])
def test_another_version_in_the_copy_is_refused(devices, holds, what):
    devices["version"] = holds
    with pytest.raises(ValueError, match=f"version 3 are gone from gpu: {what}"):
        next(read_snapshot(snapshot()))


def test_a_publisher_that_died_is_reported(devices, monkeypatch):
    def rebuild(*args):
        raise RuntimeError("invalid resource handle")

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    with pytest.raises(ValueError, match="version 3 are gone from gpu: their publisher died.*invalid resource handle"):
        next(read_snapshot(snapshot()))


def test_a_device_that_the_engine_does_not_have_is_named(devices):
    with pytest.raises(ValueError, match="version 3 are on GPU GPU-c, which this engine does not have"):
        next(read_snapshot(snapshot(uuid="GPU-c")))


def test_vllm_is_given_one_handle_for_each_name_keyed_by_the_device():
    info = ipc_update_info(snapshot())
    json.dumps(info)
    named = pickle.loads(base64.b64decode(info.pop("ipc_handles_pickled")))
    assert info == {
        "names": ["a", "half", "empty"],
        "dtype_names": ["float32", "bfloat16", "float32"],
        "shapes": [[2, 3], [3], [0, 4]],
    }
    assert named == [{"GPU-b": handle} for handle in handles(3)[:-1]]


def test_a_payload_is_text_and_runs_nothing():
    payload = json.loads(snapshot().payload)
    assert payload["handles"][0][0] is None
    assert len(payload["handles"]) == len(TENSORS) + 1


def test_weights_on_the_cpu_are_refused():
    transport = CudaIpcTransport()
    with pytest.raises(ValueError, match="cuda-ipc takes weights from one CUDA device, but they are on cpu"):
        transport.publish(TENSORS.items(), 1)
    transport.close()


PUBLISHER = """
import base64, sys, torch
from fsm_trainer.engines.weight_sync.cuda_ipc import CudaIpcTransport
transport, weights = CudaIpcTransport(), torch.arange(6.0, device="cuda").view(2, 3)
for line in sys.stdin:
    command, version = line.split()
    if command == "publish":
        s = transport.publish([("w", weights + int(version)), ("none", torch.zeros(0, 3, device="cuda"))], int(version))
        print(s.nbytes, base64.b64encode(s.payload).decode(), torch.cuda.memory_allocated(), flush=True)
    else:
        transport.release(int(version))
        print("released", flush=True)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_processes_share_the_device():
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:

        def tell(command, version):
            child.stdin.write(f"{command} {version}\n")
            child.stdin.flush()
            return child.stdout.readline().split()

        memory = []
        for version in (1, 2, 3):
            nbytes, payload, allocated = tell("publish", version)
            memory.append(int(allocated))
            shot = Snapshot(version, "gpu", int(nbytes), "cuda-ipc", base64.b64decode(payload))
            for _ in range(2):
                got = {name: tensor.clone() for name, tensor in read_snapshot(shot)}
                assert got["w"].cpu().tolist() == (torch.arange(6.0).view(2, 3) + version).tolist()
                assert got["none"].shape == (0, 3)
            tell("release", version)
            with pytest.raises(ValueError, match="they were released"):
                next(read_snapshot(shot))
        assert memory[1] == memory[2], "the copy is used again"
        child.kill()
        child.wait()
    with pytest.raises(ValueError, match="version 3 are gone"):
        next(read_snapshot(shot))
