"""Transports whose snapshots are read by whoever loads them: shared memory, a directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.directory import DirectoryTransport
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


def descriptors():
    """Open ones of this process. Later there may be fewer: what other tests forgot is closed at any moment."""
    return set(os.listdir("/proc/self/fd"))


KINDS = ("shared-memory", "directory")


def make(kind, root):
    return DirectoryTransport(root, bucket_bytes=64) if kind == "directory" else SharedMemoryTransport()


@pytest.fixture(params=KINDS)
def transport(request, tmp_path):
    transport = make(request.param, tmp_path / "root")
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
        assert got[name].data_ptr() % tensor.element_size() == 0, "aligned"
    assert snapshot.version == 3


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
    assert 80_000 < snapshot.nbytes < 82_000


def test_versions_live_side_by_side_until_released(transport):
    first, second = (transport.publish([("w", torch.full((2,), float(v)))], v) for v in (1, 2))
    kept = dict(read_snapshot(first))["w"]
    transport.release(1)
    transport.release(1)
    assert kept.tolist() == [1.0, 1.0], "what a reader has mapped stays"
    assert dict(read_snapshot(second))["w"].tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="version 1 are gone"):
        list(read_snapshot(first))


def test_publishing_a_version_again_replaces_it(transport):
    transport.publish([("w", torch.zeros(2))], 1)
    snapshot = transport.publish([("w", torch.ones(2))], 1)
    assert dict(read_snapshot(snapshot))["w"].tolist() == [1.0, 1.0]


def test_another_version_at_the_place_is_refused(transport):
    there = transport.publish([("w", torch.ones(2))], 2)
    asked = Snapshot(1, there.location, there.nbytes, there.transport)
    with pytest.raises(ValueError, match="version 1 are gone.*version 2 is there"):
        next(read_snapshot(asked))


def test_an_engine_is_given_what_was_published(transport):
    snapshot = transport.publish([("w", torch.ones(2))], 2)
    assert transport.offer(snapshot, 0) is snapshot


def test_a_tensor_that_cannot_be_written_leaves_nothing(transport, tmp_path):
    before = transport.publish([("w", torch.zeros(2))], 1)
    files, before_it = set(tmp_path.rglob("*")), descriptors()
    with pytest.raises(ValueError, match="w has dtype torch.complex64"):
        transport.publish([("v", torch.zeros(2)), ("w", torch.zeros(2, dtype=torch.complex64))], 2)
    assert set(tmp_path.rglob("*")) == files
    assert descriptors() <= before_it
    assert dict(read_snapshot(before))["w"].tolist() == [0.0, 0.0]


def test_close_leaves_nothing(transport, tmp_path):
    before = descriptors()
    transport.publish(tensors().items(), 1)
    transport.publish(tensors().items(), 2)
    transport.close()
    transport.close()
    assert descriptors() <= before
    assert list(tmp_path.iterdir()) == []


PUBLISHER = """
import sys, torch
from tests.engines.weight_sync.test_pulled import make
transport = make(sys.argv[1], sys.argv[2])
snapshot = transport.publish([("w", torch.arange(5, dtype=torch.bfloat16)), ("none", torch.zeros(0, 3))], 4)
print(snapshot.location, snapshot.nbytes, snapshot.transport, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_reads_and_a_killed_publisher_leaves_nothing(kind, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, kind, str(tmp_path / "root")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as child:
        location, nbytes, name = child.stdout.readline().split()
        snapshot = Snapshot(4, location, int(nbytes), name)
        mapped = dict(read_snapshot(snapshot))
        assert mapped["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert mapped["none"].shape == (0, 3)
        child.kill()
        child.wait()
    assert mapped["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0], "what a reader has mapped stays"
    # The kernel frees memory; a folder is removed by the next publisher there.
    transport = make(kind, tmp_path / "root")
    transport.publish([("w", torch.ones(1))], 9)
    with pytest.raises(ValueError, match="version 4 are gone"):
        list(read_snapshot(snapshot))
    transport.close()
    assert list(tmp_path.iterdir()) == []


OTHER_USER = """
import os, sys
import safetensors.torch
from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.transport import read_snapshot
os.setresuid(65534, 65534, 65534)
try:
    list(read_snapshot(Snapshot(4, sys.argv[1], 1, sys.argv[2])))
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (
            "shared-memory",
            "this process may not see the publisher's files (a container, another user, a tunnel): --policy-",
        ),
        ("directory", "this process may not see the run's folder (not on a file system that this machine shares, "),
    ],
)
def test_another_user_is_not_told_that_the_weights_are_gone(kind, told, tmp_path):
    transport = make(kind, tmp_path / "root")
    snapshot = transport.publish([("w", torch.ones(2))], 4)
    tmp_path.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USER, snapshot.location, snapshot.transport],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    transport.close()
    assert done.stdout.startswith(f"weights of version 4 cannot be read from {snapshot.location}: {told}")
    assert "Permission denied" in done.stdout


FULL = """
import os, sys, torch
from tests.engines.weight_sync.test_pulled import make
from fsm_trainer.engines.weight_sync.transport import read_snapshot
transport = make(sys.argv[1], sys.argv[2])
kept = transport.publish([("w", torch.ones(1000))], 1)
found = lambda: (sorted(os.walk(sys.argv[2])), len(os.listdir("/proc/self/fd")))
before = found()
for _ in range(2):
    try:
        transport.publish([("v", torch.ones(1000)), ("w", torch.ones(1_000_000))], 2)
    except OSError as error:
        print(error.errno, str(error).replace(sys.argv[2], "DISK"))
assert found() == before
assert dict(read_snapshot(kept))["w"].sum() == 1000
transport.publish([("w", torch.ones(100_000))], 3)
print("room again")
"""


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    run = f'{mount} && exec {sys.executable} -c "$0" directory {tmp_path}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", run, FULL],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    *errors, last = done.stdout.splitlines()
    assert [error.split()[0] for error in errors] == ["28", "28"], "ENOSPC, and not a SIGBUS"
    said = "No space left on device: the weights of version 2 need 4 MB in DISK; free some, or use another"
    assert all(said in error for error in errors)
    assert last == "room again"
