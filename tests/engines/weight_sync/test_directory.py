"""What is particular to directories; the rest is in test_pulled."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from fsm_trainer.engines.base import Snapshot
from fsm_trainer.engines.weight_sync.directory import INDEX, DirectoryTransport
from fsm_trainer.engines.weight_sync.transport import read_snapshot

BUCKET = 4096


@pytest.fixture
def transport(tmp_path):
    transport = DirectoryTransport(tmp_path / "deep" / "root", bucket_bytes=BUCKET)
    yield transport
    transport.close()


def shards(snapshot):
    return sorted(Path(snapshot.location).glob("*.safetensors"))


def test_shards_are_no_larger_than_a_bucket_unless_they_are_one_tensor(transport):
    published = {f"w{i}": torch.full((300,), float(i)) for i in range(10)} | {"large": torch.arange(5000.0)}
    snapshot = transport.publish(published.items(), 1)
    contents = [load_file(path) for path in shards(snapshot)]
    assert [set(content) for content in contents] == [
        {"w0", "w1", "w2"},
        {"w3", "w4", "w5"},
        {"w6", "w7", "w8"},
        {"w9"},
        {"large"},
    ]
    for content in contents:
        for name, tensor in content.items():
            assert torch.equal(tensor, published[name])
    assert snapshot.nbytes == sum(path.stat().st_size for path in shards(snapshot))
    index = json.loads((Path(snapshot.location) / INDEX).read_text())
    assert index["weight_map"].keys() == published.keys()
    assert index["metadata"]["total_size"] == sum(tensor.numel() * 4 for tensor in published.values())


def test_transformers_loads_it(transport):
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    snapshot = transport.publish(model.named_parameters(), 1)
    assert len(shards(snapshot)) > 1
    config.save_pretrained(snapshot.location)
    loaded = AutoModelForCausalLM.from_pretrained(snapshot.location)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(loaded.get_parameter(name), parameter), name


@pytest.fixture
def several(transport):
    snapshot = transport.publish([(f"w{i}", torch.full((1000,), float(i))) for i in range(3)], 1)
    assert len(shards(snapshot)) == 3
    return snapshot


def test_half_a_folder_is_refused_before_a_tensor_is_read(several, transport, tmp_path):
    first, *_, last = shards(several)
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="version 1 are gone.*cut off"):
        next(read_snapshot(several))
    last.unlink()
    with pytest.raises(ValueError, match="version 1 are gone.*No such file"):
        next(read_snapshot(several))
    shutil.copy(first, last)
    with pytest.raises(ValueError, match="version 1 are incomplete.*other tensors"):
        next(read_snapshot(several))
    last.write_bytes(whole)
    assert len(list(read_snapshot(several))) == 3


def test_a_shard_of_another_version_is_refused_before_a_tensor_is_read(several, transport):
    other = transport.publish([(f"w{i}", torch.zeros(1000)) for i in range(3)], 2)
    shutil.copy(shards(other)[2], shards(several)[2])
    with pytest.raises(ValueError, match="version 1 are gone.*version 2 is there"):
        next(read_snapshot(several))


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"weight_map": 3}'])
def test_a_damaged_index_is_refused(several, text):
    (Path(several.location) / INDEX).write_text(text)
    with pytest.raises(ValueError, match=r"version 1 are incomplete: .*index.json is no index"):
        next(read_snapshot(several))


def test_a_folder_without_an_index_or_none_is_refused(several, tmp_path):
    (Path(several.location) / INDEX).unlink()
    with pytest.raises(ValueError, match="version 1 are gone.*not on a file system that this machine shares"):
        next(read_snapshot(several))
    with pytest.raises(ValueError, match="version 5 are gone"):
        next(read_snapshot(Snapshot(5, str(tmp_path / "nowhere"), 1, "directory")))


KILLED = """
import os, signal, sys, torch
from fsm_trainer.engines.weight_sync import directory, image
write, written = image._write_tensor, []
def dying(file, tensor, bucket_bytes):
    write(file, tensor, bucket_bytes)
    written.append(tensor)
    if len(written) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
image._write_tensor = dying
transport = directory.DirectoryTransport(sys.argv[1], bucket_bytes=4096)
for version in (1, 2):
    transport.publish([(f"w{i}", torch.ones(1000)) for i in range(3)], version)
"""


def test_a_publisher_killed_in_the_middle_leaves_nothing_that_could_be_read(tmp_path):
    root = tmp_path / "root"
    done = subprocess.run([sys.executable, "-c", KILLED, str(root)], cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -9
    (orphan,) = root.glob("fsm-weights-*")
    assert [path.name for path in orphan.glob("version-*")] == ["version-000001"]
    assert len(list(orphan.glob(".part-000002/*"))) == 2
    after = DirectoryTransport(root, bucket_bytes=BUCKET)
    snapshot = after.publish([("w", torch.ones(2))], 1)
    assert not orphan.exists()
    assert dict(read_snapshot(snapshot))["w"].tolist() == [1.0, 1.0]
    after.close()
    assert list(tmp_path.iterdir()) == []


def test_publishers_under_one_root_leave_each_other_alone(tmp_path):
    first, second = (DirectoryTransport(tmp_path / "root", bucket_bytes=BUCKET) for _ in range(2))
    one = first.publish([("w", torch.ones(1))], 1)
    two = second.publish([("w", torch.zeros(1))], 1)
    assert dict(read_snapshot(one))["w"].tolist() == [1.0]
    first.close()
    assert dict(read_snapshot(two))["w"].tolist() == [0.0]
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_under_the_root_stay(tmp_path):
    (tmp_path / "fsm-weights-mine").mkdir()
    (tmp_path / "fsm-weights-mine" / "notes").write_text("keep")
    transport = DirectoryTransport(tmp_path, bucket_bytes=BUCKET)
    transport.publish([("w", torch.ones(1))], 1)
    transport.close()
    assert (tmp_path / "fsm-weights-mine" / "notes").read_text() == "keep"
