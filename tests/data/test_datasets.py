"""Files, loaders and what a row must look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest

from fsm_trainer.data.datasets import check_rows, default_loader, is_local, load_training_rows, split_hub_name
from fsm_trainer.data.readers import read_rows
from fsm_trainer.data.user_code import UserCodeError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8", errors="surrogateescape")
    return name


def test_jsonl() -> None:
    path = write("d.jsonl", '{"prompt": "a", "n": 1}\n\n  \n{"prompt": "b\u2028c", "solutions": ["x"]}\n')
    rows = default_loader(path)
    assert isinstance(rows, datasets.Dataset)
    assert list(rows) == [
        {"prompt": "a", "n": 1, "solutions": None},
        {"prompt": "b\u2028c", "n": None, "solutions": ["x"]},
    ]


def test_json_list_and_byte_order_mark() -> None:
    path = write("d.json", '\ufeff[{"prompt": "a"},\n {"prompt": "b"}]')
    assert list(default_loader(path)["prompt"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "d.jsonl",
            '{"prompt": "a"}\n{"prompt"}\n',
            "dataset d.jsonl line 2 is not valid JSON: Expecting ':' delimiter",
        ),
        ("d.jsonl", '{"prompt": "a"}\n[1]\n', "dataset d.jsonl line 2 holds a list, expected an object with a prompt"),
        ("d.json", '[{"prompt": "a"},\n\n {]', "dataset d.json line 3 is not valid JSON: "),
        ("d.json", '{"prompt": "a"}', "dataset d.json holds a dict, expected a list of objects"),
        ("d.json", '[{"prompt": "a"}, 3]', "dataset d.json item 2 holds a int, expected an object with a prompt"),
        (
            "d.txt",
            "a\n",
            "dataset d.txt ends in '.txt', expected .jsonl, .json, .parquet, .csv, .tsv, .arrow or .feath",
        ),
        ("d.csv", "prompt,n\na,1\nb\n", "dataset d.csv is not csv: CSV parse error: Row #3: Expected 2 columns, got 1"),
        (
            "d.csv",
            "prompt\n\udcff\n",
            "dataset d.csv is not csv: In CSV column #0: Row #2: CSV conversion error to string",
        ),
        ("d.csv", "", "dataset d.csv is not csv: Empty CSV file"),
        ("d.tsv", "prompt\tprompt\na\tb\n", "dataset d.tsv has two columns named 'prompt'; rename one"),
        ("d.parquet", "PAR", "dataset d.parquet is not parquet: Parquet file size is 3 bytes"),
        ("d.arrow", "no arrow at all", "dataset d.arrow "),
        ("d.jsonl", '{"a": 1}\n{"a": "x"}\n', "dataset d.jsonl has a column 'a', which cannot"),
    ],
)
def test_broken_files(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared in full below
        default_loader(write(name, text))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_dataset_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^dataset no\.jsonl does not exist"):
        default_loader("no.jsonl")
    with pytest.raises(ValueError, match="is a folder that gives no dataset: .* doesn't contain any data files"):
        default_loader(str(tmp_path))
    with pytest.raises(ValueError, match=r"is a folder, expected a file ending in \.jsonl, "):
        read_rows(tmp_path)
    Path("d.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"^dataset d\.jsonl is not UTF-8 text \(byte 12\)"):
        default_loader("d.jsonl")


@pytest.mark.parametrize(
    ("text", "local"),
    [("a.jsonl", True), ("./a", True), ("/a", True), ("~/a", True), ("gsm8k:main", False), ("owner/name", False)],
)
def test_what_means_a_file(text: str, local: bool) -> None:
    assert is_local(text) is local


def test_hub_names() -> None:
    assert split_hub_name("gsm8k") == ("gsm8k", None, "train")
    assert split_hub_name("gsm8k:main") == ("gsm8k", "main", "train")
    assert split_hub_name("a/b:c:test") == ("a/b", "c", "test")
    assert split_hub_name("a/b::test") == ("a/b", None, "test")
    for name in ("a:b:c:d", ":b", ""):
        with pytest.raises(ValueError, match="is no file and no hub name"):
            split_hub_name(name)


LOADER = """
def load_training_dataset(dataset_path, *, default_loader, **kwargs):
    dataset = default_loader(dataset_path)
    assert len(dataset) == 2 and dataset[0]["q"] == "a"
    return dataset.map(lambda row: {"prompt": row["q"] + kwargs["suffix"]})

def as_list(dataset_path, *, default_loader, **kwargs):
    return [{"prompt": str(i)} for i in range(3)]

def wrong_type(dataset_path, *, default_loader, **kwargs):
    return {"prompt": ["a"]}

def fails(dataset_path, *, default_loader, **kwargs):
    return default_loader(dataset_path)[0]["no"]

