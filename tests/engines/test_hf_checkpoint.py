"""What an engine saves brings it back to the bit, and what does not fit is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import fsm_trainer
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.engines.hf_checkpoint import NUMBERS, TENSORS, check_fits, save_state
from fsm_trainer.engines.hf_lora import LoraSettings
from fsm_trainer.engines.hf_train import HFTrainEngine
from fsm_trainer.engines.tiny import build_tiny_checkpoint

SMALL = {"hidden": 16, "layers": 1, "heads": 2, "head_dim": 8, "context": 32}


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return str(build_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), seed=0, **SMALL))


@pytest.fixture
def engine(ckpt):
    made = []

    def build(**settings):
        made.append(HFTrainEngine(ckpt, **{"lr": 1e-2, "lr_decay_style": "linear", "lr_decay_steps": 9, **settings}))
        made[-1].start()
        return made[-1]

    yield build
    for each in made:
        each.close()


def batch(step):
    """Two sequences, others at each step."""
    rows = [((5, 6, 7), (8 + step, 9), 1.0), ((10 + step,), (11, 12, 13), -0.5)]
    return [
        TrainSequence(
            tokens=(*prompt, *completion),
            logprobs=(*(0.0 for _ in prompt), *(-3.0 for _ in completion)),
            prompt_len=len(prompt),
            loss_mask=(*(0 for _ in prompt), *(1 for _ in completion)),
            advantage=advantage,
            reward=0.0,
        )
        for prompt, completion, advantage in rows
    ]


def steps(engine, numbers):
    """Losses, gradient norms and learning rates of some steps."""
    results = [engine.train(batch(step)) for step in numbers]
    return [[result.metrics[name] for name in ("loss", "grad_norm", "lr")] for result in results]


def weights(engine):
    return {name: parameter.detach().clone() for name, parameter in engine._model.named_parameters()}


KL = Objective(kl_coef=0.5)
KINDS = {
    "plain": {},
    "lora": {"lora": LoraSettings(rank=2, alpha=4.0)},
    "reference": {"objective": KL, "reference_refresh_steps": 2},
    "frozen-reference": {"objective": KL},
    "bfloat16": {"dtype": "bfloat16"},
    "cuda": {"device": "cuda"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_engine_takes_the_same_steps_to_the_bit(engine, tmp_path, kind):
    if kind == "lora":
        pytest.importorskip("peft", reason="the extra lora is not installed")
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    whole, first = engine(**KINDS[kind]), engine(**KINDS[kind])
    expected = steps(whole, range(6))
    assert steps(first, range(3)) == expected[:3]
    first.save(str(tmp_path / "step-3"))
    second = engine(**KINDS[kind])
    assert second.restore(str(tmp_path / "step-3")) == 3
    assert steps(second, range(3, 6)) == expected[3:]
    ours, theirs = weights(second), weights(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_without_the_optimiser_the_steps_would_differ(engine, tmp_path):
    """The test above can fail: moments matter after three steps."""
    first, second = engine(), engine()
    steps(first, range(3))
    first.save(str(tmp_path / "step-3"))
    second.restore(str(tmp_path / "step-3"))
    second._optimizer.state.clear()
    steps(first, [3])
    steps(second, [3])
    assert any(not torch.equal(a, b) for a, b in zip(weights(first).values(), weights(second).values(), strict=True))


def test_random_numbers_go_on(engine, tmp_path):
    first, second = engine(), engine()
    torch.manual_seed(77)
    torch.rand(5)
    first.save(str(tmp_path / "here"))
    expected = torch.rand(3)
    torch.manual_seed(0)
    second.restore(str(tmp_path / "here"))
    assert torch.equal(torch.rand(3), expected)


def test_model_and_tokenizer_load_by_from_pretrained(engine, tmp_path):
    trained = engine()
    steps(trained, range(1))
    trained.save(str(tmp_path / "here"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "here")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights(trained)[name])
    assert AutoTokenizer.from_pretrained(tmp_path / "here").eos_token == "<eos>"


def test_settings_of_the_new_run_win(engine, tmp_path):
    first, second = engine(weight_decay=0.0), engine(weight_decay=0.3, lr=1e-3, betas=(0.5, 0.6))
    steps(first, range(1))
    first.save(str(tmp_path / "here"))
    second.restore(str(tmp_path / "here"))
    assert [group["weight_decay"] for group in second._optimizer.param_groups] == [0.3, 0.0]
    assert second._optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert steps(second, [1])[0][2] == pytest.approx(1e-3 * 8 / 9)


def test_another_architecture_is_refused(engine, ckpt, tmp_path):
    engine().save(str(tmp_path / "here"))
    check_fits(tmp_path / "here", ckpt)
    wider = build_tiny_checkpoint(tmp_path / "wide", seed=0, **{**SMALL, "hidden": 32})
    deeper = build_tiny_checkpoint(tmp_path / "deep", seed=0, **{**SMALL, "layers": 2})
    with pytest.raises(
        ValueError, match=r"another architecture than ckpt .*: model.embed_tokens.weight is 32x16 there and 32x32 here"
    ):
        check_fits(tmp_path / "here", str(wider))
    with pytest.raises(ValueError, match=r"model.layers.1.* is not there there and|layers.1.*here"):
        check_fits(tmp_path / "here", str(deeper))
    other = HFTrainEngine(str(wider))
    other.start()
    with pytest.raises(ValueError, match="of another architecture"):
        other.restore(str(tmp_path / "here"))
    other.close()


def test_an_optimiser_state_that_does_not_fit_is_refused(engine, ckpt, tmp_path):
    trained = engine()
    steps(trained, range(1))
    trained.save(str(tmp_path / "here"))
    check_fits(tmp_path / "here", ckpt)
    tensors = load_file(tmp_path / "here" / TENSORS)
    place = "optimizer/lm_head.weight/exp_avg"
    save_file({**tensors, place: torch.zeros(2, 3)}, tmp_path / "here" / TENSORS)
    with pytest.raises(ValueError, match="optimiser state does not fit ckpt .*: lm_head.weight is 2x3 there and 32x16"):
        check_fits(tmp_path / "here", ckpt)
    save_file({**tensors, "optimizer/head/exp_avg": torch.zeros(2)}, tmp_path / "here" / TENSORS)
    with pytest.raises(ValueError, match="head is 2 there and not there here"):
        check_fits(tmp_path / "here", ckpt)
    with pytest.raises(ValueError, match="an optimiser state of head, which is not trained here"):
        engine().restore(str(tmp_path / "here"))


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (NUMBERS, "{", "cannot be read"),
        (NUMBERS, json.dumps({"format": 9}), "has format 9, this version reads 1"),
        (TENSORS, "not safetensors", "cannot be read"),
    ],
)
def test_a_damaged_state_is_refused(engine, ckpt, tmp_path, name, text, problem):
    engine().save(str(tmp_path / "here"))
    (tmp_path / "here" / name).write_text(text)
    with pytest.raises(ValueError, match=problem):
        check_fits(tmp_path / "here", ckpt)


def test_what_an_optimiser_keeps_must_be_tensors_and_numbers(tmp_path):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {"odd": object()}
    with pytest.raises(ValueError, match="SGD keeps a object, which cannot be saved"):
        save_state(tmp_path, {"w": weight}, optimizer, reference=None, counters={})


def test_no_file_is_unpickled():
    """A pickle runs the code of whoever wrote it. Only pipes to processes of our own carry some."""
    of_files = r"torch\.load\((?![^)]*weights_only=True)|torch\.save\(|pickle\.load\(|allow_pickle|joblib|cloudpickle"
    pipes = {"runtime/child.py", "runtime/process_host.py", "data/reward_process.py", "data/reward_worker.py"}
    package = Path(fsm_trainer.__file__).parent
    for path in package.rglob("*.py"):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(package).as_posix()
        assert re.findall(of_files, text) == [], name
        assert "pickle.loads" not in text or name in pipes, name
