"""The Parquet file of a prompt batch, read with other people's tools."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.core.events import Input, InputKind
from fsm_trainer.data.tokenizer import load_tokenizer
from fsm_trainer.trainers.samples import OPEN, SAMPLE_SCHEMA, SampleWriter, make_sample_writer, sample_schema
from fsm_trainer.trainers.scoring import Scored, Scorer
from tests.trainers.helpers import mixed_rollout, prompt_batch, rollout

REWARDS = {"12": 1.0, "55": 0.25, "4": 0.5, "0123": None}
COLUMN = "reward_judge"


def judge(completions: list[str], **_: Any) -> list[float | None]:
    return [REWARDS[text] for text in completions]


@pytest.fixture
def scored(model: Path) -> Scored:
    scorer = Scorer(load_tokenizer(str(model)), judge, get_algorithm("grpo"))
    return scorer.score(prompt_batch(), rollout(), rollout_time_s=0.0, now_s=0.0)


class Stage:
    """A writer and what it was told to do."""

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        self.folder = folder
        self.failures: list[Exception] = []
        self.writer = SampleWriter(folder, ["judge"], self.failures.append, keep=keep)

    def begin(self, batch_id: int = 7, texts: Callable[[], list[str]] = lambda: list(REWARDS)) -> None:
        self.writer.begun(replace(prompt_batch(), batch_id=batch_id), rollout(), texts)

    def reward(self, scored: Scored, batch_id: int = 7) -> None:
        self.writer.rewarded(batch_id, scored.batch.train_sequences, scored.function_rewards)

    def read(self, batch_id: int = 7) -> pd.DataFrame:
        assert self.writer.close(30)
        return pd.read_parquet(self.folder / f"batch-{batch_id:06d}.parquet")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.writer.close(30)


def test_pandas_reads_it_row_by_row(stage: Stage, scored: Scored) -> None:
    stage.begin()
    stage.reward(scored)
    stage.writer.ended(7, "trained", None)
    frame = stage.read()
    assert frame["prompt"].tolist() == ["12=", "12=", "4=", "4="]
    assert frame["completion"].tolist() == list(REWARDS)
    assert frame["reward"].tolist()[:3] == frame[COLUMN].tolist()[:3] == [1.0, 0.25, 0.5]
    assert frame["reward"].isna().tolist() == frame[COLUMN].isna().tolist() == [False, False, False, True]
    assert frame["row"].tolist() == [5, 5, 3, 3]
    assert frame["sample"].tolist() == [0, 1, 0, 1]
    assert frame["prompt_len"].tolist() == [3, 3, 2, 2]
    assert frame["finish_reason"].tolist() == ["stop", "length", "stop", "length"]
    equal = {"batch_id": 7, "epoch": 2, "rollout_version_first": 3, "rollout_version_last": 4, "state": "trained"}
    assert {name: frame[name].unique().tolist() for name in equal} == {name: [v] for name, v in equal.items()}
    assert frame["reason"].isna().all()
    for row, sequence in zip(frame.itertuples(), scored.batch.train_sequences, strict=True):
        assert tuple(row.tokens) == sequence.tokens
        assert tuple(row.logprobs) == sequence.logprobs
        assert row.prompt_len == sequence.prompt_len
        assert row.advantage == sequence.advantage


def test_it_says_which_version_drew_which_tokens(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.writer.begun(prompt_batch(), mixed_rollout(), lambda: list(REWARDS))
    spans = stage.read()["version_spans"].tolist()
    assert [[(span["version"], span["tokens"]) for span in row] for row in spans] == [
        *([(3, 2), (4, 1)], [], [], [(3, 1), (4, 3)])
    ]


def test_datasets_and_arrow_read_a_folder_of_every_kind_of_batch(
    stage: Stage, scored: Scored, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    stage.begin(1)  # crashed before its rewards
    stage.begin(2)
    stage.reward(scored, 2)
    stage.writer.ended(2, "dropped", "stale")
    stage.begin(3)
    stage.writer.ended(3, "failed", "reward")
    assert stage.writer.close(30)
    expected = [OPEN] * 4 + ["dropped"] * 4 + ["failed"] * 4
    table = pyarrow.dataset.dataset(tmp_path).to_table()
    assert table["state"].to_pylist() == expected
    assert table.schema.names == sample_schema(["judge"]).names
    files = sorted(map(str, tmp_path.glob("*.parquet")))
    cache = str(tmp_path_factory.mktemp("cache"))
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
    assert rows["state"][:] == expected
    assert rows["reason"][:] == [None] * 4 + ["stale"] * 4 + ["reward"] * 4
    assert rows["reward"][:] == [None] * 4 + [1.0, 0.25, 0.5, None] + [None] * 4
    assert rows[4]["tokens"] == list(scored.batch.train_sequences[0].tokens)


def test_pyarrow_reads_the_schema_with_its_meanings(stage: Stage, tmp_path: Path) -> None:
    stage.begin()
    assert stage.writer.close(30)
    schema = pq.read_schema(tmp_path / "batch-000007.parquet")
    assert schema.equals(sample_schema(["judge"]))
    assert schema.names == [*SAMPLE_SCHEMA.names, COLUMN]
    assert schema.field("logprobs").metadata[b"meaning"] == b"aligned with tokens, 0 on the prompt"


def test_what_was_generated_is_on_disk_while_the_reward_runs(stage: Stage, tmp_path: Path) -> None:
    written = threading.Event()
    stage.begin()
    stage.writer._thread.post(written.set)
    assert written.wait(30)
    frame = pd.read_parquet(tmp_path / "batch-000007.parquet")
    assert frame["completion"].tolist() == list(REWARDS)
    assert set(frame["state"]) == {OPEN}
    assert frame["reward"].isna().all()
    assert frame["advantage"].isna().all()


def test_only_the_newest_batches_stay_and_no_open_one_goes(tmp_path: Path) -> None:
    stage = Stage(tmp_path, keep=2)
    for batch_id in range(6):
        stage.begin(batch_id)
        if batch_id != 1:
            stage.writer.ended(batch_id, "trained", None)
    assert stage.writer.close(30)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"batch-{i:06d}.parquet" for i in (1, 4, 5)]


def test_a_batch_without_completions_leaves_no_file(stage: Stage, scored: Scored, tmp_path: Path) -> None:
    stage.reward(scored)
    stage.writer.ended(7, "cancelled", "stop")
    assert stage.writer.close(30)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_there_whole_or_not_at_all(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(table: object, where: Path, **_: object) -> None:
        Path(where).write_bytes(b"PAR1")
        raise OSError("no space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    stage.begin(1)
    stage.begin(2)
    assert stage.writer.close(30)
    assert [str(error) for error in stage.failures] == ["no space left on device"]
    assert list(tmp_path.glob("*.parquet")) == []


def test_texts_that_cannot_be_made_are_a_failure_of_that_batch_only(stage: Stage) -> None:
    def texts() -> list[str]:
        raise RuntimeError("tokenizer")

    stage.begin(1, texts)
    stage.begin(2)
    assert set(stage.read(2)["state"]) == {OPEN}
    assert [str(error) for error in stage.failures] == ["tokenizer"]


def test_samples_that_cannot_be_written_fail_the_run(tmp_path: Path) -> None:
    posted: list[Input] = []
    folder = tmp_path / "gone"
    writer = make_sample_writer("all", folder, ["judge"], posted.append)
    assert writer is not None
    writer.begun(prompt_batch(), rollout(), lambda: list(REWARDS))
    assert writer.close(30)
    (event,) = posted
    assert (event.kind, event.op, event.reason) == (InputKind.FAILED, None, "FileNotFoundError")
    assert str(event.message).startswith(f"samples cannot be written to {folder}: ")
    assert make_sample_writer("none", folder, [], posted.append) is None
