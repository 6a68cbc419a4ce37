"""The transformers train engine, on a tiny model."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines import hf_train
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.tiny import build_tiny_checkpoint
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport
from fsm_trainer.engines.weight_sync.transport import read_snapshot


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return str(build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0, hidden=32, heads=2, head_dim=16))


@pytest.fixture
def trainer(ckpt):
    engines = []

    def build(**settings):
        engines.append(HFTrainEngine(ckpt, **{"lr": 1e-2, "weight_decay": 0.0, **settings}))
        engines[-1].start()
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def weights(engine):
    return {name: parameter.detach().clone() for name, parameter in engine._model.named_parameters()}


def timeless(result):
    """A result without what a clock says."""
    return (result.stepped, result.train_version, {k: v for k, v in result.metrics.items() if k != "tokens_per_s"})


def equal(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


def sequence(ckpt, prompt, completion, advantage, *, shift=0.0, temperature=1.0):
    """A sequence whose rollout logprobs are the checkpoint's own, moved by `shift`."""
    model = AutoModelForCausalLM.from_pretrained(ckpt)
    logprobs = ()
    if completion:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        distribution = torch.log_softmax(logits / temperature, -1)
        logprobs = tuple((distribution.gather(-1, torch.tensor(completion).unsqueeze(-1)).squeeze(-1) + shift).tolist())
    zeros, ones = (0,) * len(prompt), (1,) * len(completion)
    return TrainSequence(
        tokens=(*prompt, *completion),
        logprobs=(*zeros, *logprobs),
        prompt_len=len(prompt),
        loss_mask=(*zeros, *ones),
        advantage=advantage,
        reward=0.0,
    )


def ragged(ckpt, **moved):
    rows = [
        ((5, 6, 7), (8, 9), 1.0),
        ((10,), (11, 12, 13, 14, 2), -0.5),
        ((5, 6, 7, 8, 9, 10), (4,), 0.7),
        ((6, 7), (), -0.9),
        ((9, 9), (20, 21, 22), -1.2),
        ((30, 31, 4), (5, 6, 7, 8), 0.4),
        ((15,), (16, 2), 0.1),
    ]
    return [sequence(ckpt, *row, **moved) for row in rows]


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo", "dr-grpo", "dapo"])
def test_a_fresh_batch_has_ratio_one_and_a_stale_one_has_not(trainer, ckpt, algorithm):
    engine = trainer(objective=get_algorithm(algorithm).objective(max_new_tokens=8), mini_bs=3)
    batch = ragged(ckpt)
    fresh = engine.train(batch).metrics
    assert fresh["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert fresh["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert fresh["approx_kl"] == pytest.approx(0.0, abs=1e-5)
    # The same batch after the step is stale by one.
    stale = engine.train(batch)
    assert abs(stale.metrics["ratio_max"] - 1.0) > 1e-3
    assert stale.metrics["approx_kl"] > 1e-5
    assert all(math.isfinite(value) for value in stale.metrics.values())
    assert stale.train_version == 2


def test_logprobs_are_taken_at_the_sampling_temperature(trainer, ckpt):
    batch = ragged(ckpt, temperature=0.6)
    assert trainer(temperature=0.6).train(batch).metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert abs(trainer(temperature=1.0).train(batch).metrics["ratio_max"] - 1.0) > 1e-3
    greedy = trainer(temperature=0.0).train(ragged(ckpt))
    assert greedy.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("algorithm", ["grpo", "gspo"])
def test_micro_batches_do_not_change_the_step(trainer, ckpt, algorithm):
    batch = ragged(ckpt, shift=0.05)
    results = []
    for mini_bs in (1, 2, 4, 7):
        objective = get_algorithm(algorithm).objective(max_new_tokens=8, clip_low=0.2, clip_high=0.2, entropy_coef=0.01)
        engine = trainer(objective=objective, mini_bs=mini_bs, grad_clip_norm=None)
        result = engine.train(batch)
        gradients = {name: p.grad.clone() for name, p in engine._model.named_parameters()}
        results.append((timeless(result)[2], gradients))
    metrics, gradients = results[-1]
    for other_metrics, other in results[:-1]:
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-7)


