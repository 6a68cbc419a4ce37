"""From settings to the objective: what is given wins, the rest is the algorithm's own."""

from __future__ import annotations

from typing import Any

import pytest

from fsm_trainer.algorithms.advantages import group_advantages, mean_centred_advantages
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.algorithms.registry import AlgorithmSpec, algorithm_names, get_algorithm, register_algorithm
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.objective_settings import (
    make_advantage,
    make_objective,
    samples_dynamically,
    spare_prompts,
)


def build(**values: Any) -> TrainConfig:
    return TrainConfig.build({"algo": "grpo", "batch_size": 5, "max_new_tokens": 20, **values})


@pytest.mark.parametrize("algo", algorithm_names())
def test_without_settings_it_is_the_preset(algo: str) -> None:
    spec, config = get_algorithm(algo), build(algo=algo)
    assert make_objective(config) == spec.objective(max_new_tokens=20)
    assert make_advantage(config) is spec.advantage
    assert samples_dynamically(config) is algo.endswith("dapo")
    assert spare_prompts(config) == (3 if algo.endswith("dapo") else 0)
    assert config.is_async is algo.startswith("async-")


def test_the_named_clip_ranges_show_what_the_presets_have() -> None:
    config = TrainConfig()
    assert config.grpo_clip_eps == get_algorithm("grpo").clip_low == get_algorithm("dapo").clip_low
    assert config.gspo_clip_eps == get_algorithm("gspo").clip_low


@pytest.mark.parametrize(
    ("values", "clip"),
    [
        ({"grpo_clip_eps": 0.1}, (0.1, 0.1)),
        ({"gspo_clip_eps": 0.1}, (0.2, 0.2)),
        ({"grpo_clip_eps": 0.1, "clip_eps": 0.3}, (0.3, 0.3)),
        ({"grpo_clip_eps": 0.1, "clip_eps_high": 0.3}, (0.1, 0.3)),
        ({"algo": "gspo", "gspo_clip_eps": 0.01, "grpo_clip_eps": 0.1}, (0.01, 0.01)),
        ({"algo": "gspo", "clip_eps_high": 4e-4}, (3e-4, 4e-4)),
        ({"algo": "dapo", "grpo_clip_eps": 0.1}, (0.1, 0.28)),
        ({"algo": "cispo", "grpo_clip_eps": 0.1}, (1.0, 4.0)),
        ({"algo": "cispo", "clip_eps": 0.5, "clip_eps_high": 2}, (0.5, 2.0)),
    ],
)
def test_clip_ranges(values: dict[str, Any], clip: tuple[float, float]) -> None:
    objective = make_objective(build(**values))
    assert (objective.clip_low, objective.clip_high) == clip


def test_every_piece_has_a_setting() -> None:
    config = build(
        loss_aggregation="constant",
        advantage_std="none",
        entropy_coef=0.1,
        kl_coef=0.2,
        kl_estimator="k1",
        offpolicy_correction="token-mask",
        correction_band="0.25,4",
        dynamic_sampling="true",
        oversample_prompts=2,
        overlong_buffer_tokens=7,
    )
    assert make_objective(config) == Objective(
        aggregation="constant",
        constant_length=20,
        entropy_coef=0.1,
        kl_coef=0.2,
        kl_estimator="k1",
        correction="token-mask",
        correction_band=(0.25, 4.0),
    )
    assert make_advantage(config) is mean_centred_advantages
    assert make_advantage(build(algo="dr-grpo", advantage_std="group")) is group_advantages
    assert (config.prompts_per_batch, config.rows_per_batch, config.overlong_buffer_tokens) == (7, 40, 7)
    capped = make_objective(build(offpolicy_correction="sequence-truncate", correction_cap=3))
    assert (capped.correction, capped.correction_cap) == ("sequence-truncate", 3.0)
    assert build(algo="dapo", dynamic_sampling="false").prompts_per_batch == 5
    mixed = make_objective(build(algo="async-grpo", async_span_policy="correct", correction_cap=3))
    assert (mixed.correction, mixed.span_policy, mixed.correction_cap) == ("none", "correct", 3.0)
    assert make_objective(build(algo="async-gspo", async_span_policy="mask")).span_policy == "mask"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"oversample_prompts": 2}, "--oversample-prompts 2 has no meaning without --dynamic-sampling"),
        ({"overlong_buffer_tokens": 20}, "--overlong-buffer-tokens is 20, expected less than --max-new-tokens 20"),
        ({"reference_refresh_steps": 5}, "--reference-refresh-steps 5 has no meaning without --kl-coef"),
        ({"correction_band": "0.5,2"}, "--correction-band 0.5,2 has no meaning with --offpolicy-correction none"),
        ({"correction_cap": 2}, "--correction-cap 2 has no meaning with --offpolicy-correction none"),
        ({"async_span_policy": "keep"}, "--async-span-policy has no meaning with the synchronous --algo grpo"),
        (
            {"algo": "async-gspo", "async_span_policy": "correct"},
            "--async-span-policy correct has no meaning with --algo async-gspo",
        ),
        (
            {"algo": "async-grpo", "async_span_policy": "mask", "correction_cap": 3},
            "--correction-cap 3 has no meaning with --offpolicy-correction none",
        ),
        ({"correction_band": "2,3"}, "--correction-band is 2,3, expected LOW,HIGH with 0 <= LOW < 1 < HIGH"),
        ({"correction_band": "0.5"}, "--correction-band is 0.5, expected LOW,HIGH"),
        ({"correction_band": "a,b"}, "--correction-band is a,b, expected LOW,HIGH"),
        ({"correction_band": "0.5,inf"}, "--correction-band is 0.5,inf, expected LOW,HIGH"),
        ({"correction_band": "nan,2"}, "--correction-band is nan,2, expected LOW,HIGH"),
        ({"clip_eps": 0}, "--clip-eps is 0, expected more than 0"),
        ({"kl_estimator": "k4"}, "--kl-estimator is k4, expected one of k1, k2, k3"),
        ({"loss_aggregation": "mean"}, "expected one of token-mean, sequence-mean, constant"),
    ],
)
def test_what_means_nothing_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_algorithm_of_ones_own_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_trainer.algorithms.registry._SPECS", {})
    register_algorithm(AlgorithmSpec("mine", clip_low=0.7, asynchronous=True))
    config = TrainConfig.build({"algo": "mine", "async_max_staleness": 2})
    assert config.is_async
    assert make_objective(config).clip_low == 0.7
    with pytest.raises(ConfigError, match="--algo is grpo, expected one of mine"):
        TrainConfig.build({"algo": "grpo"})


def test_it_comes_back_from_its_file() -> None:
    config = build(algo="async-dapo", clip_eps=0.3, correction_band="0.5,2", offpolicy_correction="token-mask")
    again = TrainConfig.from_json(config.to_json())
    assert again == config
    assert make_objective(again) == make_objective(config)
