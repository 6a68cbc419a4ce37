"""What the plan says about the data, and what is refused before anything is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fsm_trainer.cli.train import main
from fsm_trainer.config import hub
from fsm_trainer.config.train_config import TrainConfig

Refused = Callable[..., str]


@pytest.fixture
def planned(inputs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The plan of the valid flags with some changed (None leaves one out)."""

    def run(*extra: str, **changes: str | None) -> str:
        flags = {**inputs, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
        argv = [part for name, value in flags.items() if value is not None for part in (name, value)]
        assert main([*argv, *extra, "--dry-run"]) == 0
        return capsys.readouterr().out

    return run


def test_rows_that_are_left_out_are_counted(planned: Callable[..., str]) -> None:
    rows = [{"prompt": f"{'1' * (3 + i % 4)}="} for i in range(20)]
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = planned(max_prompt_tokens="6")
    assert "20 rows, 5 of them too long and left out, 3 batches an epoch" in plan
    assert "5 of 20 prompts have more than --max-prompt-tokens 6 tokens and are left out\n" in plan
    assert (
        "3 of 15 rows fill no whole batch and are left out of each epoch, different ones each time; --no-drop-last "
        "makes a smaller batch of them\n"
    ) in plan
    assert "always the last ones" in planned("--no-shuffle", max_prompt_tokens="6")
    kept = planned("--no-drop-last", max_prompt_tokens="9")
    assert "20 rows, 5 batches an epoch" in kept
    assert "Warnings" not in kept


def test_a_smaller_batch_counts_as_a_batch(planned: Callable[..., str]) -> None:
    assert "10 rows, 3 batches an epoch" in planned("--no-drop-last", epochs="2")
    assert "of 6 batches in 2 epoch(s)" in planned("--no-drop-last", epochs="2")
    assert "10 rows, 1 batches an epoch" in planned("--no-drop-last", batch_size="64")


def test_thinking_that_cannot_be_disabled_is_said(planned: Callable[..., str]) -> None:
    note = "--disable-thinking changes nothing: the tokenizer's chat template has no enable_thinking"
    assert note in planned("--disable-thinking")
    assert note not in planned()


def test_a_dataset_with_its_own_reward_needs_none(planned: Callable[..., str], inputs: dict[str, str]) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
    Path("loader.py").write_text(
        "def load_training_dataset(path, *, default_loader):\n"
        "    return default_loader(path).map(lambda row: {'prompt': '12='})\n"
    )
    changes = {"dataset_path": "reasoning-gym:chain_sum?size=8", "reward_fn_path": None}
    plan = planned("--dataset-loader-fn", "loader.py", **changes)
    assert "8 rows, 2 batches an epoch" in plan
    assert "reasoning_gym.score_answer" in plan


def test_paths_that_name_nothing(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(hub, "settle", never)
    assert refused(dataset_path="reasoning-gym:") == (
        "dataset reasoning-gym: names no task, expected reasoning-gym:TASK[,TASK][?size=1000&seed=0&prompt=text|chat"
        "&system=NAME&PARAMETER=VALUE]"
    )
    # However long it is: it is no path.
    many = "reasoning-gym:" + ",".join(["chain_sum"] * 400) + "?size=0"
    assert refused(dataset_path=many).endswith("size is '0', expected a whole number of at least 1")
    assert refused(dataset_path="no.parquet") == (
        "--dataset-path no.parquet does not exist; give a data file, a folder, a hub name or reasoning-gym:TASK"
    )
    Path("folder").mkdir()
    assert refused(dataset_path="folder::test").startswith("dataset folder::test is a folder that gives no dataset: ")
    Path("data.csv").write_text("question,answer\n1+1,2\n")
    assert refused(dataset_path="data.csv") == (
        "dataset data.csv row 0 has no `prompt` column, only question, answer; rename the column or give "
        "--dataset-loader-fn"
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 300.0),
        ({"async_admission": "greedy", "async_drop_stale_batches": False}, 300.0),
        ({"async_admission": "greedy", "reward_timeout_s": 0.0}, 0.0),
        ({"async_admission": "greedy"}, 1800 + 600 + 300 + (2 + 1 + 1) * (1800 + 300 + 1800)),
    ],
)
def test_prompts_that_may_come_back_are_waited_for_longer(changes: dict[str, object], expected: float) -> None:
    assert TrainConfig.build(changes).deadlines().load_prompts_s == expected
