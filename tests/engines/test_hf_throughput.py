"""FLOPs of a step, against torch's own counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

from fsm_trainer.engines.hf_lora import LoraSettings, attach_lora
from fsm_trainer.engines.hf_throughput import model_shape, peak_flops, speed_metrics, step_flops


def build(**settings):
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attn_implementation="eager",
        **settings,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_what_torch_counts(tied):
    model = build(tie_word_embeddings=tied)
    shape, length = model_shape(model), 20
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long), use_cache=False).logits.sum().backward()
    # Eager attention computes the full square, of which causal attention needs half.
    half = 6 * 3 * (4 * 16) * length**2
    vectors = 6 * length * sum(p.numel() for p in model.parameters() if p.ndim < 2)
    assert step_flops(shape, [length], length) == pytest.approx(counter.get_total_flops() - half + vectors, rel=1e-6)


def test_only_tokens_in_the_loss_pass_the_head():
    shape = model_shape(build(tie_word_embeddings=False))
    assert shape.head_parameters == 50 * 32
    assert step_flops(shape, [10, 10], 20) - step_flops(shape, [10, 10], 5) == 6 * 15 * 50 * 32
    assert step_flops(shape, [20], 5) > step_flops(shape, [10, 10], 5), "attention grows with the square"


def test_frozen_weights_cost_four_passes():
    model = build(tie_word_embeddings=False)
    full = step_flops(model_shape(model), [8], 8)
    attach_lora(model, LoraSettings(rank=1, alpha=1))
    shape = model_shape(model)
    assert shape.frozen
    attention = 6 * 3 * 64 * 64
    assert step_flops(shape, [8], 8) - attention == pytest.approx((full - attention) * 4 / 6, rel=0.2)


def test_peaks_are_found_by_name():
    assert peak_flops("NVIDIA H200", torch.bfloat16) == 989e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", torch.bfloat16) == 312e12
    assert peak_flops("NVIDIA L40S", torch.bfloat16) == 362e12
    assert peak_flops("NVIDIA H100 PCIe", torch.bfloat16) == 756e12
    assert peak_flops("NVIDIA GeForce GT 710", torch.bfloat16) is None


def test_a_cpu_has_tokens_a_second_and_no_mfu():
    shape = model_shape(build())
    assert speed_metrics(shape, [10, 30], 5, 2.0, torch.device("cpu"), torch.float32) == {"tokens_per_s": 20.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_an_mfu_between_nothing_and_one():
    device = torch.device("cuda:0")
    found = speed_metrics(model_shape(build()), [10], 5, 1.0, device, torch.bfloat16)
    known = peak_flops(torch.cuda.get_device_name(device), torch.bfloat16) is not None
    assert ("mfu" in found) == known
    assert 0 < found.get("mfu", 0.5) < 1
