"""The algorithms by name."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fsm_trainer.algorithms import losses, registry
from fsm_trainer.algorithms.advantages import group_advantages, mean_centred_advantages
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.algorithms.registry import (
    DEFAULT_ASYNC_CORRECTION,
    AlgorithmSpec,
    algorithm_names,
    get_algorithm,
    register_algorithm,
)
from fsm_trainer.config.objective_settings import make_objective

PRESETS = {
    "grpo": Objective(clip_low=0.2, clip_high=0.2, aggregation="token-mean"),
    "gspo": Objective(ratio_level="sequence", clip_low=3e-4, clip_high=3e-4, aggregation="sequence-mean"),
    "cispo": Objective(surrogate="cispo", clip_low=1.0, clip_high=4.0, aggregation="token-mean"),
    "dr-grpo": Objective(clip_low=0.2, clip_high=0.2, aggregation="constant", constant_length=64),
    "dapo": Objective(clip_low=0.2, clip_high=0.28, aggregation="token-mean"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_are_the_papers(name):
    preset = get_algorithm(name)
    objective = preset.objective(max_new_tokens=64)
    expected = PRESETS[name]
    assert objective == Objective(**{**expected.__dict__, "constant_length": 64})
    assert preset.advantage is (mean_centred_advantages if name == "dr-grpo" else group_advantages)
    assert preset.dynamic_sampling is (name == "dapo")
    assert preset.resolve_loss() is losses.policy_loss


@pytest.mark.parametrize("name", PRESETS)
def test_an_async_variant_learns_the_same(name):
    plain, asynchronous = get_algorithm(name), get_algorithm(f"async-{name}")
    assert plain.objective(max_new_tokens=8) == asynchronous.objective(max_new_tokens=8, correction="none")
    assert plain.advantage is asynchronous.advantage
    assert (plain.asynchronous, plain.experimental) == (False, False)
    assert (asynchronous.asynchronous, asynchronous.experimental) == (True, True)


def test_only_the_clipped_token_ratio_takes_the_default_correction():
    """The sequence ratio and CISPO's are corrections themselves."""
    default = {name: get_algorithm(f"async-{name}").correction for name in PRESETS}
    assert {name: default[name] for name in ("gspo", "cispo")} == {"gspo": "none", "cispo": "none"}
    assert {default[name] for name in ("grpo", "dr-grpo", "dapo")} == {DEFAULT_ASYNC_CORRECTION}
    assert {get_algorithm(name).correction for name in PRESETS} == {"none"}


def test_what_is_given_wins_and_none_is_not_given():
    grpo, dapo = get_algorithm("grpo"), get_algorithm("dapo")
    assert grpo.objective(max_new_tokens=8, clip_low=0.1).clip_high == 0.1, "symmetric unless said otherwise"
    assert dapo.objective(max_new_tokens=8, clip_low=0.1).clip_high == 0.28
    assert grpo.objective(max_new_tokens=8, clip_high=0.3).clip_low == 0.2
    assert grpo.objective(max_new_tokens=8, aggregation=None).aggregation == "token-mean"
    assert grpo.objective(max_new_tokens=8, aggregation="constant").constant_length == 8
    with pytest.raises(ValueError, match="^clip_low is 0"):
        grpo.objective(max_new_tokens=8, clip_low=0.0)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'ppo'.*grpo, gspo, cispo, dr-grpo, dapo, async-grpo"):
        get_algorithm("ppo")


def test_a_new_algorithm_with_its_own_loss(monkeypatch):
    monkeypatch.setattr("fsm_trainer.algorithms.registry._SPECS", {})

    def loss(inputs, normalizers, objective):
        return losses.LossOutput(inputs.logprobs.sum())

    spec = register_algorithm(AlgorithmSpec("mine", clip_low=0.1, loss=loss))
    assert algorithm_names() == ("mine",)
    assert get_algorithm("mine") is spec
    assert spec.resolve_loss() is loss


def test_the_example_of_the_docs_gives_both_forms(monkeypatch):
    monkeypatch.setattr("fsm_trainer.algorithms.registry._SPECS", dict(registry._SPECS))
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    made = {}
    exec(example, made)
    plain, overlapped = made["synchronous"], made["overlapped"]
    assert (plain.is_async, overlapped.is_async) == (False, True)
    assert overlapped.to_scheduler_config().max_staleness == 2
    expected = Objective(clip_low=0.1, clip_high=0.3, aggregation="constant", constant_length=plain.max_new_tokens)
    assert make_objective(plain) == expected
    assert make_objective(overlapped) == replace(expected, correction="token-truncate")


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        register_algorithm(get_algorithm("grpo"))
    with pytest.raises(ValueError, match="empty"):
        register_algorithm(AlgorithmSpec(""))


def test_names_cost_no_torch():
    imports = "import sys; from fsm_trainer.algorithms import registry, objective, materialize, microbatch"
    code = f"{imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
