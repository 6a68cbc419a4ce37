"""A run's samples as a frame, with the ends that only the log knows; and what `fsm-replay samples` prints of them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fsm_trainer.analysis import load_samples
from fsm_trainer.cli.replay import main
from fsm_trainer.core.config import SchedulerConfig
from tests.replay.virtual_run import log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=4)
REWARDS = {0: [0.5, 0.25], 1: [None, 1.0], 99: [-1.0, 0.5]}
STATES = {0: ("dropped", "stale"), 1: ("open", None), 99: ("open", None)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run in whose log batch 1 was trained on, and batch 99 is unknown."""
    folder = log_of(tmp_path / "run", virtual_run(CONFIG), CONFIG)
    (folder / "samples").mkdir()
    for batch_id, rewards in REWARDS.items():
        state, reason = STATES[batch_id]
        rows = [
            {
                **{"batch_id": batch_id, "state": state, "reason": reason, "row": 3 - batch_id, "sample": i},
                **{"prompt": "1+1=\n", "completion": f"two\x1b[2J {i}", "prompt_len": 2, "tokens": [1, 2, 3]},
                **{"reward": reward, "advantage": 0.0, "finish_reason": "stop", "reward_judge": reward},
                **{"rollout_version_first": 3, "rollout_version_last": 4},
            }
            for i, reward in enumerate(rewards)
        ]
        schema = pa.Table.from_pylist(rows).schema
        schema = schema.set(schema.get_field_index("reason"), pa.field("reason", pa.utf8()))
        pq.write_table(pa.Table.from_pylist(rows, schema), folder / "samples" / f"batch-{batch_id:06d}.parquet")
    return folder


def printed(run: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[tuple[int, int]]:
    """Batch and sample of what is printed, the same as text and as JSON."""
    assert main(["samples", str(run), *options]) == 0
    heads = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("batch ")]
    text = [(int(words[1]), int(words[5])) for words in heads]
    assert main(["samples", str(run), "--json", *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["batch_id"], row["sample"]) for row in rows] == text
    return text


def test_the_log_says_how_an_open_batch_ended(run: Path) -> None:
    frame = load_samples(run)
    assert frame["batch_id"].tolist() == [0, 0, 1, 1, 99, 99]
    assert frame["state"].tolist() == ["dropped"] * 2 + ["trained"] * 2 + ["open"] * 2
    assert frame["reason"].isna().tolist() == [False, False, True, True, True, True]
    assert load_samples(run / "events.arrows").equals(frame)


def test_the_filters(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(run, capsys) == [(0, 0), (0, 1), (1, 0), (1, 1), (99, 0), (99, 1)]
    assert printed(run, capsys, "--batch", "1") == [(1, 0), (1, 1)]
    assert printed(run, capsys, "--dropped") == [(0, 0), (0, 1)]
    assert printed(run, capsys, "--worst", "2") == [(99, 0), (0, 1)]
    assert printed(run, capsys, "--best", "3") == [(1, 1), (0, 0), (99, 1)]
    assert printed(run, capsys, "--worst", "1", "--best", "1") == [(99, 0), (1, 1)]
    assert printed(run, capsys, "--dropped", "--best", "1") == [(0, 0)]
    assert printed(run, capsys, "--batch", "5") == []
    assert main(["samples", str(run), "--batch", "5"]) == 0
    assert capsys.readouterr().err == "fsm-replay: note: no sample is like that\n"


def test_who_drew_which_tokens_is_printed_where_a_file_says_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside files of an older version, which have no such column."""
    path = run / "samples" / "batch-000001.parquet"
    spans = [[{"version": 3, "tokens": 1}, {"version": 4, "tokens": 2}], []]
    pq.write_table(pq.read_table(path).append_column("version_spans", pa.array(spans)), path)
    assert main(["samples", str(run)]) == 0
    said = [line.split(",")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  version")]
    assert said == [" 1 tokens", " 1 tokens", " 1 tokens (1 of version 3", *[" 1 tokens"] * 3]
    assert main(["samples", str(run), "--json"]) == 0
    rows = [json.loads(line)["version_spans"] for line in capsys.readouterr().out.splitlines()]
    assert rows == [None, None, *spans, None, None]


def test_what_is_printed_of_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run), "--dropped", "--best", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "batch 0  row 3  sample 0  reward 0.5  advantage 0  dropped (stale)",
        "  version 3-4, 1 tokens, finish stop; judge 0.5",
        "  prompt:",
        "  | 1+1=",
        "  | ",
        "  completion:",
        r"  | two\x1b[2J 0",
        "",
    ]


def test_a_run_without_samples_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run / "samples").iterdir():
        path.unlink()
    assert main(["samples", str(run)]) == 2
    assert "holds no samples: the run has generated none yet, or it was started with --log-samples none" in (
        capsys.readouterr().err
    )


def test_a_damaged_file_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "samples" / "batch-000002.parquet").write_bytes(b"PAR1 and so on")
    assert main(["samples", str(run)]) == 2
    assert "batch-000002.parquet is no whole Parquet file" in capsys.readouterr().err


def test_no_run_is_not_a_run_without_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'} does not exist; give a run directory" in capsys.readouterr().err


def test_a_count_below_one_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["samples", str(run), "--worst", "0"])
    assert refused.value.code == 2
    assert "--worst: '0' given, expected at least 1" in capsys.readouterr().err
