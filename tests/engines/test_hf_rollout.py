"""The transformers rollout engine, on a tiny model."""

import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsm_trainer.engines.base import RolloutRequest, SamplingParams, Snapshot
from fsm_trainer.engines.hf_model import SpecialTokens
from fsm_trainer.engines.hf_rollout import HFRolloutEngine, _Decoder
from fsm_trainer.engines.tiny import build_tiny_checkpoint
from fsm_trainer.engines.weight_sync.shared_memory import SharedMemoryTransport

EOS = 2
RAGGED = ((5, 6, 7, 8, 14), (9,), (10, 11, 14))


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return str(build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0, hidden=32, heads=2, head_dim=16))


@pytest.fixture(scope="module")
def model(ckpt):
    model = AutoModelForCausalLM.from_pretrained(ckpt).eval()
    # Random weights of the usual size are all but uniform; larger ones make sharp, differing distributions.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model


@pytest.fixture(scope="module")
def transport():
    transport = SharedMemoryTransport()
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def snapshot(model, transport):
    return transport.publish(model.named_parameters(), 3)


@pytest.fixture
def engine(ckpt, snapshot):
    return lambda **sampling: ready(ckpt, snapshot, **sampling)


def ready(ckpt, snapshot, **sampling):
    engine = HFRolloutEngine(ckpt, SamplingParams(**{"n_samples": 4, "max_new_tokens": 12, **sampling}))
    engine.start()
    engine.load_weights(snapshot)
    return engine


