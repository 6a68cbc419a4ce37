"""What makes a step faster or smaller must not change its logprobs or gradients."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MambaConfig, MistralConfig, OPTConfig, Qwen3Config

from fsm_trainer.engines import hf_logprobs
from fsm_trainer.engines.hf_policy import Policy, PolicySettings, keeps_packed_apart

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN = Qwen3Config(**SMALL, head_dim=16)
WINDOW = MistralConfig(**SMALL, sliding_window=3)
GPT2 = GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
MAMBA = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
OPT = OPTConfig(
    vocab_size=32,
    hidden_size=32,
    ffn_dim=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    word_embed_proj_dim=32,
    dropout=0.5,
)


def build(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def results(policy, rows):
    """Logprobs of the tokens in the loss, row by row, and the gradients of a weighted sum of them."""
    policy.model.zero_grad()
    batch = policy.collate(rows)
    logprobs, _ = policy.logprobs(batch)
    taken = logprobs.flatten()[batch.places]
    (taken * torch.linspace(-1, 1, len(taken))).sum().backward()
    return taken.detach(), [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]


def alone(model, rows):
    """The same logprobs from transformers' forward pass of each sequence by itself."""
    found = []
    with torch.no_grad():
        for row in rows:
            distribution = torch.log_softmax(model(torch.tensor([row.tokens])).logits[0], -1)
            found += [distribution[i - 1, row.tokens[i]] for i, wanted in enumerate(row.loss_mask) if wanted]
    return torch.stack(found)


@pytest.mark.parametrize("config", [QWEN, WINDOW, GPT2], ids=["qwen3", "sliding window", "gpt2"])
@pytest.mark.parametrize("packing", ["on", "off"])
def test_logprobs_are_those_of_each_sequence_alone(config, packing, ragged_batch):
    model, rows = build(config), ragged_batch()
    policy = Policy(model, PolicySettings(packing=packing), 0)
    assert policy.packed == (packing == "on")
    torch.testing.assert_close(results(policy, rows)[0], alone(model, rows), rtol=0, atol=1e-5)


def test_packing_gives_the_gradient_of_padding(ragged_batch):
    rows = ragged_batch()
    packed, padded = (results(Policy(build(QWEN), PolicySettings(packing=p), 0), rows)[1] for p in ("on", "off"))
    for one, other in zip(packed, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_model_that_mixes_packed_sequences_is_not_packed():
    model = build(MAMBA)
    assert not keeps_packed_apart(model)
    with pytest.raises(ValueError, match="a MambaForCausalLM lets packed sequences see each other; give auto or off"):
        Policy(model, PolicySettings(packing="on"), 0)


def test_by_itself_it_packs_only_where_attention_gains():
    assert not Policy(build(QWEN), PolicySettings(), 0).packed


@pytest.mark.parametrize("config", [QWEN, GPT2, OPT], ids=["qwen3", "gpt2", "opt, whose layers have dropout"])
def test_gradient_checkpointing_changes_no_bit(config, ragged_batch):
    rows = ragged_batch()
    plain = results(Policy(build(config), PolicySettings(), 0), rows)
    model = build(config)
    calls = []
    model.base_model.register_forward_hook(lambda *_: calls.append("forward"))
    layer = next(module for module in model.modules() if type(module).__name__.endswith(("DecoderLayer", "Block")))
    inner = next(module for module in layer.modules() if module.__class__.__name__ in ("Linear", "Conv1D"))
    policy = Policy(model, PolicySettings(gradient_checkpointing=True), 0)
    inner.register_forward_hook(lambda *_: calls.append("layer"))
    calls.clear()
    kept = results(policy, rows)
    assert calls.count("layer") == 2, "computed again in the backward pass"
    assert torch.equal(plain[0], kept[0])
    assert all(torch.equal(one, other) for one, other in zip(plain[1], kept[1], strict=True))


def test_bfloat16_is_near_and_rounded(ragged_batch):
    rows = ragged_batch()
    exact, rough = (results(Policy(build(QWEN), PolicySettings(dtype=d), 0), rows) for d in ("float32", "bfloat16"))
    assert not torch.equal(exact[0], rough[0])
    torch.testing.assert_close(exact[0], rough[0], rtol=0, atol=0.02)
    for one, other in zip(exact[1], rough[1], strict=True):
        assert other.dtype == torch.float32
        assert torch.linalg.norm(one - other) <= 0.05 * torch.linalg.norm(one)


def test_chunks_compose_with_gradient_checkpointing(ragged_batch, monkeypatch):
    rows = ragged_batch()
    plain = results(Policy(build(QWEN), PolicySettings(), 0), rows)
    monkeypatch.setattr(hf_logprobs, "CHUNK_LOGITS", 5 * 32)
    cut = results(Policy(build(QWEN), PolicySettings(gradient_checkpointing=True), 0), rows)
    torch.testing.assert_close(cut[0], plain[0], rtol=0, atol=1e-6)
    for one, other in zip(cut[1], plain[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float16"}, "dtype is 'float16', whose gradients underflow"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"packing": "yes"}, "sequence_packing is 'yes', expected one of auto, on, off"),
    ],
)
def test_unknown_choices_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PolicySettings(**settings)


@pytest.mark.slow
def test_a_compiled_model_takes_any_length_and_gives_the_same(ragged_batch, monkeypatch):
    """All of torch.compile but its last stage, the C++ compiler, which takes most of a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    one_layer = Qwen3Config(**{**SMALL, "num_hidden_layers": 1}, head_dim=16)
    compiled = Policy(build(one_layer), PolicySettings(torch_compile=True), 0)
    plain = Policy(build(one_layer), PolicySettings(), 0)
    torch._dynamo.utils.counters.clear()
    for rows in (ragged_batch(), ragged_batch()[:2], ragged_batch()[1:6]):
        one, other = results(compiled, rows), results(plain, rows)
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-5)
        for mine, expected in zip(one[1], other[1], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 3, "something was compiled, and not anew for each length"
