"""The engine on GPUs: what `test_weights.py` holds on the CPU, by the transports that only GPUs have."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsm_trainer.engines.base import RolloutRequest, SamplingParams
from fsm_trainer.engines.vllm_local import vllm_engine
from fsm_trainer.engines.weight_sync.choose import make_transport
from tests.vllm.conftest import MAX_MODEL_LEN, largest_gap

PROMPTS = (tuple([4, 5, 6, 7, 14] * 8), tuple([9, 8, 7, 14] * 10))
# GPUs multiply float32 in shorter numbers (TF32), so less exactly than a CPU.
TOLERANCE = 5e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["shared-memory", "directory", "cuda-ipc", "nccl"])
def test_every_transport_brings_the_new_weights(
    checkpoints: list[Path], models: list[PreTrainedModel], tmp_path: Path, name: str
) -> None:
    if name == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    device = "cuda:1" if name == "nccl" else "cuda:0"
    trained = [AutoModelForCausalLM.from_pretrained(path).to("cuda:0") for path in checkpoints]
    transport = make_transport(name, bucket_bytes=1 << 20, directory=tmp_path, ranks=1)
    engine = vllm_engine(
        str(checkpoints[0]),
        SamplingParams(n_samples=4, max_new_tokens=24),
        devices=(device,),
        max_model_len=MAX_MODEL_LEN,
        memory_utilization=0.2,
        transport=name,
    )
    engine.start()
    try:
        for version in range(4):
            snapshot = transport.offer(transport.publish(trained[version % 2].state_dict().items(), version), 0)
            sending = threading.Thread(target=transport.deliver, args=(snapshot, 0))
            sending.start()
            assert engine.load_weights(snapshot).version == version
            sending.join()
            rollout = engine.generate(RolloutRequest(version, PROMPTS, seed=0))
            assert largest_gap(models, PROMPTS, rollout) < TOLERANCE
            transport.release(version)
    finally:
        engine.close()
        transport.close()
