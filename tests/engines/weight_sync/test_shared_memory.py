"""What is particular to shared memory; the rest is in test_pulled."""

import gc
import os
import resource

import pytest
import torch
from safetensors import safe_open

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.engines.weight_sync.transport import read_snapshot


@pytest.fixture
def transport():
    gc.collect()  # what other tests forgot must not free its descriptor's number meanwhile
    transport = SharedMemoryTransport()
    yield transport
    transport.close()


def test_the_image_is_plain_safetensors(transport):
    shared = torch.randn(4, 4)
    snapshot = transport.publish([("embed", shared), ("head", shared), ("b", torch.zeros(0))], 0)
    with safe_open(snapshot.location, framework="np") as image:
        assert set(image.keys()) == {"embed", "b"}
    assert snapshot.nbytes == os.stat(snapshot.location).st_size


def test_a_reused_descriptor_is_not_taken_for_the_old_version(transport):
    old = transport.publish([("w", torch.zeros(2))], 1)
    transport.release(1)
    new = transport.publish([("w", torch.ones(2))], 2)
    assert new.location == old.location, "the kernel gives the lowest free number"
    with pytest.raises(ValueError, match="version 1 are gone.*version 2 is there"):
        list(read_snapshot(old))


UNSEEN = r"this process may not see the publisher's files \(a container, another user, a tunnel\): "
UNSEEN += "--policy-sync-transport directory, whose folder it must see by the same path"


def test_nothing_at_the_location():
    told = f"version 7 are gone from /proc/self/fd/9999: released, their publisher died, or {UNSEEN} .*No such file"
    with pytest.raises(ValueError, match=told):
        list(read_snapshot(Snapshot(7, "/proc/self/fd/9999", 10)))


def test_what_another_process_has_at_the_location(tmp_path):
    (tmp_path / "other").write_text("a log, say")
    with pytest.raises(ValueError, match=f"version 7 are gone from .*: released, cut off, or {UNSEEN}; no whole file"):
        list(read_snapshot(Snapshot(7, str(tmp_path / "other"), 10)))


def test_an_image_that_was_cut_off_is_refused(transport, tmp_path):
    snapshot = transport.publish([("w", torch.ones(1000))], 1)
    with open(snapshot.location, "rb") as image:
        whole = image.read()
    cut = tmp_path / "cut"
    for size in (0, 5, 100, len(whole) - 1):
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="version 1 are gone.*cut off"):
            list(read_snapshot(Snapshot(1, str(cut), size)))


def test_too_little_memory_is_an_error_and_leaves_nothing(transport):
    kept = transport.publish([("w", torch.ones(2))], 1)
    before = set(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(OSError, match="File too large: the weights of version 2 need 4 MB of shared memory; free"):
            transport.publish([("w", torch.ones(1_000_000))], 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert set(os.listdir("/proc/self/fd")) == before
    assert dict(read_snapshot(kept))["w"].tolist() == [1.0, 1.0]
