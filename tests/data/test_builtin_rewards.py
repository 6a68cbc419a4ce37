"""Built-in rewards, and the texts that name reward functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.data.builtin_rewards import make_builtin
from fsm_trainer.data.reward_specs import load_functions, parse_weights, split_specs
from fsm_trainer.data.rewards import RewardRecord, make_reward_record, score


def record(completion: str, answer: Any = None, tokens: int = 0) -> RewardRecord:
    row = {"prompt": "p", "answer": answer}
    return make_reward_record(row, prompt="p", completion=completion, loss_mask=[0, 0, *[1] * tokens])


@pytest.mark.parametrize(
    ("spec", "completion", "answer", "expected"),
    [
        ("builtin:exact_match", " 42\n", 42, 1.0),
        ("builtin:exact_match", "42.", "42", 0.0),
        ("builtin:exact_match?strip=false", " 42", "42", 0.0),
        ("builtin:exact_match", "Yes", "yes", 0.0),
        ("builtin:exact_match?ignore_case=true", "Yes", "yes", 1.0),
        ("builtin:format", "<think>a\nb</think> <answer>c</answer>", None, 1.0),
        ("builtin:format", "well, <think>a</think><answer>c</answer>", None, 0.0),
        (r"builtin:format?pattern=\d{1,3}", "123", None, 1.0),
        (r"builtin:format?pattern=\d{1,3}", "a123", None, 0.0),
        (r"builtin:format?pattern=a=\d+&b&match=search", "xx a=12&b xx", None, 1.0),
    ],
)
def test_texts(spec: str, completion: str, answer: Any, expected: float) -> None:
    assert score(make_builtin(spec), record(completion, answer)) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0.0), (10, 0.0), (11, -0.1), (15, -0.5), (20, -1.0), (99, -1.0)])
def test_length_penalty(tokens: int, expected: float) -> None:
    assert score(make_builtin("builtin:length_penalty?free=10&max=20"), record("c", tokens=tokens)) == expected


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("72", "so \\boxed{72}", 1.0),
        ("\\frac{1}{2}", "\\boxed{0.5}", 1.0),
        ("they ate\n#### 18", "\\boxed{18}", 1.0),
        ("72", "\\boxed{73}", 0.0),
    ],
)
def test_boxed_math(answer: str, completion: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert score(make_builtin("builtin:boxed_math"), record(completion, answer)) == expected


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("builtin:exact", "builtin:exact is no built-in reward; did you mean exact_match?; there are exact_match, "),
        ("builtin:format?patern=x", "patern=x is no parameter; did you mean pattern?; it takes pattern, match"),
        ("builtin:format?pattern=(", "pattern '(' is no regular expression: "),
        ("builtin:format?match=some", "match is 'some', expected full or search"),
        ("builtin:length_penalty", "max is missing; give max=VALUE after the question mark"),
        ("builtin:length_penalty?max=x", "max is 'x', expected a whole number"),
        ("builtin:length_penalty?max=3&free=4", "free is 4 and max is 3, expected 0 <= free < max"),
        ("builtin:exact_match?strip=yes", "strip is 'yes', expected true or false"),
    ],
)
def test_what_is_no_builtin(spec: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        make_builtin(spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("a.py", ["a.py"]),
        ("a.py,b.py:f", ["a.py", "b.py:f"]),
        ("a.py:f, a.py:g", ["a.py:f", "a.py:g"]),
        (r"builtin:format?pattern=\d{1,3},a.py", [r"builtin:format?pattern=\d{1,3}", "a.py"]),
        ("builtin:exact_match,builtin:format?pattern=a,b", ["builtin:exact_match", "builtin:format?pattern=a,b"]),
        ("a.py,builtin:exact_match", ["a.py", "builtin:exact_match"]),
        ("a.txt", ["a.txt"]),
    ],
)
def test_several_in_one_text(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


def test_a_file_with_a_comma_is_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a,b.py"
    path.write_text("")
    assert split_specs(str(path)) == [str(path)]


def test_names_differ(tmp_path: Path) -> None:
    for stem in ("one", "two"):
        (tmp_path / f"{stem}.py").write_text("def reward_fn(record): return 0.0\n")
    sources = [str(tmp_path / "one.py"), str(tmp_path / "two.py"), str(tmp_path / "two.py"), "builtin:exact_match"]
    names = [function.info.name for function in load_functions(sources)]
    assert names == ["one.reward_fn", "two.reward_fn", "two.reward_fn-2", "exact_match"]


def test_weights() -> None:
    assert parse_weights(None, 2) == [1.0, 1.0]
    assert parse_weights("1, -0.5", 2) == [1.0, -0.5]
    for text, message in {
        "1,x": "expected numbers",
        "1,inf": "expected finite",
        "1": r"has 1 number\(s\) for 2 reward",
    }.items():
        with pytest.raises(ValueError, match=message):
            parse_weights(text, 2)
