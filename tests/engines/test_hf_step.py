"""A batch's gradient however it is cut, the reference policy, and what becomes of numbers that are not finite."""

import math
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.hf_lora import LoraSettings
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.tiny import build_tiny_checkpoint


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return str(build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0, hidden=32, heads=2, head_dim=16))


@pytest.fixture
def trainer(ckpt):
    engines = []

    def build(**settings):
        engines.append(HFTrainEngine(ckpt, **{"lr": 1e-2, "weight_decay": 0.0, "grad_clip_norm": None, **settings}))
        engines[-1].start()
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def step(engine, rows):
    """Metrics without times, and gradients."""
    result = engine.train(rows)
    metrics = {name: value for name, value in result.metrics.items() if name != "tokens_per_s"}
    return metrics, [p.grad.clone() for p in engine._parameters]


def taken_logprobs(model, row):
    distribution = torch.log_softmax(model(torch.tensor([row.tokens])).logits[0], -1)
    return torch.stack([distribution[i - 1, row.tokens[i]] for i, wanted in enumerate(row.loss_mask) if wanted])


OBJECTIVES = {
    "grpo": Objective(entropy_coef=0.01),
    "gspo": Objective(ratio_level="sequence", aggregation="sequence-mean", clip_low=0.1, clip_high=0.1),
    "kl and a correction": Objective(kl_coef=0.1, correction="token-truncate", aggregation="sequence-mean"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_cut_changes_the_step(trainer, ragged_batch, name):
    """Whatever the budget, the order and the layout: one gradient, one set of metrics."""
    rows, objective = ragged_batch(), OBJECTIVES[name]
    metrics, gradients = step(trainer(objective=objective, mini_bs=len(rows)), rows)
    cuts = [{"mini_bs": size} for size in (1, 2, 4, 7)]
    cuts += [
        {"max_tokens_per_micro_batch": budget, "sequence_packing": packing}
        for budget in (19, 31, 1000)
        for packing in ("on", "off")
    ]
    for seed, cut in enumerate(cuts):
        shuffled = random.Random(seed).sample(rows, len(rows))
        other_metrics, other = step(trainer(objective=objective, **cut), shuffled)
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6), cut
        for mine, expected in zip(other, gradients, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-7)


def test_a_token_budget_makes_few_and_small_micro_batches(trainer, ragged_batch, monkeypatch):
    rows = ragged_batch()
    engine = trainer(max_tokens_per_micro_batch=31, sequence_packing="on")
    shapes, collate = [], engine._policy.collate

    def record(part):
        batch = collate(part)
        shapes.append(tuple(batch.input_ids.shape) if batch else None)
        return batch

    monkeypatch.setattr(engine._policy, "collate", record)
    engine.train(rows)
    assert [lines for lines, _ in shapes] == [1] * len(shapes)
    tokens = sum(len(row.tokens) - 1 for row in rows if any(row.loss_mask))
    assert sum(length for _, length in shapes) == tokens, "no padding"
    assert len(shapes) == math.ceil(tokens / 31)


def test_a_sequence_past_the_budget_is_refused(trainer, ragged_batch):
    engine = trainer(max_tokens_per_micro_batch=12)
    with pytest.raises(ValueError, match="a sequence has 19 tokens but max_tokens_per_micro_batch is 12; raise it"):
        engine.train(ragged_batch())


def test_the_kl_term_is_to_the_weights_at_the_start(trainer, ckpt, ragged_batch):
    """k3 against the checkpoint's own logprobs (Shao et al. 2024, eq. 4), and its gradient by autograd."""
    rows = [row for row in ragged_batch() if any(row.loss_mask)]
    engine = trainer(objective=Objective(kl_coef=0.5, clip_low=0.2, clip_high=0.2), mini_bs=2)
    engine.train(rows)
    reference = AutoModelForCausalLM.from_pretrained(ckpt)
    current = AutoModelForCausalLM.from_pretrained(ckpt)
    current.load_state_dict(engine._model.state_dict())
    tokens = sum(sum(row.loss_mask) for row in rows)
    loss, total = 0.0, 0.0
    for row in rows:
        ours = taken_logprobs(current, row)
        with torch.no_grad():
            theirs = taken_logprobs(reference, row)
        kl = (theirs - ours).exp() - (theirs - ours) - 1
        rollout = torch.tensor([p for p, wanted in zip(row.logprobs, row.loss_mask, strict=True) if wanted])
        ratio = (ours - rollout).exp()
        surrogate = torch.minimum(ratio * row.advantage, ratio.clamp(0.8, 1.2) * row.advantage)
        loss = loss + (0.5 * kl - surrogate).sum() / tokens
        total += kl.sum().item()
    loss.backward()
    metrics, gradients = step(engine, rows)
    assert total / tokens > 1e-4, "one step has moved the policy"
    assert metrics["kl"] == pytest.approx(total / tokens, rel=1e-3)
    for mine, parameter in zip(gradients, current.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_reference_that_is_refreshed_is_the_current_policy(trainer, ragged_batch):
    fixed = trainer(objective=Objective(kl_coef=0.1))
    fresh = trainer(objective=Objective(kl_coef=0.1), reference_refresh_steps=2)
    kls = [[engine.train(ragged_batch()).metrics["kl"] for _ in range(4)] for engine in (fixed, fresh)]
    assert [kl > 1e-6 for kl in kls[0]] == [False, True, True, True]
    assert [kl > 1e-6 for kl in kls[1]] == [False, True, False, True]


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_what_is_not_finite_is_skipped_and_counted(trainer, ragged_batch, broken):
    engine, rows = trainer(nonfinite="skip"), ragged_batch()
    engine.train(rows)
    before = [p.detach().clone() for p in engine._parameters]
    scale = math.nan if broken == "loss" else math.inf
    layer = engine._model.lm_head
    if broken == "loss":
        hook = layer.register_forward_hook(lambda _module, _inputs, logits: logits * scale)
    else:
        hook = layer.weight.register_hook(lambda gradient: gradient * scale)
    result = engine.train(rows)
    hook.remove()
    assert (result.stepped, result.train_version, result.metrics["skipped_steps"]) == (False, 1, 1)
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert all(torch.equal(p, old) for p, old in zip(engine._parameters, before, strict=True))
    sound = engine.train(rows)
    assert (sound.stepped, sound.train_version, sound.metrics["skipped_steps"]) == (True, 2, 1)


def test_sequences_that_the_model_cannot_read_are_refused_before_anything_is_computed(trainer):
    engine = trainer()
    long = TrainSequence((5,) * 257, (0.0,) + (-1.0,) * 256, 1, (0,) + (1,) * 256, 1.0, 0.0)
    with pytest.raises(ValueError, match="sequence 0 has 257 tokens but the model has 256 positions"):
        engine.train([long])


def test_a_batch_that_is_masked_as_a_whole_is_no_step(trainer, ragged_batch):
    masked = [TrainSequence(r.tokens, r.logprobs, r.prompt_len, (0,) * len(r.tokens), 1.0, 0.0) for r in ragged_batch()]
    result = trainer(objective=Objective(entropy_coef=0.1)).train(masked)
    assert (result.stepped, result.metrics["loss_tokens"]) == (False, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nonfinite": "ignore"}, "nonfinite is 'ignore', expected one of error, skip"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch is 0, expected at least 1"),
        ({"sequence_packing": "maybe"}, "sequence_packing is 'maybe'"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_loaded(settings, message):
    with pytest.raises(ValueError, match=message):
        HFTrainEngine("nowhere", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw-8bit"},
        {"lora": LoraSettings(rank=64, alpha=64), "optimizer": "adamw-8bit"},
        {"lora": LoraSettings(rank=2, alpha=4), "objective": Objective(kl_coef=0.1)},
        {"objective": Objective(kl_coef=0.1), "reference_refresh_steps": 3},
    ],
    ids=["8 bits", "adapters in 8 bits", "adapters with KL", "a reference that was refreshed"],
)
def test_every_kind_of_step_goes_on_from_a_checkpoint_to_the_bit(trainer, ragged_batch, tmp_path, settings):
    rows, one, other = ragged_batch(), trainer(**settings), trainer(**settings)
    for _ in range(3):
        one.train(rows)
    one.save(str(tmp_path / "saved"))
    assert other.restore(str(tmp_path / "saved")) == 3
    for _ in range(2):
        first, second = step(one, rows), step(other, rows)
        assert first[0] == second[0]
    assert all(torch.equal(p, q) for p, q in zip(one._parameters, other._parameters, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packing", ["off", "on"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_gpu_takes_the_step_of_the_cpu(trainer, ragged_batch, packing, checkpointing):
    settings = {"sequence_packing": packing, "gradient_checkpointing": checkpointing, "mini_bs": 4}
    expected, gradients = step(trainer(), ragged_batch())
    metrics, ours = step(trainer(device="cuda:0", **settings), ragged_batch())
    assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    for mine, theirs in zip(ours, gradients, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-3, atol=1e-5)
    rough, _ = step(trainer(device="cuda:0", dtype="bfloat16", **settings), ragged_batch())
    assert rough["loss"] == pytest.approx(expected["loss"], abs=0.02)
