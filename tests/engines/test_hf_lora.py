"""LoRA: against `peft`'s own merged model, and from the trainer to the rollout engine."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.base import RolloutRequest, SamplingParams
from fsm_trainer.engines.hf_lora import LoraSettings, attach_lora, trained_parameters
from fsm_trainer.engines.hf_rollout import HFRolloutEngine
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.tiny import build_tiny_checkpoint
from fsm_trainer.engines.weight_sync.transport import read_snapshot

LORA = LoraSettings(rank=2, alpha=8)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return str(build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0))


@pytest.fixture
def trainer(ckpt):
    engines = []

    def build(path=ckpt, **settings):
        engines.append(HFTrainEngine(path, **{"lr": 1e-2, "lora": LORA, **settings}))
        engines[-1].start()
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture
def rollouts(ckpt):
    engine = HFRolloutEngine(ckpt, SamplingParams(n_samples=4, max_new_tokens=6), lora=LORA)
    engine.start()
    yield engine
    engine.close()


def sampled(engine):
    """Train sequences that an engine generates."""
    prompts = ((5, 6, 7), (9, 10, 11, 12, 13))
    groups = engine.generate(RolloutRequest(1, prompts, seed=0)).groups
    return [
        TrainSequence(
            tokens=(*prompt, *sample.tokens),
            logprobs=(*(0.0,) * len(prompt), *sample.logprobs),
            prompt_len=len(prompt),
            loss_mask=(*(0,) * len(prompt), *(1,) * len(sample.tokens)),
            advantage=1.0 - index % 3,
            reward=0.0,
        )
        for prompt, group in zip(prompts, groups, strict=True)
        for index, sample in enumerate(group)
    ]


def test_only_the_adapters_are_trained_and_they_change_nothing_at_first(ckpt):
    model = AutoModelForCausalLM.from_pretrained(ckpt, dtype=torch.bfloat16)
    ids = torch.tensor([[5, 6, 7]])
    before = model(ids).logits
    attach_lora(model, LORA)
    assert torch.equal(model(ids).logits, before)
    trained = dict(trained_parameters(model))
    layers = 2 * 7
    assert len(trained) == 2 * layers, "A and B for each linear layer but the output"
    assert all(".lora_" in name and p.dtype == torch.float32 for name, p in trained.items())


def test_the_seed_fixes_the_adapters(ckpt):
    def adapters(seed):
        model = AutoModelForCausalLM.from_pretrained(ckpt)
        attach_lora(model, LORA, seed)
        return torch.cat([p.flatten() for _, p in trained_parameters(model)])

    assert torch.equal(adapters(3), adapters(3))
    assert not torch.equal(adapters(3), adapters(4))


def test_the_rollout_engine_serves_the_trainers_policy(trainer, rollouts):
    engine = trainer()
    rollouts.load_weights(engine.export(0))
    for version in (1, 2, 3):
        result = engine.train(sampled(rollouts))
        assert result.metrics["ratio_min"] == pytest.approx(1.0, abs=1e-5)
        assert result.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert rollouts.load_weights(engine.export(version)).version == version
    sequences = [(5, 6, 7, 8, 9), (10, 11, 12)]
    ours, theirs = engine.score(sequences, 1.0), rollouts.score(sequences, 1.0)
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_a_sync_carries_little(trainer):
    small, full = trainer().export(0), trainer(lora=None).export(0)
    assert small.nbytes < 0.15 * full.nbytes
    assert all(".lora_" in name for name, _ in read_snapshot(small))


def test_a_checkpoint_names_its_base_model_from_any_folder(trainer, ckpt, tmp_path, monkeypatch):
    base = Path(ckpt)
    monkeypatch.chdir(base.parent)
    engine = trainer(base.name)
    monkeypatch.chdir(tmp_path)
    engine.save("step")
    assert json.loads((tmp_path / "step" / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert not (tmp_path / "step" / "README.md").exists(), "peft's empty model card"
    AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "step"))


def test_the_checkpoint_is_adapters_that_peft_merges_to_the_same_policy(trainer, rollouts, ckpt, tmp_path):
    engine = trainer()
    rollouts.load_weights(engine.export(0))
    batch = sampled(rollouts)
    for _ in range(3):
        engine.train(batch)
    engine.save(str(tmp_path / "step-3"))
    assert not list((tmp_path / "step-3").glob("model*.safetensors")), "the base model is not saved again"
    base = AutoModelForCausalLM.from_pretrained(ckpt)
    untrained = base(torch.tensor([batch[0].tokens])).logits
    merged = PeftModel.from_pretrained(base, str(tmp_path / "step-3")).merge_and_unload()
    logits = merged(torch.tensor([batch[0].tokens])).logits
    assert not torch.allclose(logits, untrained, atol=1e-2)
    expected = torch.log_softmax(logits[0, :-1], -1).gather(-1, torch.tensor(batch[0].tokens[1:]).unsqueeze(-1))
    assert engine.score([batch[0].tokens], 1.0)[0] == pytest.approx(expected.squeeze(-1).tolist(), abs=1e-5)


def test_the_reference_is_the_base_model(trainer, rollouts, ckpt):
    engine = trainer(objective=Objective(kl_coef=0.1))
    rollouts.load_weights(engine.export(0))
    batch = sampled(rollouts)
    assert engine.train(batch).metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    base, moved = AutoModelForCausalLM.from_pretrained(ckpt), engine.score([row.tokens for row in batch], 1.0)
    terms = []
    for row, scores in zip(batch, moved, strict=True):
        with torch.no_grad():
            distribution = torch.log_softmax(base(torch.tensor([row.tokens])).logits[0], -1)
        for i, wanted in enumerate(row.loss_mask):
            if wanted:
                difference = distribution[i - 1, row.tokens[i]].item() - scores[i - 1]
                terms.append(torch.expm1(torch.tensor(difference)).item() - difference)
    assert engine.train(batch).metrics["kl"] == pytest.approx(sum(terms) / len(terms), rel=1e-2)
    assert sum(p.numel() for p in engine._reference.tensors) < 0.15 * sum(p.numel() for p in base.parameters())


def test_named_layers_alone_are_adapted(ckpt):
    model = AutoModelForCausalLM.from_pretrained(ckpt)
    attach_lora(model, LoraSettings(rank=1, alpha=1, target_modules=("q_proj", "model.layers.1.mlp.up_proj")))
    names = {name.split(".lora_")[0] for name, _ in trained_parameters(model)}
    assert names == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_a_target_that_matches_nothing_is_refused(ckpt):
    model = AutoModelForCausalLM.from_pretrained(ckpt)
    with pytest.raises(
        ValueError, match="names 'c_attn', which matches no layer of the Qwen3ForCausalLM; it has .*q_p"
    ):
        attach_lora(model, LoraSettings(rank=1, alpha=1, target_modules=("q_proj", "c_attn")))


def test_without_peft_the_extra_is_named(ckpt, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(ckpt)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ValueError, match=r"lora_rank needs the extra 'lora': pip install 'fsm-trainer\[lora\]'"):
        attach_lora(model, LORA)


@pytest.mark.parametrize("values", [(0, 1, ("q",)), (1, 0, ("q",)), (1, 1, ())])
def test_impossible_adapters_are_refused(values):
    with pytest.raises(ValueError, match="lora_"):
        LoraSettings(*values)
