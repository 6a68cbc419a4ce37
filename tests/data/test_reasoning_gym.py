"""reasoning-gym's tasks as data and reward, compared with the library itself."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.data.datasets import default_loader, load_training_rows
from fsm_trainer.data.reasoning_gym import default_reward_for, parse_spec
from fsm_trainer.data.rewards import make_reward_record, score

PATH = "reasoning-gym:spell_backward,chain_sum?size=7&seed=3"


@pytest.fixture
def gym() -> Any:
    return pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")


def test_the_rows_are_the_librarys_in_turn(gym: Any) -> None:
    rows = load_training_rows(PATH)
    own = {name: gym.create_dataset(name, size=4, seed=3) for name in ("spell_backward", "chain_sum")}
    assert len(rows) == 7
    assert [row["task"] for row in rows] == ["spell_backward", "chain_sum"] * 3 + ["spell_backward"]  # type: ignore[attr-defined]
    for row in rows:  # type: ignore[attr-defined]
        problem = own[row["task"]][row["task_index"]]
        assert (row["prompt"], row["answer"], row["solutions"]) == (
            problem["question"],
            problem["answer"],
            [problem["answer"]],
        )
        assert json.loads(row["metadata"])["source_index"] == row["task_index"]


def test_another_seed_gives_other_problems(gym: Any) -> None:
    prompts = [default_loader(f"reasoning-gym:chain_sum?size=5&seed={seed}")["prompt"][:] for seed in (0, 0, 1)]
    assert prompts[0] == prompts[1] != prompts[2]
    assert len(default_loader("reasoning-gym:chain_sum")) == 1000


def test_parameters_of_one_task_and_of_all(gym: Any) -> None:
    path = "reasoning-gym:spell_backward,chain_sum?size=8&spell_backward.min_word_len=9&chain_sum.max_terms=2"
    for row in load_training_rows(path):  # type: ignore[attr-defined]
        metadata = json.loads(row["metadata"])
        assert metadata.get("word_len", 9) >= 9
        assert metadata.get("num_terms", 2) == 2
    rows = load_training_rows("reasoning-gym:spell_backward?size=4&min_word_len=10")
    assert all(json.loads(row["metadata"])["word_len"] == 10 for row in rows)  # type: ignore[attr-defined]


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("system", [None, "simple"])
def test_the_form_of_the_prompt(gym: Any, chat: bool, system: str | None) -> None:
    extra = f"&prompt={'chat' if chat else 'text'}" + (f"&system={system}" if system else "")
    prompt = default_loader(f"reasoning-gym:chain_sum?size=1{extra}")[0]["prompt"]
    question = default_loader("reasoning-gym:chain_sum?size=1")[0]["prompt"]
    text = gym.utils.SYSTEM_PROMPTS["simple"].strip()
    if chat:
        told = [{"role": "system", "content": text}] if system else []
        assert prompt == [*told, {"role": "user", "content": question}]
    else:
        assert prompt == (f"{text}\n\n{question}" if system else question)


def test_the_reward_is_the_librarys(gym: Any) -> None:
    rows = load_training_rows(PATH)
    reward = pickle.loads(pickle.dumps(default_reward_for(PATH)))
    own = {name: gym.create_dataset(name, size=4, seed=3) for name in ("spell_backward", "chain_sum")}
    for row in rows:  # type: ignore[attr-defined]
        problem = own[row["task"]][row["task_index"]]
        for said, answer in (
            (problem["answer"], problem["answer"]),
            (f" {problem['answer']}\n", problem["answer"]),
            ("I think <answer> 1 </answer> no <answer>" + problem["answer"] + "</answer>.", problem["answer"]),
            ("wrong", "wrong"),
            ("It is " + problem["answer"], "It is " + problem["answer"]),
        ):
            record = make_reward_record(row, prompt="", completion=said)
            assert score(reward, record) == own[row["task"]].score_answer(answer=answer, entry=problem)
    assert reward.__name__ == "reasoning_gym.score_answer"


def test_where_tags_are_asked_for_only_they_count(gym: Any) -> None:
    path = "reasoning-gym:chain_sum?size=1&system=simple"
    row = default_loader(path)[0]
    reward = default_reward_for(path)
    assert reward is not None
    told = [row["answer"], f"<answer>{row['answer']}</answer>"]
    assert [reward(make_reward_record(row, prompt="", completion=text)) for text in told] == [0.0, 1.0]


def test_other_data_has_no_reward_of_its_own() -> None:
    assert default_reward_for("d.jsonl") is None
    assert default_reward_for(None) is None


def test_a_loader_may_change_the_rows(gym: Any, tmp_path: Path) -> None:
    loader = tmp_path / "loader.py"
    loader.write_text(
        "def load_training_dataset(dataset_path, *, default_loader, **_):\n"
        "    return default_loader(dataset_path).map(lambda row: {'prompt': 'Q: ' + row['prompt']})\n"
    )
    row = load_training_rows("reasoning-gym:chain_sum?size=1", str(loader))[0]
    assert row["prompt"].startswith("Q: State")
    reward = default_reward_for("reasoning-gym:chain_sum?size=1")
    assert reward is not None
    assert reward(make_reward_record(row, prompt="", completion=row["answer"])) == 1.0


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("", "names no task, expected reasoning-gym:TASK"),
        ("a,,b", "names no task, expected reasoning-gym:TASK"),
        ("a?size", "has parameters that are no NAME=VALUE, expected "),
        ("a?size=0", "size is '0', expected a whole number of at least 1"),
        ("a?size=many", "size is 'many', expected a whole number of at least 1"),
        ("a?seed=-1", "seed is '-1', expected a whole number of at least 0"),
        ("a?prompt=html", "prompt is 'html', expected text or chat"),
        ("a?b.size=3", "b.size is no parameter of a"),
    ],
)
def test_what_cannot_be_meant_is_refused_without_the_library(rest: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^dataset reasoning-gym:.*{message}"):
        parse_spec(f"reasoning-gym:{rest}")


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("chain_sums", "reasoning-gym has no task 'chain_sums'; did you mean chain_sum"),
        ("composite", "reasoning-gym has no task 'composite'"),
        ("chain_sum?sise=3", "task chain_sum refuses its parameters: got an unexpected keyword argument 'sise'"),
        ("chain_sum?min_terms=9&max_terms=3", "task chain_sum refuses its parameters: max_terms must be >= min_terms"),
        ("chain_sum?system=rude", "system is 'rude', expected none, DeepSeekZero, "),
    ],
)
def test_what_the_library_does_not_know(gym: Any, rest: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^dataset reasoning-gym:.*: {message}") as caught:
        default_loader(f"reasoning-gym:{rest}")
    assert "\n" not in str(caught.value)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"needs the extra .*: pip install 'fsm-trainer\[reasoning-gym\]'$"):
        default_loader("reasoning-gym:leg_counting?size=1")
