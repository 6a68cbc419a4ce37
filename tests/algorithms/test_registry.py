"""The algorithms by name."""

import subprocess
import sys

import pytest

from fsm_trainer.algorithms import losses
from fsm_trainer.algorithms.advantages import group_advantages
from fsm_trainer.algorithms.registry import AlgorithmSpec, algorithm_names, get_algorithm, register_algorithm


@pytest.mark.parametrize(("base", "loss"), [("grpo", losses.grpo_loss), ("gspo", losses.gspo_loss)])
def test_async_variant_uses_the_same_loss_and_advantage(base, loss):
    plain, asynchronous = get_algorithm(base), get_algorithm(f"async-{base}")
    assert plain.resolve_loss() is loss
    assert asynchronous.resolve_loss() is loss
    assert plain.advantage is asynchronous.advantage is group_advantages
    assert plain.clip_eps == asynchronous.clip_eps
    assert (plain.asynchronous, plain.experimental) == (False, False)
    assert (asynchronous.asynchronous, asynchronous.experimental) == (True, True)


def test_clipping_ranges_are_the_papers():
    assert get_algorithm("grpo").clip_eps == 0.2
    assert get_algorithm("gspo").clip_eps == 3e-4


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'ppo'.*async-grpo, async-gspo, grpo, gspo"):
        get_algorithm("ppo")


def test_a_new_algorithm_with_its_own_loss(monkeypatch):
    monkeypatch.setattr("fsm_trainer.algorithms.registry._SPECS", {})
    spec = register_algorithm(AlgorithmSpec("mine", losses.gspo_loss, group_advantages, clip_eps=0.1))
    assert algorithm_names() == ("mine",)
    assert get_algorithm("mine") is spec
    assert spec.resolve_loss() is losses.gspo_loss


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="'grpo' is registered already"):
        register_algorithm(get_algorithm("grpo"))
    with pytest.raises(ValueError, match="empty"):
        register_algorithm(AlgorithmSpec("", "m:f", group_advantages, clip_eps=0.1))


def test_names_cost_no_torch():
    imports = "import sys; from fsm_trainer.algorithms import registry, materialize, microbatch"
    code = f"{imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