def no_keyword(dataset_path):
    return []
"""


def test_users_loader_with_a_dataset() -> None:
    write("d.jsonl", '{"q": "a"}\n{"q": "b"}\n')
    rows = load_training_rows("d.jsonl", write("loader.py", LOADER), suffix="=")
    assert [rows[i]["prompt"] for i in range(len(rows))] == ["a=", "b="]


def test_users_loader_with_a_list() -> None:
    rows = load_training_rows("anything", write("loader.py", LOADER) + ":as_list")
    assert [row["prompt"] for row in rows] == ["0", "1", "2"]  # type: ignore[attr-defined]


def test_users_loader_that_fails() -> None:
    write("d.jsonl", '{"q": "a"}\n')
    write("loader.py", LOADER)
    with pytest.raises(ValueError, match=r"^dataset loader\.py:wrong_type gave a dict, expected a Dataset or a list"):
        load_training_rows("d.jsonl", "loader.py:wrong_type")
    with pytest.raises(UserCodeError, match=r"^dataset loader loader\.py:fails failed: line 14: KeyError: 'no'$"):
        load_training_rows("d.jsonl", "loader.py:fails")
    with pytest.raises(UserCodeError, match=r"^dataset loader loader\.py:no_keyword failed: TypeError: "):
        load_training_rows("d.jsonl", "loader.py:no_keyword")


def test_default_loaders_own_message_passes_through_a_users_loader() -> None:
    with pytest.raises(ValueError, match=r"^dataset no\.jsonl does not exist"):
        load_training_rows("no.jsonl", write("loader.py", LOADER))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "dataset D has no rows; give one with at least one batch of prompts"),
        ("text", "dataset D gave a str, expected a Dataset or a list of rows"),
        (None, "dataset D gave a NoneType, expected a Dataset or a list of rows"),
        ([3], "dataset D row 0 is a int, expected a mapping with a prompt"),
        (
            [{"prompt": "a"}, {"text": "b", "n": 1}],
            "dataset D row 1 has no `prompt` column, only text, n; rename the column or give --dataset-loader-fn",
        ),
        ([{"prompt": ""}], "dataset D row 0 column prompt is empty, expected a text or a list of chat messages"),
        ([{"prompt": None}], "dataset D row 0 column prompt is None, expected a text or a list of chat messages"),
        (
            [{"prompt": ["hi"]}],
            "dataset D row 0 column prompt message 0 is 'hi', expected an object with role and content",
        ),
        (
            [{"prompt": "a"}, {"prompt": "b", "solutions": {"x": 1}}],
            "dataset D row 1 column solutions is {'x': 1}, expected a list of answers or one",
        ),
        (
            datasets.Dataset.from_dict({"prompt": ["a", None], "n": [1, 2]}),
            "dataset D row 1 column prompt is None, expected a text or a list of chat messages",
        ),
        (
            datasets.Dataset.from_dict({"text": ["a"], "n": [1]}),
            "dataset D row 0 has no `prompt` column, only text, n; rename the column or give --dataset-loader-fn",
        ),
        (
            [{"prompt": [{"role": "user"}]}],
            "dataset D row 0 column prompt message 0 is {'role': 'user'}, expected an object with role and content",
        ),
        ([{"prompt": []}], "dataset D row 0 column prompt is [], expected a text or a list of chat messages"),
    ],
)
def test_rows_that_cannot_be_prompts(rows: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared in full below
        check_rows(rows, "D")
    assert str(caught.value) == message


def test_example_of_the_copy_task() -> None:
    copy = EXAMPLES / "copy"
    rows = load_training_rows(str(copy / "dataset.jsonl"), str(copy / "dataset_loader.py"))
    assert len(rows) == 320
    first = rows[0]
    assert (first["prompt"], first["solutions"]) == (f"{first['digits']}=", [first["digits"]])


@pytest.mark.parametrize(
    ("line", "problem", "solution"),
    [
        ('{"question": "1+1?", "answer": "one and one\\n#### 2"}', "1+1?", "2"),
        ('{"problem": "x?", "solution": " \\\\frac{1}{2} "}', "x?", "\\frac{1}{2}"),
    ],
)
def test_example_of_mathematics(line: str, problem: str, solution: str) -> None:
    rows = load_training_rows(write("d.jsonl", line + "\n"), str(EXAMPLES / "math" / "dataset_loader.py"))
    assert problem in rows[0]["prompt"]
    assert rows[0]["solutions"] == [solution]


def test_example_of_mathematics_keeps_prompts() -> None:
    rows = load_training_rows(write("d.jsonl", '{"prompt": "a"}\n'), str(EXAMPLES / "math" / "dataset_loader.py"))
    assert rows[0] == {"prompt": "a"}