def test_the_gradient_is_the_formulas(trainer, ckpt):
    """GRPO on unpadded rows, one at a time, by autograd of the plain formula."""
    batch = ragged(ckpt, shift=-0.1)
    engine = trainer(grad_clip_norm=None, mini_bs=4)
    loss = engine.train(batch).metrics["loss"]
    model = AutoModelForCausalLM.from_pretrained(ckpt)
    total, terms = 0, 0.0
    for row in batch:
        n = len(row.tokens) - row.prompt_len
        if n == 0:
            continue
        logits = model(torch.tensor([row.tokens])).logits[0, row.prompt_len - 1 : -1]
        taken = torch.log_softmax(logits, -1)[range(n), list(row.tokens[row.prompt_len :])]
        ratio = (taken - torch.tensor(row.logprobs[row.prompt_len :])).exp()
        terms = terms + torch.minimum(ratio * row.advantage, ratio.clamp(0.8, 1.2) * row.advantage).sum()
        total += n
    expected = -terms / total
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for (name, parameter), ours in zip(model.named_parameters(), engine._model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, parameter.grad, rtol=1e-4, atol=1e-7, msg=name)


def test_metrics_of_one_step(trainer, ckpt):
    metrics = trainer(objective=Objective(entropy_coef=0.01)).train(ragged(ckpt)).metrics
    assert set(metrics) == {
        "loss",
        "grad_norm",
        "ratio_mean",
        "ratio_min",
        "ratio_max",
        "clip_fraction_low",
        "clip_fraction_high",
        "effective_sample_size",
        "entropy",
        "approx_kl",
        "lr",
        "skipped_steps",
        "tokens_per_s",
        "loss_tokens",
        "logprob_gap",
        "logprob_gap_signed",
        "logprob_gap_max",
    }
    assert metrics["loss_tokens"] == 17
    assert metrics["lr"] == 1e-2
    assert metrics["grad_norm"] > 0
    assert metrics["entropy"] == pytest.approx(math.log(32), abs=0.1), "random weights are all but uniform"


def test_clipping_bounds_the_gradient_and_reports_the_norm_before(trainer, ckpt):
    free, clipped = trainer(grad_clip_norm=None), trainer(grad_clip_norm=1e-3)
    norms = [engine.train(ragged(ckpt)).metrics["grad_norm"] for engine in (free, clipped)]
    assert norms[0] == pytest.approx(norms[1])
    after = [math.sqrt(sum(float(p.grad.square().sum()) for p in e._model.parameters())) for e in (free, clipped)]
    assert after[0] == pytest.approx(norms[0], rel=1e-5)
    assert after[1] == pytest.approx(1e-3, rel=1e-3)


def test_the_step_is_adamws(trainer, ckpt):
    engine = trainer(lr=3e-3, betas=(0.8, 0.9), weight_decay=0.1, grad_clip_norm=None)
    model = AutoModelForCausalLM.from_pretrained(ckpt)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3, betas=(0.8, 0.9)
    )
    for _ in range(2):
        engine.train(ragged(ckpt))
        for parameter, ours in zip(model.parameters(), engine._model.parameters(), strict=True):
            parameter.grad = ours.grad.clone()
        reference.step()
    for parameter, ours in zip(model.parameters(), engine._model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter, rtol=1e-5, atol=1e-7)


def test_the_schedule_sets_the_learning_rate(trainer, ckpt):
    engine = trainer(lr=1.0, lr_decay_style="linear", warmup=2, lr_decay_steps=4, min_lr=0.5)
    assert [engine.train(ragged(ckpt)).metrics["lr"] for _ in range(5)] == [0.5, 1.0, 1.0, 0.75, 0.5]


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ([((5, 6), (), 1.0), ((7,), (), -1.0)], {"objective": Objective(entropy_coef=0.1)}),  # nothing in the loss
        ([((5, 6), (7,), 0.0), ((7,), (8,), 0.0)], {}),  # no advantage, no other term
        ([((5, 6), (), 1.0), ((7,), (8,), 0.0)], {}),  # the only advantage has no token
        ([], {}),
    ],
)
def test_no_gradient_means_no_step(trainer, ckpt, rows, settings):
    engine = trainer(weight_decay=0.1, **settings)
    # Momentum and weight decay must not move anything either.
    engine.train(ragged(ckpt))
    before = weights(engine)
    result = engine.train([sequence(ckpt, *row) for row in rows])
    assert (result.stepped, result.train_version) == (False, 1)
    assert result.metrics["loss_tokens"] == sum(len(completion) for _, completion, _ in rows)
    assert equal(before, weights(engine))


def test_an_entropy_bonus_is_reason_enough_for_a_step(trainer, ckpt):
    engine = trainer(objective=Objective(entropy_coef=0.1))
    result = engine.train([sequence(ckpt, (5, 6), (7,), 0.0)])
    assert (result.stepped, result.train_version) == (True, 1)


