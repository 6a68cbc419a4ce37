"""Reward functions as the configuration names them: loaded once, described, refused with one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.cli.flags import parse
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.check_rewards import call_limit_s, open_rewards
from fsm_trainer.data.reward_executor import ThreadRewards
from fsm_trainer.data.reward_pool import ProcessRewards

TWO = "def a(record): return 0.0\nasync def b(completions, **kwargs): return [None]\na.parallel_workers = 3\n"


def config(**values: Any) -> TrainConfig:
    return TrainConfig.build({"ckpt": "m", "dataset_path": "d.jsonl", **values})


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "two.py").write_text(TWO)
    return str(tmp_path / "two.py")


def test_functions_of_a_file_in_processes(path: str) -> None:
    given = config(reward_fn_path=f"{path}:a,{path}:b", reward_weights="1,-2")
    rewards = open_rewards(given)
    assert rewards.describe(given) == [
        f"a ({path}:a): called as reward_fn(record) -> float, weight 1",
        f"b ({path}:b): async, called as reward_fn(prompts=, completions=, completion_ids=, **columns) -> "
        "list[float | None], weight -2",
        "in 3 processes, at most 540 s a call; on an error: fail",
    ]
    assert isinstance(rewards.make_executor(given), ProcessRewards)


def test_builtins_in_a_thread() -> None:
    given = config(reward_fn_path="builtin:exact_match", reward_executor="thread", reward_on_error="mask")
    rewards = open_rewards(given)
    assert rewards.describe(given)[-1] == "in 1 thread, no limit for a call; on an error: mask"
    assert isinstance(rewards.make_executor(given), ThreadRewards)


def test_functions_given_as_objects_stay_in_this_process() -> None:
    given = config()
    rewards = open_rewards(given, [lambda record: 0.0, len])
    assert isinstance(rewards.make_executor(given), ThreadRewards)
    assert [info.name for info in rewards.infos] == ["<lambda>", "len"]


def test_an_importable_object_goes_to_a_process_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared_rewards.py").write_text(TWO)
    monkeypatch.syspath_prepend(tmp_path)
    import shared_rewards  # type: ignore[import-not-found]

    given = config(reward_executor="process")
    assert isinstance(open_rewards(given, shared_rewards.a).make_executor(given), ProcessRewards)
    with pytest.raises(ConfigError, match="<lambda> cannot be imported in another process"):
        open_rewards(given, lambda record: 0.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"reward_weights": "1,2"}, r"--reward-weights has 2 number\(s\) for 1 reward function"),
        ({"reward_fn_path": "builtin:exact"}, "no built-in reward; did you mean exact_match"),
        ({"reward_executor": "thread", "reward_call_timeout_s": 1}, "a call in a thread cannot be ended; give"),
        ({"reward_fn_path": "no.py"}, "reward file no.py does not exist"),
    ],
)
def test_what_cannot_run(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_rewards(config(**{"reward_fn_path": "builtin:exact_match", **values}))


def test_the_limit_of_a_call() -> None:
    assert call_limit_s(config(reward_timeout_s=10)) == 9
    assert call_limit_s(config(reward_timeout_s=0)) is None
    assert call_limit_s(config(reward_call_timeout_s=0)) is None
    assert call_limit_s(config(reward_call_timeout_s=2.5)) == 2.5


def test_several_by_repeated_flags_and_by_a_list_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("reward-fn-path:\n  - builtin:exact_match\n  - r.py:score\nreward-weights: [1, 0.5]\n")
    for argv in (
        ["--config", str(file)],
        ["--reward-fn-path", "builtin:exact_match", "--reward-fn-path", "r.py:score", "--reward-weights", "1,0.5"],
    ):
        found = parse(argv).config
        assert (found.reward_fn_path, found.reward_weights) == ("builtin:exact_match,r.py:score", "1,0.5")