def full_logits(model, prompt, tokens):
    """Logits before each completion token, by one plain forward without padding or cache."""
    with torch.no_grad():
        return model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize("prompts", [RAGGED, RAGGED[:1] * 2, ((4,) * 3, (5,) * 3)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_match_a_plain_forward(engine, model, prompts, temperature):
    rollout = engine(temperature=temperature).generate(RolloutRequest(0, prompts, 1))
    assert len(rollout.groups) == len(prompts)
    for prompt, group in zip(prompts, rollout.groups, strict=True):
        assert len(group) == 4
        for sample in group:
            logits = full_logits(model, prompt, sample.tokens) / temperature
            expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(sample.tokens).unsqueeze(-1))
            assert sample.logprobs == pytest.approx(expected.squeeze(-1).tolist(), abs=1e-4)


@pytest.mark.parametrize(("sampling", "most"), [({"top_k": 3}, 3), ({"top_p": 0.5, "temperature": 0.7}, 31)])
def test_filtered_sampling_draws_from_the_best_and_reports_the_policys_logprobs(engine, model, sampling, most):
    rollout = engine(n_samples=16, **sampling).generate(RolloutRequest(0, RAGGED, 1))
    for prompt, group in zip(RAGGED, rollout.groups, strict=True):
        for sample in group:
            logits = full_logits(model, prompt, sample.tokens) / sampling.get("temperature", 1.0)
            policy, tokens = torch.log_softmax(logits, -1), torch.tensor(sample.tokens).unsqueeze(-1)
            assert (policy.topk(most).indices == tokens).any(-1).all()
            # Probability of what is likelier than the drawn token: a nucleus ends where it reaches top_p.
            better = torch.where(policy > policy.gather(-1, tokens), policy.exp(), 0.0).sum(-1)
            assert (better < sampling.get("top_p", 1.0)).all()
            assert sample.logprobs == pytest.approx(policy.gather(-1, tokens).squeeze(-1).tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_match_a_plain_forward_of_each_sequence_alone(engine, model, temperature):
    rows = [(5, 6, 7, 8, 14), (9,), (10, 11), (4,) * 9, (3, 12, 5)]
    scores = engine().score(rows, temperature)
    assert [len(values) for values in scores] == [4, 0, 1, 8, 2]
    for row, values in zip(rows, scores, strict=True):
        logits = full_logits(model, row[:1], row[1:]) / temperature
        expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(row[1:], dtype=torch.long).unsqueeze(-1))
        assert values == pytest.approx(expected.squeeze(-1).tolist(), abs=1e-4)


def test_an_engine_without_weights_scores_nothing(ckpt):
    engine = HFRolloutEngine(ckpt, SamplingParams())
    engine.start()
    with pytest.raises(RuntimeError, match="no weights loaded"):
        engine.score([(5, 6)], 1.0)


def test_greedy_is_transformers_own_generate(engine, model):
    rollout = engine(temperature=0.0, n_samples=1).generate(RolloutRequest(0, RAGGED, 1))
    for prompt, (sample,) in zip(RAGGED, rollout.groups, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :]
        assert list(sample.tokens) == expected.tolist()


def test_completions_end_at_eos_or_at_the_length(engine):
    rollout = engine(n_samples=64, temperature=2.0).generate(RolloutRequest(0, RAGGED, 1))
    samples = [sample for group in rollout.groups for sample in group]
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        assert len(sample.tokens) == len(sample.logprobs)
        assert EOS not in sample.tokens[:-1]
        if sample.finish_reason == "stop":
            assert sample.tokens[-1] == EOS
        else:
            assert len(sample.tokens) == 12
            assert sample.tokens[-1] != EOS
    assert (rollout.version_first, rollout.version_last) == (3, 3)


def end_at(engine, *eos):
    engine._special = SpecialTokens(eos=eos, pad=0)
    return engine


def test_finished_samples_do_not_change_the_others(engine, monkeypatch):
    request = RolloutRequest(0, RAGGED, 1)
    endless = end_at(engine(n_samples=16), -1).generate(request)
    dropped = []
    select = _Decoder.select
    monkeypatch.setattr(_Decoder, "select", lambda self, keep: dropped.append(len(keep)) or select(self, keep))
    stopping = end_at(engine(n_samples=16), *range(2, 9)).generate(request)
    assert len(dropped) >= 2, "rows must really have been dropped"
    for ended, whole in zip(sum(stopping.groups, ()), sum(endless.groups, ()), strict=True):
        length = len(ended.tokens)
        assert ended.tokens == whole.tokens[:length]
        assert ended.logprobs == pytest.approx(whole.logprobs[:length], abs=1e-4)


def test_generation_ends_with_the_last_sample(engine, monkeypatch):
    rollouts = engine(temperature=0.0, max_new_tokens=200, n_samples=2)
    first = rollouts.generate(RolloutRequest(0, RAGGED[:1], 1)).groups[0][0].tokens
    calls = []
    decode = _Decoder.decode
    monkeypatch.setattr(_Decoder, "decode", lambda self, tokens: calls.append(1) or decode(self, tokens))
    (group,) = end_at(rollouts, first[2]).generate(RolloutRequest(0, RAGGED[:1], 1)).groups
    length = first.index(first[2]) + 1
    assert [sample.tokens for sample in group] == [first[:length]] * 2
    assert len(calls) == length - 1


def test_the_same_request_gives_the_same_bits_on_any_instance(engine):
    request = RolloutRequest(5, RAGGED, 9)
    one, other = engine(), engine()
    other.generate(RolloutRequest(6, RAGGED, 9))
    torch.manual_seed(123)
    first = one.generate(request)
    torch.rand(7)
    assert other.generate(request) == first
    assert one.generate(request) == first
    assert one.generate(RolloutRequest(6, RAGGED, 9)) != first
    assert one.generate(RolloutRequest(5, RAGGED, 10)) != first


def test_samples_of_one_prompt_differ(engine):
    rollout = engine(n_samples=16).generate(RolloutRequest(0, RAGGED, 1))
    assert all(len({sample.tokens for sample in group}) > 8 for group in rollout.groups)


def test_loaded_weights_are_used(ckpt, engine, model, transport):
    rollouts = engine(temperature=0.0)
    before = rollouts.generate(RolloutRequest(0, RAGGED, 1))
    with torch.no_grad():
        changed = {name: parameter * 1.5 + 0.1 for name, parameter in model.named_parameters()}
    assert rollouts.load_weights(transport.publish(changed.items(), 8)).version == 8
    after = rollouts.generate(RolloutRequest(0, RAGGED, 1))
    assert after.version_first == after.version_last == 8
    assert after.groups != before.groups


def test_nothing_is_generated_before_a_load(ckpt):
    engine = HFRolloutEngine(ckpt, SamplingParams())
    with pytest.raises(RuntimeError, match="not started"):
        engine.generate(RolloutRequest(0, RAGGED, 1))
    engine.start()
    with pytest.raises(RuntimeError, match="no weights loaded"):
        engine.generate(RolloutRequest(0, RAGGED, 1))
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(RolloutRequest(0, RAGGED, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks parameter model.norm.weight"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "holds extra"),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(2, 2)}), r"lm_head.weight has shape \(2, 2\)"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(engine, model, transport, change, message):
    rollouts = engine()
    before = rollouts.generate(RolloutRequest(0, RAGGED, 1))
    tensors = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    change(tensors)
    with pytest.raises(ValueError, match=message):
        rollouts.load_weights(transport.publish(tensors.items(), 9))
    assert rollouts.generate(RolloutRequest(0, RAGGED, 1)) == before


def test_a_load_that_breaks_half_way_leaves_an_engine_that_serves_nothing(engine, model, snapshot, monkeypatch):
    rollouts = engine()
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    last = list(tensors)[-1]
    tensors[last] = torch.zeros_like(tensors[last], device="meta")
    with monkeypatch.context() as patch:
        patch.setattr("fsm_trainer.engines.hf_rollout.read_snapshot", lambda snapshot: tensors.items())
        with pytest.raises(NotImplementedError, match="meta"):
            rollouts.load_weights(snapshot)
    with pytest.raises(RuntimeError, match="no weights loaded"):
        rollouts.generate(RolloutRequest(0, RAGGED, 1))
    assert rollouts.load_weights(snapshot).version == 3
    rollouts.generate(RolloutRequest(0, RAGGED, 1))


def test_a_released_snapshot_is_refused(engine):
    with pytest.raises(ValueError, match="version 2 are gone"):
        engine().load_weights(Snapshot(2, "/proc/self/fd/9999", 1))


def test_abort_stops_a_running_generate_and_only_that(engine, monkeypatch):
    rollouts = engine(max_new_tokens=50)
    reached, aborted = threading.Event(), threading.Event()
    original = rollouts._model.forward
    seen = []

    def forward(*args, **kwargs):
        if len(seen) == 3:
            reached.set()
            assert aborted.wait(30)
        seen.append(1)
        return original(*args, **kwargs)

    failures = []

    def work():
        try:
            rollouts.generate(RolloutRequest(0, RAGGED, 1))
        except RuntimeError as error:
            failures.append(str(error))

    monkeypatch.setattr("fsm_trainer.engines.hf_rollout.cache_argument", lambda model: "cache")
    rollouts._model.forward = forward
    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(30)
    rollouts.abort()
    aborted.set()
    thread.join(30)
    assert failures == ["generation aborted"]
    assert len(seen) == 4, "no further token after the abort"
    rollouts.abort()
    rollouts._model.forward = original
    assert rollouts.generate(RolloutRequest(0, RAGGED, 1)).version_first == 3


def test_weights_that_give_nan_are_named(engine, model, transport):
    rollouts = engine()
    tensors = {name: torch.full_like(parameter, float("nan")) for name, parameter in model.named_parameters()}
    rollouts.load_weights(transport.publish(tensors.items(), 11))
    with pytest.raises(FloatingPointError, match="version 11"):
        rollouts.generate(RolloutRequest(0, RAGGED, 1))


def test_a_request_that_cannot_be_served_is_refused(engine):
    rollouts = engine(max_new_tokens=250)
    with pytest.raises(ValueError, match="need 257 positions"):
        rollouts.generate(RolloutRequest(0, ((4,) * 7,), 1))
    with pytest.raises(ValueError, match="no prompts"):
        rollouts.generate(RolloutRequest(0, (), 1))
    with pytest.raises(ValueError, match="top_p is 2"):
        HFRolloutEngine("anywhere", SamplingParams(top_p=2.0))
