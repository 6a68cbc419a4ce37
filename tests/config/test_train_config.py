"""The typed settings: bounds, combinations, JSON and the scheduler's share."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fsm_trainer.algorithms.registry import algorithm_names
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.groups import GROUPS
from fsm_trainer.core.config import Deadlines, SchedulerConfig


def test_defaults_that_users_of_areno_know() -> None:
    config = TrainConfig()
    expected = {
        "lr": 1e-6,
        "lr_decay_style": "cosine",
        "lr_decay_steps": 1000,
        "min_lr": 1e-7,
        "weight_decay": 1e-2,
        "grad_clip_norm": 1.0,
        "batch_size": 32,
        "n_samples": 8,
        "max_prompt_tokens": 1024,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "mini_bs": 16,
        "gradient_accumulation_steps": None,
        "epochs": 10,
        "grpo_clip_eps": 0.2,
        "gspo_clip_eps": 3e-4,
        "save_interval": 100,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "async_queue_size": 2,
        "async_rollout_workers": 1,
        "async_prefetch_batches": 1,
        "async_max_staleness": 1,
        "async_sync_interval_steps": 1,
        "async_queue_timeout_s": 300.0,
        "async_drop_stale_batches": True,
        "async_admission": "paced",
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_every_setting_is_in_one_group_in_order() -> None:
    names = [name for group in GROUPS.values() for name in group.model_fields]
    assert names == list(TrainConfig.model_fields)
    assert len(set(names)) == len(names)
    assert all(TrainConfig.model_fields[name].description for name in names)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 0}, "--batch-size is 0, expected at least 1"),
        ({"batch_size": "many"}, "--batch-size is many, expected a whole number"),
        ({"lr": 0}, "--lr is 0, expected more than 0"),
        ({"lr": "nan"}, "--lr is nan, expected a finite number"),
        ({"top_p": 1.5}, "--top-p is 1.5, expected at most 1"),
        ({"adam_beta2": 1}, "--adam-beta2 is 1, expected less than 1"),
        ({"algo": "ppo"}, f"--algo is ppo, expected one of {', '.join(algorithm_names())}"),
        ({"async_queue_size": 0}, "--async-queue-size is 0, expected at least 1"),
        ({"async_max_staleness": -1}, "--async-max-staleness is -1, expected at least 0"),
        ({"async_drop_stale_batches": "maybe"}, "--async-drop-stale-batches is maybe, expected true or false"),
        ({"top_k": 0}, "--top-k is 0, expected -1 (off) or at least 1"),
        ({"ckpt": ["a"]}, "--ckpt is ['a'], expected a text"),
        ({"bogus": 1}, "unknown setting 'bogus'"),
        ({"train-devices": "cpu"}, "unknown setting 'train-devices'; did you mean train_devices?"),
        (
            {"n_samples": 1},
            "--n-samples is 1, expected at least 2: --algo async-grpo takes its baseline over the completions of one "
            "prompt",
        ),
        (
            {"lr_warmup_steps": 1000},
            "--lr-warmup-steps 1000 leaves no step of the 1000 of --lr-decay-steps, which counts them too; raise it or "
            "give --lr-decay-style constant",
        ),
        ({"lr": 1e-8}, "--min-lr 1e-07 is above --lr 1e-08; lower it or give --lr-decay-style constant"),
        (
            {"gradient_accumulation_steps": 2, "batch_size": 4, "n_samples": 4, "mini_bs": 5},
            "--gradient-accumulation-steps is 2, but a batch of 16 sequences has 4 micro-batches of --mini-bs 5 and "
            "gives one optimiser step; give at least 4 or leave it out",
        ),
        (
            {"save_best": "reward_mean"},
            "--save-best reward_mean has no meaning without --save-total-limit: every checkpoint is kept; "
            "give both or neither",
        ),
        (
            {"async_admission": "lockstep", "async_sync_interval_steps": 3},
            "--async-admission lockstep with --async-sync-interval-steps 3 needs --async-max-staleness of at least 2, "
            "got 1",
        ),
        (
            {"algo": "gspo", "async_queue_size": 2},
            "--async-queue-size has no meaning with the synchronous --algo gspo; leave it out or give --algo "
            "async-gspo",
        ),
        (
            {"algo": "grpo", "rollout_devices": "0,1"},
            "the synchronous --algo grpo uses one rollout engine, but --rollout-devices makes 2; give the devices of "
            "one engine or --algo async-grpo",
        ),
        (
            {"rollout_devices": "0..2", "async_rollout_workers": 2},
            "--async-rollout-workers is 2 but --rollout-devices makes 3 rollout engines; give at least 3 workers or "
            "leave it out",
        ),
        (
            {"rollout_devices": "0..2", "rollout_tp_size": 2},
            "--rollout-devices names 3 devices, which do not divide into engines of --rollout-tp-size 2; give a "
            "multiple of 2",
        ),
    ],
)
def test_impossible_settings(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.build(values)
    assert str(caught.value) == message


def test_error_names_where_the_value_came_from() -> None:
    with pytest.raises(ConfigError, match=r"^--lr is x in run\.yaml, expected a number$"):
        TrainConfig.build({"lr": "x"}, {"lr": "run.yaml"})


def test_frozen() -> None:
    with pytest.raises(ValidationError):
        TrainConfig().lr = 1.0


def test_lockstep_bound_is_the_schedulers() -> None:
    config = TrainConfig(async_admission="lockstep", async_sync_interval_steps=3, async_max_staleness=2)
    assert config.to_scheduler_config().sync_interval == 3


def test_scheduler_config_of_an_async_run() -> None:
    config = TrainConfig(
        rollout_devices="0..3",
        rollout_tp_size=2,
        async_rollout_workers=3,
        async_queue_size=5,
        async_prefetch_batches=4,
        async_max_staleness=6,
        async_sync_interval_steps=7,
        async_drop_stale_batches=False,
        async_admission="greedy",
        async_max_no_step_batches=8,
        async_queue_timeout_s=9,
        max_steps=10,
        save_interval=11,
        start_timeout_s=12,
        rollout_timeout_s=13,
        reward_timeout_s=14,
        train_timeout_s=15,
        sync_timeout_s=16,
        save_timeout_s=17,
        shutdown_timeout_s=18,
    )
    assert config.to_scheduler_config() == SchedulerConfig(
        admission="greedy",
        workers=3,
        engines=2,
        queue_size=5,
        prefetch=4,
        max_staleness=6,
        sync_interval=7,
        max_steps=10,
        drop_stale=False,
        max_no_step_batches=8,
        save_interval=11,
        deadlines=Deadlines(
            start_s=12,
            generate_s=13,
            reward_s=14,
            train_s=15,
            sync_s=16,
            save_s=17,
            queue_s=9,
            shutdown_s=18,
        ),
    )


def test_scheduler_config_of_a_synchronous_run() -> None:
    scheduler = TrainConfig(algo="grpo", max_steps=3).to_scheduler_config()
    shape = (scheduler.admission, scheduler.workers, scheduler.engines, scheduler.queue_size)
    assert shape == ("paced", 1, 1, 1)
    assert (scheduler.max_staleness, scheduler.sync_interval, scheduler.max_steps) == (0, 1, 3)
    assert scheduler.deadlines.queue_s == 0


def test_timeout_defaults_are_the_schedulers() -> None:
    assert TrainConfig().deadlines() == Deadlines()


@pytest.mark.parametrize(
    ("max_steps", "batches", "expected"), [(None, None, None), (5, None, 5), (None, 7, 7), (5, 7, 5), (9, 7, 7)]
)
def test_steps_end_with_the_prompts(max_steps: int | None, batches: int | None, expected: int | None) -> None:
    assert TrainConfig(max_steps=max_steps).to_scheduler_config(batches).max_steps == expected


@pytest.mark.parametrize(
    ("values", "workers"),
    [
        ({}, 1),
        ({"rollout_devices": "0,1"}, 2),
        ({"rollout_devices": "0,1", "async_rollout_workers": 3}, 3),
        ({"rollout_devices": "0..3", "rollout_tp_size": 2}, 2),
        ({"algo": "gspo"}, 1),
    ],
)
def test_one_worker_per_engine_unless_more_are_asked_for(values: dict[str, Any], workers: int) -> None:
    assert TrainConfig(**values).workers == workers


def test_json_round_trip() -> None:
    config = TrainConfig(algo="grpo", lr=3e-5, rollout_devices="1", max_steps=4)
    again = TrainConfig.from_json(config.to_json())
    assert again == config
    assert again.to_json() == config.to_json()


def test_json_keeps_what_counts_as_given() -> None:
    config = TrainConfig(rollout_devices="0,1")
    assert TrainConfig.from_json(config.to_json()).workers == 2


def test_json_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="^unknown setting 'colour'$"):
        TrainConfig.from_json('{"colour": "red"}')
