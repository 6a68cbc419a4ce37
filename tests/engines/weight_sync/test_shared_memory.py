"""Publishing weights through shared memory."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.engines.weight_sync.transport import read_snapshot


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "b": torch.randn(3, 5, generator=generator),
        "a.half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "wide": torch.randn(2, 2, generator=generator, dtype=torch.float64),
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "flag": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
    }


@pytest.fixture(params=[True, False], ids=["memfd", "file"])
def transport(request):
    transport = SharedMemoryTransport(use_memfd=request.param)
    yield transport
    transport.close()


def test_what_is_read_is_what_was_published(transport):
    published = tensors()
    snapshot = transport.publish(published.items(), 3)
    got = dict(read_snapshot(snapshot))
    assert got.keys() == published.keys()
    for name, tensor in published.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
    assert snapshot.version == 3
    assert snapshot.nbytes == os.stat(snapshot.location).st_size


def test_the_image_is_plain_safetensors(transport):
    snapshot = transport.publish(tensors().items(), 0)
    with safe_open(snapshot.location, framework="np") as image:
        assert set(image.keys()) == set(tensors())


def test_a_snapshot_is_a_copy(transport):
    weights = torch.ones(4)
    snapshot = transport.publish([("w", weights)], 1)
    weights.zero_()
    assert dict(read_snapshot(snapshot))["w"].tolist() == [1.0] * 4


def test_tied_weights_are_stored_once_and_read_under_both_names(transport):
    shared = torch.randn(100, 100)
    snapshot = transport.publish([("embed", shared), ("head", shared), ("transposed", shared.t())], 1)
    got = dict(read_snapshot(snapshot))
    assert torch.equal(got["head"], shared)
    assert torch.equal(got["transposed"], shared.t())
    with safe_open(snapshot.location, framework="pt") as image:
        assert set(image.keys()) == {"embed", "transposed"}


def test_versions_live_side_by_side_until_released(transport):
    first, second = (transport.publish([("w", torch.full((2,), float(v)))], v) for v in (1, 2))
    assert transport.versions == (1, 2)
    kept = dict(read_snapshot(first))["w"]
    transport.release(1)
    transport.release(1)
    assert transport.versions == (2,)
    assert kept.tolist() == [1.0, 1.0], "what a reader has mapped stays"
    assert dict(read_snapshot(second))["w"].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="version 1 are gone"):
        list(read_snapshot(first))


def test_a_reused_descriptor_is_not_taken_for_the_old_version(transport):
    old = transport.publish([("w", torch.zeros(2))], 1)
    transport.release(1)
    new = transport.publish([("w", torch.ones(2))], 2)
    assert new.location == old.location, "the kernel gives the lowest free number"
    with pytest.raises(ValueError, match="version 1 are gone.*version 2 is there"):
        list(read_snapshot(old))


def test_publishing_a_version_again_replaces_it(transport):
    transport.publish([("w", torch.zeros(2))], 1)
    snapshot = transport.publish([("w", torch.ones(2))], 1)
    assert transport.versions == (1,)
    assert dict(read_snapshot(snapshot))["w"].tolist() == [1.0, 1.0]


def test_no_descriptor_is_left(transport):
    before = set(os.listdir("/proc/self/fd"))
    transport.publish([("w", torch.zeros(2))], 1)
    with pytest.raises(ValueError, match="w has dtype torch.complex64"):
        transport.publish([("w", torch.zeros(2, dtype=torch.complex64))], 2)
    transport.close()
    assert transport.versions == ()
    assert set(os.listdir("/proc/self/fd")) == before


def test_nothing_at_the_location():
    with pytest.raises(ValueError, match="version 7 are gone"):
        list(read_snapshot(Snapshot(7, "/proc/self/fd/9999", 10)))


def test_another_process_reads_it_and_its_death_frees_it():
    code = (
        "import sys, torch\n"
        "from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport\n"
        "snapshot = SharedMemoryTransport().publish([('w', torch.arange(5.0))], 4)\n"
        "print(snapshot.location, snapshot.nbytes, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        location, nbytes = child.stdout.readline().split()
        snapshot = Snapshot(4, location, int(nbytes))
        assert dict(read_snapshot(snapshot))["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        child.kill()
        child.wait()
    with pytest.raises(ValueError, match="version 4 are gone"):
        list(read_snapshot(snapshot))
