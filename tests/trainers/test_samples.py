"""The Parquet file of a prompt batch, read with other people's tools."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.data.tokenizer import load_tokenizer
from fsm_trainer.trainers.samples import SAMPLE_SCHEMA, write_samples
from fsm_trainer.trainers.scoring import Scored, Scorer
from tests.trainers.helpers import prompt_batch, rollout

REWARDS = {"12": 1.0, "55": 0.25, "4": 0.5, "0123": -1.0}


@pytest.fixture
def scored(model: Path) -> Scored:
    scorer = Scorer(load_tokenizer(str(model)), lambda r: REWARDS[r.completion], get_algorithm("grpo"))
    return scorer.score(prompt_batch(), rollout(), rollout_time_s=0.0, now_s=0.0)


@pytest.fixture
def written(scored: Scored, tmp_path: Path) -> Path:
    return write_samples(tmp_path, prompt_batch(), rollout(), scored.completions, scored.batch)


def test_pandas_reads_it_row_by_row(written: Path, scored: Scored) -> None:
    frame = pd.read_parquet(written)
    assert written.name == "batch-000007.parquet"
    assert frame["prompt"].tolist() == ["12=", "12=", "4=", "4="]
    assert frame["completion"].tolist() == list(REWARDS)
    assert frame["reward"].tolist() == list(REWARDS.values())
    assert frame["row"].tolist() == [5, 5, 3, 3]
    assert frame["sample"].tolist() == [0, 1, 0, 1]
    assert frame["finish_reason"].tolist() == ["stop", "length", "stop", "length"]
    assert set(frame["batch_id"]) == {7}
    assert set(frame["epoch"]) == {2}
    assert set(frame["rollout_version_first"]) == {3}
    assert set(frame["rollout_version_last"]) == {4}
    for row, sequence in zip(frame.itertuples(), scored.batch.train_sequences, strict=True):
        assert tuple(row.tokens) == sequence.tokens
        assert tuple(row.logprobs) == sequence.logprobs
        assert row.advantage == sequence.advantage


def test_pyarrow_reads_the_schema_with_its_meanings(written: Path) -> None:
    table = pq.read_table(written)
    assert table.schema.equals(SAMPLE_SCHEMA)
    assert table.schema.field("logprobs").metadata[b"meaning"] == b"aligned with tokens, 0 on the prompt"
    assert table.num_rows == 4


def test_a_file_is_there_whole_or_not_at_all(scored: Scored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(table: object, where: Path, **_: object) -> None:
        Path(where).write_bytes(b"PAR1")
        raise OSError("no space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="no space"):
        write_samples(tmp_path, prompt_batch(), rollout(), scored.completions, scored.batch)
    assert list(tmp_path.glob("*.parquet")) == []
