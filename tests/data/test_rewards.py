"""What a reward function gets and must return."""

from __future__ import annotations

import math
import sys
import threading
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsm_trainer.data.rewards import RewardRecord, load_reward_fn, make_reward_record, row_answer, score
from fsm_trainer.data.user_code import UserCodeError, split_spec

EXAMPLES = Path(__file__).parents[2] / "examples"


def record(completion: str = "c", **row: Any) -> RewardRecord:
    return make_reward_record({"prompt": "p", **row}, prompt="p", completion=completion)


def test_every_field_is_there() -> None:
    row = {"prompt": [{"role": "user", "content": "p"}], "solutions": ["s", "t"], "level": 3}
    made = make_reward_record(
        row,
        prompt="<user>p",
        completion="c",
        tokens=(1, 2, 3),
        logprobs=(0.0, -0.5, -0.25),
        loss_mask=(0, 1, 1),
        rendered_completion="c<eos>",
        metadata={"batch_id": 4},
    )
    assert made == RewardRecord(
        prompt="<user>p",
        completion="c",
        rendered_completion="c<eos>",
        final_answer="c",
        answer="s",
        messages=[{"role": "user", "content": "p"}],
        trace=[],
        tool_calls=[],
        tool_results=[],
        tokens=[1, 2, 3],
        logprobs=[0.0, -0.5, -0.25],
        loss_mask=[0, 1, 1],
        source_record=row,
        metadata={"batch_id": 4},
    )
    assert record().rendered_completion == "c"
    assert record().messages == []


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"solutions": ["a", "b"], "answer": "c"}, "a"),
        ({"solutions": [], "answer": "c"}, None),
        ({"solutions": None, "answer": "c"}, "c"),
        ({"solutions": "a"}, "a"),
        ({"answer": "c", "solution": "d"}, "c"),
        ({"answer": None, "solution": "d"}, "d"),
        ({"solution": 7}, 7),
        ({}, None),
    ],
)
def test_answer_of_a_row(row: dict[str, Any], answer: Any) -> None:
    assert row_answer(row) == answer


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, 1.0),
        (2, 2.0),
        (-0.5, -0.5),
        (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
    ],
)
def test_numbers_that_count(value: Any, expected: float) -> None:
    result = score(lambda r: value, record())
    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize("value", [None, "1.0", [1.0], 1j, np.array([1.0]), {"reward": 1}])
def test_what_is_no_number(value: Any) -> None:
    def my_reward(r: RewardRecord) -> Any:
        return value

    with pytest.raises(ValueError, match=r"^my_reward returned .*, expected one finite number"):
        score(my_reward, record())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), 1e31, -(10**400), 10**400])
def test_numbers_that_are_not_finite(value: Any) -> None:
    def my_reward(r: RewardRecord) -> Any:
        return value

    with pytest.raises(ValueError, match="^my_reward returned .*, expected a finite number of at most 1e.30 in size"):
        score(my_reward, record())


def test_users_exception_passes_through() -> None:
    def my_reward(r: RewardRecord) -> Any:
        return r.source_record["missing"]

    with pytest.raises(KeyError, match="missing") as caught:
        score(my_reward, record())
    assert caught.traceback[-1].name == "my_reward"


def test_loading_with_default_and_named_function(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 0.5\n")
    path = tmp_path / "my-reward.py"
    path.write_text("from helper import VALUE\ndef reward_fn(r): return VALUE\ndef other(r): return 2\n")
    before = list(sys.path)
    try:
        assert score(load_reward_fn(str(path)), record()) == 0.5
        assert score(load_reward_fn(f"{path}:other"), record()) == 2.0
    finally:
        sys.modules.pop("helper", None)
    assert sys.path == before


def test_a_file_may_hold_a_dataclass(tmp_path: Path) -> None:
    path = tmp_path / "r.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Graded:\n"
        "    value: float\ndef reward_fn(r): return Graded(0.25).value\n"
    )
    assert score(load_reward_fn(str(path)), record()) == 0.25


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.py", "reward_fn = 3\n", "does not define reward_fn; it has no function$"),
        ("r.py", "raise RuntimeError('two\\nlines')\n", "does not run: line 1: RuntimeError: two lines$"),
        ("r.txt", "x", "is not a Python file; give a file that ends in .py$"),
    ],
)
def test_files_that_cannot_be_used(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserCodeError, match=message):
        load_reward_fn(str(tmp_path / name))


def test_spec_with_a_colon_in_the_path() -> None:
    assert split_spec("a.py", "f") == (Path("a.py"), "f")
    assert split_spec("a.py:g", "f") == (Path("a.py"), "g")
    assert split_spec("odd:dir/a.py", "f") == (Path("odd:dir/a.py"), "f")


@pytest.mark.parametrize(
    ("completion", "expected"), [("4821", 1.0), ("4822", 0.75), ("48213", 0.8), ("48", 0.5), ("", 0.0), ("1284", 0.0)]
)
def test_copy_reward_of_example_and_preset(completion: str, expected: float, tmp_path: Path) -> None:
    from fsm_trainer.presets.quickstart import write_files

    made = write_files(tmp_path, seed=0, keep=frozenset({"ckpt", "dataset_path"}))
    for path in (str(EXAMPLES / "copy" / "reward.py"), made["reward_fn_path"]):
        assert score(load_reward_fn(path), record(completion, solutions=["4821"])) == expected


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("72", "so it is \\boxed{72}", 1.0),
        ("\\frac{1}{2}", "the result is \\boxed{0.5}", 1.0),
        ("they ate\n#### 18", "\\boxed{18}", 1.0),
        ("72", "\\boxed{73}", 0.0),
        ("72", "no idea", 0.0),
    ],
)
def test_mathematics_reward_in_a_worker_thread(answer: str, completion: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    reward_fn = load_reward_fn(str(EXAMPLES / "math" / "math_verify_reward.py"))
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(score(reward_fn, record(completion, answer=answer))))
    thread.start()
    thread.join()
    assert found == [expected]


def test_mathematics_reward_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    reward_fn = load_reward_fn(str(EXAMPLES / "math" / "math_verify_reward.py"))
    with pytest.raises(ImportError, match=r"needs the extra `math`: pip install 'fsm-trainer\[math\]'"):
        score(reward_fn, record(answer="1"))