def test_micro_batches_without_a_token_in_the_loss_are_passed_over(trainer, ckpt):
    empty, full = sequence(ckpt, (5, 6), (), 1.0), sequence(ckpt, (5, 6), (7, 8), 1.0)
    one, two = trainer(mini_bs=1), trainer(mini_bs=1)
    assert timeless(one.train([empty, full])) == timeless(two.train([full]))
    assert equal(weights(one), weights(two))


@pytest.mark.parametrize("broken", ["loss", "gradient norm"])
def test_a_value_that_is_not_finite_stops_before_the_step(trainer, ckpt, broken, monkeypatch):
    engine = trainer()
    engine.train(ragged(ckpt))
    before = weights(engine)
    batch = ragged(ckpt)
    with monkeypatch.context() as patch:
        if broken == "loss":
            batch = [sequence(ckpt, (5, 6), (7, 8), -1.0, shift=math.nan)]
        else:
            hook = engine._model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
            patch.callback = hook.remove
        with pytest.raises(FloatingPointError, match=rf"{broken} is (nan|inf) at optimiser step 2"):
            engine.train(batch)
        if broken == "gradient norm":
            hook.remove()
    assert equal(before, weights(engine))
    assert engine.train(ragged(ckpt)).train_version == 2, "it can go on with a sound batch"


def test_two_engines_take_the_same_steps_to_the_bit(trainer, ckpt):
    one, two = trainer(mini_bs=2, seed=3), trainer(mini_bs=2, seed=3)
    for _ in range(3):
        assert timeless(one.train(ragged(ckpt))) == timeless(two.train(ragged(ckpt)))
    assert equal(weights(one), weights(two))


def test_export_publishes_the_current_weights_until_released(trainer, ckpt):
    transport = SharedMemoryTransport()
    engine = trainer(transport=transport)
    snapshot = engine.export(0)
    before = weights(engine)
    engine.train(ragged(ckpt))
    assert equal(before, dict(read_snapshot(snapshot)))
    last = engine.export(1)
    assert equal(weights(engine), dict(read_snapshot(last)))
    engine.release(0)
    with pytest.raises(ValueError, match="version 0 are gone"):
        list(read_snapshot(snapshot))
    list(read_snapshot(last))
    engine.close()
    with pytest.raises(ValueError, match="version 1 are gone"):
        list(read_snapshot(last))
    with pytest.raises(RuntimeError, match="closed"):
        engine.train(ragged(ckpt))


def test_a_saved_checkpoint_is_loaded_by_transformers(trainer, ckpt, tmp_path):
    engine = trainer()
    engine.train(ragged(ckpt))
    engine.save(str(tmp_path / "step-1"))
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1")
    assert equal(weights(engine), dict(loaded.named_parameters()))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "step-1")
    assert tokenizer.decode(tokenizer("4821=")["input_ids"]) == "4821="
    again = HFTrainEngine(str(tmp_path / "step-1"))
    again.start()
    assert equal(weights(engine), weights(again))


def test_bfloat16_is_the_forwards_dtype_and_weights_stay_float32(trainer, ckpt):
    engine = trainer(dtype="bfloat16")
    metrics = engine.train(ragged(ckpt)).metrics
    assert {parameter.dtype for parameter in engine._model.parameters()} == {torch.float32}
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=0.02)
    assert metrics["ratio_mean"] != pytest.approx(1.0, abs=1e-5), "the forward must really be rounded"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"mini_bs": 0}, "mini_bs is 0"),
        ({"dtype": "float16"}, "float16"),
        ({"lr_decay_style": "cosine"}, "lr_decay_steps is None"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_loaded(settings, message):
    with pytest.raises(ValueError, match=message):
        HFTrainEngine("nowhere", **settings)


def test_an_accumulation_that_would_split_the_batch_is_refused(trainer, ckpt):
    engine = trainer(mini_bs=2, gradient_accumulation_steps=3)
    with pytest.raises(ValueError, match="has 4 micro-batches of 2"):
        engine.train(ragged(ckpt))
    assert engine.train(ragged(ckpt)[:6]).stepped


def test_an_engine_whose_start_failed_closes(ckpt, monkeypatch):
    def refuse(*_):
        raise ValueError("names no EOS token")

    monkeypatch.setattr(hf_train, "special_tokens", refuse)
    engine = HFTrainEngine(ckpt)
    with pytest.raises(ValueError, match="EOS"):
        engine.start()
    engine.close()
    with pytest.raises(RuntimeError, match="not started"):
        engine.export(0)
