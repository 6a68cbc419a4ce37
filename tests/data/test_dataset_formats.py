"""Every form of data a user may arrive with gives the same rows, written here by other libraries than ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict

from fsm_trainer.data.datasets import default_loader, is_local, load_training_rows, local_path
from fsm_trainer.data.rows import column

ROWS: list[dict[str, Any]] = [
    {"prompt": "007=", "solutions": ["007"], "level": 1, "share": 0.5},
    {"prompt": 'two\n"lines", é', "solutions": ["a", "b"], "level": None, "share": 1.5},
]
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_jsonl(name: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_stream(name: str) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(name, "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[str], Any]] = {
    "d.jsonl": write_jsonl,
    "d.json": lambda name: Path(name).write_text(json.dumps(ROWS)),
    "d.parquet": lambda name: pd.DataFrame(ROWS).astype({"level": "Int64"}).to_parquet(name),
    "D.PARQUET": lambda name: Dataset.from_list(ROWS).to_parquet(name),
    "d.feather": lambda name: pd.DataFrame(ROWS).astype({"level": "Int64"}).to_feather(name),
    "d.arrow": write_stream,
    "saved": lambda name: Dataset.from_list(ROWS).save_to_disk(name),
    "splits:test": lambda name: DatasetDict(
        train=Dataset.from_list(ROWS[:1]), test=Dataset.from_list(ROWS)
    ).save_to_disk(name.split(":")[0]),
    "one_split": lambda name: DatasetDict(test=Dataset.from_list(ROWS)).save_to_disk(name),
    "repo": lambda name: write_jsonl(f"{name}/train.jsonl"),
    "repo_with_test::test": lambda name: write_jsonl(f"{name.split(':')[0]}/test.jsonl"),
    "configs:main:test": lambda name: write_configs(name.split(":")[0]),
}


def write_configs(folder: str) -> None:
    """As a hub repository describes its configurations."""
    write_jsonl(f"{folder}/files/main.jsonl")
    Path(folder, "files/other.jsonl").write_text('{"prompt": "other"}\n')
    Path(folder, "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: other\n  data_files: [{split: train, path: files/other.jsonl}]\n"
        "- config_name: main\n  data_files: [{split: test, path: files/main.jsonl}]\n---\n"
    )


@pytest.mark.parametrize("path", WRITERS)
def test_every_format_gives_the_same_rows(path: str) -> None:
    WRITERS[path](path)
    rows = load_training_rows(path)
    assert isinstance(rows, Dataset)
    assert list(rows) == ROWS
    assert column(rows, "prompt") == [row["prompt"] for row in ROWS]
    assert is_local(path)


@pytest.mark.parametrize(("name", "separator"), [("d.csv", ","), ("d.tsv", "\t")])
def test_text_of_separated_values_stays_text_where_it_matters(name: str, separator: str) -> None:
    frame = pd.DataFrame({"prompt": ["007", 'two\n"lines"'], "answer": ["08", "9"], "level": [1, 2]})
    frame.to_csv(name, sep=separator, index=False, encoding="utf-8-sig")
    assert list(load_training_rows(name)) == [  # type: ignore[call-overload]
        {"prompt": "007", "answer": "08", "level": 1},
        {"prompt": 'two\n"lines"', "answer": "9", "level": 2},
    ]


@pytest.mark.parametrize("name", ["c.jsonl", "c.parquet", "c"])
def test_chat_messages_pass_through_every_format(name: str) -> None:
    made = Dataset.from_list([{"prompt": CHAT}])
    {"c.jsonl": made.to_json, "c.parquet": made.to_parquet, "c": made.save_to_disk}[name](name)
    assert load_training_rows(name)[0]["prompt"] == CHAT


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("splits", r"^dataset splits has the splits a, b; give one as splits:SPLIT$"),
        ("splits:c", r"^dataset splits:c has the splits a, b; give one as splits:SPLIT$"),
        ("repo::no", r'^dataset repo::no is a folder that gives no dataset: Unknown split "no"'),
        ("repo:no", r"^dataset repo:no is a folder that gives no dataset: BuilderConfig 'no' not found"),
        ("broken", r"^dataset broken is a folder that gives no dataset: .*(JSON|line|rows)"),
        ("torn", r"^dataset torn was saved by save_to_disk but cannot be read: "),
        ("nothing/there", r"^dataset 'nothing/there' is no file here and the hub or its cache gave none: "),
    ],
)
def test_folders_that_give_nothing(path: str, message: str) -> None:
    one = Dataset.from_list(ROWS)
    DatasetDict(a=one, b=one).save_to_disk("splits")
    one.save_to_disk("torn")
    next(Path("torn").glob("*.arrow")).unlink()
    write_jsonl("repo/train.jsonl")
    Path("broken").mkdir()
    Path("broken/train.jsonl").write_text('{"prompt": \n')
    with pytest.raises(ValueError, match=message) as caught:
        default_loader(path)
    assert "\n" not in str(caught.value)


def test_a_saved_folder_may_go_once_it_is_read(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).save_to_disk("saved")
    rows = default_loader("saved")
    for file in Path("saved").iterdir():
        file.write_bytes(b"")
    assert list(rows) == ROWS


def test_a_file_whose_name_has_a_colon() -> None:
    write_jsonl("a:b.jsonl")
    assert local_path("a:b.jsonl") == (Path("a:b.jsonl"), [])
    assert len(default_loader("a:b.jsonl")) == 2


LOADERS = '''
import json


def load_training_dataset(dataset_path, *, default_loader, **_):
    """As documented for math data: look at the first row, then map."""
    dataset = default_loader(dataset_path)
    if len(dataset) == 0:
        return dataset
    first = dataset[0]
    if "prompt" in first:
        return dataset
    question = "question" if "question" in first else "problem"

    def to_row(row):
        return {
            "prompt": [{"role": "user", "content": row[question]}],
            "solutions": [row["answer"].split("####")[-1].strip()],
        }

    return dataset.map(to_row, remove_columns=dataset.column_names)


def agentic(dataset_path, *, default_loader, split="train", **kwargs):
    """As for tools: a plain list of dicts, read by itself, with columns for the reward."""
    rows = []
    with open(dataset_path) as file:
        for line in file:
            item = json.loads(line)
            row = {"prompt": item["question"], "solutions": [item["answer"]]}
            rows.append({**row, "tools": ["python"], "split": split})
    return rows


def generator(dataset_path, **_):
    for row in _["default_loader"](dataset_path):
        yield {"prompt": row["question"]}


def renamed(dataset_path, default_loader, **_):
    return default_loader(dataset_path).rename_column("question", "prompt").filter(lambda row: row["answer"] != "x")


def failing_generator(dataset_path, **_):
    yield {"prompt": "a"}
    raise KeyError("late")
'''


@pytest.mark.parametrize(
    ("function", "first"),
    [
        ("", {"prompt": [{"role": "user", "content": "1+1?"}], "solutions": ["2"]}),
        (":agentic", {"prompt": "1+1?", "solutions": ["so #### 2"], "tools": ["python"], "split": "train"}),
        (":generator", {"prompt": "1+1?"}),
        (":renamed", {"prompt": "1+1?", "answer": "so #### 2"}),
    ],
)
def test_loaders_in_the_documented_style_run_as_they_are(function: str, first: dict[str, Any]) -> None:
    Path("loader.py").write_text(LOADERS)
    Path("d.jsonl").write_text('{"question": "1+1?", "answer": "so #### 2"}\n{"question": "?", "answer": "x"}\n')
    rows = load_training_rows("d.jsonl", f"loader.py{function}")
    assert rows[0] == first
    assert len(rows) == (1 if function == ":renamed" else 2)


def test_a_loader_that_fails_while_it_gives_rows() -> None:
    Path("loader.py").write_text(LOADERS)
    with pytest.raises(ValueError, match=r"^dataset loader loader\.py:failing_generator failed: line \d+: KeyError"):
        load_training_rows("d.jsonl", "loader.py:failing_generator")
