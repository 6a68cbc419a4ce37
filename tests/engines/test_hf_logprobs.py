"""Logprobs in chunks, against transformers' own full forward pass and autograd of the plain formula."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    OPTConfig,
    Qwen3Config,
)

from fsm_trainer.engines import hf_logprobs
from fsm_trainer.engines.hf_batch import collate
from fsm_trainer.engines.hf_logprobs import split_model, token_logprobs

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "qwen3 tied": Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "capped logits": Gemma2Config(**SMALL, head_dim=8, sliding_window=4, final_logit_softcapping=0.5),
    "scaled logits": CohereConfig(**SMALL, logit_scale=3.0),
    "divided logits": GraniteConfig(**SMALL, logits_scaling=0.2),
    "gpt2": GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2),
}
UNSPLIT = OPTConfig(
    vocab_size=32,
    hidden_size=16,
    ffn_dim=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
    word_embed_proj_dim=16,
)


def build(config, dtype=torch.float64):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.to(dtype).eval()


def plain(model, rows, temperature):
    """Logprobs and entropies of the tokens in the loss, sequence by sequence, from all logits at once."""
    logprobs, entropies = [], []
    for row in rows:
        logits = model(torch.tensor([row.tokens])).logits[0] / temperature
        distribution = torch.log_softmax(logits, -1)
        for i, wanted in enumerate(row.loss_mask):
            if wanted:
                logprobs.append(distribution[i - 1, row.tokens[i]])
                entropies.append(torch.distributions.Categorical(logits=logits[i - 1]).entropy())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.fixture(params=[1, 3, 10**6], ids=["chunk 1", "chunk 3", "one chunk"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(hf_logprobs, "CHUNK_LOGITS", request.param * 32)
    return request.param


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("packed", [False, True])
def test_logprobs_and_gradient_are_those_of_the_full_forward(name, packed, chunk, ragged_batch):
    rows, temperature = ragged_batch(), 0.7
    model = build(CONFIGS[name])
    batch = collate(rows, 0, model.device, packed=packed)
    logprobs, entropy = token_logprobs(split_model(model), batch, temperature=temperature, entropy_gradient=True)
    weights = torch.linspace(-1, 1, len(batch.targets), dtype=torch.float64)
    ours = (logprobs.flatten()[batch.places] * weights).sum() + 0.3 * entropy.flatten()[batch.places].square().sum()
    gradients = torch.autograd.grad(ours, list(model.parameters()))
    expected_logprobs, expected_entropy = plain(model, rows, temperature)
    theirs = (expected_logprobs * weights).sum() + 0.3 * expected_entropy.square().sum()
    expected = torch.autograd.grad(theirs, list(model.parameters()))
    # Models compute some things in float32 whatever their dtype.
    torch.testing.assert_close(logprobs.flatten()[batch.places], expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.flatten()[batch.places], expected_entropy, rtol=1e-5, atol=1e-5)
    for ours_, theirs_ in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours_, theirs_, rtol=1e-4, atol=1e-4)
    outside = batch.mask == 0
    assert not logprobs[outside].any()
    assert not entropy[outside].any()


def test_a_model_that_does_not_split_still_gives_its_logprobs(ragged_batch):
    model, rows = build(UNSPLIT), ragged_batch()
    batch = collate(rows, 0, model.device, packed=False)
    logprobs, _ = token_logprobs(split_model(model), batch)
    torch.testing.assert_close(logprobs.flatten()[batch.places], plain(model, rows, 1.0)[0], rtol=1e-5, atol=1e-5)


def test_the_entropy_carries_a_gradient_only_when_asked(ragged_batch):
    model = build(CONFIGS["qwen3"])
    batch, split = collate(ragged_batch(), 0, model.device, packed=False), split_model(model)
    assert not token_logprobs(split, batch)[1].requires_grad
    assert token_logprobs(split, batch, entropy_gradient=True)[1].requires_grad
    with torch.no_grad():
        assert not token_logprobs(split, batch, entropy_gradient=True)[0].requires_grad


def test_logits_are_float32_of_no_more_than_a_chunk(monkeypatch, ragged_batch):
    monkeypatch.setattr(hf_logprobs, "CHUNK_LOGITS", 4 * 32)
    model = build(CONFIGS["qwen3"], torch.float32)
    shapes = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: shapes.append(tuple(logits.shape)))
    split = split_model(model)
    shapes.clear()
    batch = collate(ragged_batch(), 0, model.device, packed=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = token_logprobs(split, batch)
    forward = len(shapes)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert max(rows for _, rows, _ in shapes) == 4
    assert len(shapes) == 2 * forward, "each chunk is made again in the backward pass"


def test_a_vocabulary_with_tokens_that_cannot_be_has_a_finite_entropy(ragged_batch):
    model = build(CONFIGS["gpt2"], torch.float32)
    model.lm_head = torch.nn.Linear(16, 32)
    model.lm_head.bias.data[0] = -torch.inf
    batch = collate(ragged_batch(), 0, model.device, packed=False)
    logprobs, entropy = token_logprobs(split_model(model), batch, entropy_gradient=False)
    assert torch.isfinite(logprobs).all()
    assert torch.isfinite(entropy).all()
