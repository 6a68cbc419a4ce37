"""The tables of staleness and bias against a plain pass, and against numpy on numbers made for it."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fsm_trainer.analysis.bias import bias_table, sample_lengths
from fsm_trainer.analysis.source import Source
from fsm_trainer.analysis.staleness_plot import draw
from fsm_trainer.analysis.staleness_report import StalenessReport, staleness_report
from fsm_trainer.analysis.staleness_tables import by_step
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog.reader import read_log
from tests.analysis import plain
from tests.analysis.worlds import WORLDS, records_of
from tests.replay.virtual_run import log_of


def report_of(name: str, folder: Path, rows: int = 20) -> tuple[StalenessReport, tuple[Record, ...]]:
    config, records = records_of(name)
    return staleness_report(read_log(log_of(folder, list(records), config)), rows), records


@pytest.mark.parametrize("name", WORLDS)
def test_by_value_is_that_of_a_plain_pass(name: str, tmp_path: Path) -> None:
    report, records = report_of(name, tmp_path)
    batches = {number: b for number, b in plain.batches(records).items() if "consumed" in b}
    step_of = {batch: version for version, batch, _ in plain.steps(records)}
    metrics = {(r.train_version, r.reason): r for r in records if r.kind is RecordKind.METRIC}
    groups: dict[int, list[int]] = defaultdict(list)
    for number, batch in batches.items():
        groups[batch["staleness"]].append(number)
    assert report.by_value["staleness"].tolist() == sorted(groups)
    for row in report.by_value.to_dict("records"):
        numbers = groups[row["staleness"]]
        for state in ("trained", "dropped"):
            assert row[state] == sum(batches[n]["state"] == state for n in numbers)
        flights = [batches[n]["version_rewarded"] - batches[n]["first"] for n in numbers]
        assert row["staleness_in_flight"] == pytest.approx(np.mean(flights))
        assert row["staleness_in_flight"] + row["staleness_in_queue"] == pytest.approx(row["staleness"])
        found = [metrics[step_of[n], "ratio_mean"] for n in numbers if n in step_of]
        if found:
            weights = [r.denominator for r in found]
            assert row["ratio_mean"] == pytest.approx(np.average([r.value for r in found], weights=weights))  # type: ignore[arg-type]
        kls = [metrics[step_of[n], "approx_kl"].value or 0.0 for n in numbers if n in step_of]
        assert math.isnan(row["approx_kl"]) == all(map(math.isnan, kls))
        if not math.isnan(row["approx_kl"]):
            assert row["approx_kl"] == pytest.approx(np.nanmean(kls))
        assert math.isnan(row["logprob_gap"])


@pytest.mark.parametrize("rows", [1, 7, 20, 1000])
def test_by_step_covers_the_run_in_so_many_rows(rows: int, tmp_path: Path) -> None:
    report, records = report_of("greedy, drops", tmp_path, rows)
    table = report.by_step
    assert len(table) <= rows
    assert table["first_step"].iloc[0] == 1
    assert table["last_step"].iloc[-1] == 60
    assert (table["first_step"].iloc[1:].to_numpy() == table["last_step"].iloc[:-1].to_numpy() + 1).all()
    batches = [b for b in plain.batches(records).values() if "consumed" in b]
    for row in table.to_dict("records"):
        mine = [b for b in batches if row["first_step"] <= b["version_consumed"] + 1 <= row["last_step"]]
        assert (row["trained"], row["dropped"]) == tuple(
            sum(b["state"] == state for b in mine) for state in ("trained", "dropped")
        )
        assert row["staleness"] == pytest.approx(np.mean([b["staleness"] for b in mine]))
        assert row["staleness_max"] == max(b["staleness"] for b in mine)


def test_a_batch_dropped_after_the_last_step_makes_no_step(tmp_path: Path) -> None:
    report, _ = report_of("greedy, drops", tmp_path)
    late = report.batches.copy()
    late.loc[late.index[-1], ["state", "step", "train_version_consumed"]] = ["dropped", pd.NA, 60]
    late.loc[late.index[-2], ["state", "step"]] = ["trained", 60]
    config, records = records_of("greedy, drops")
    table = by_step(Source.of(read_log(log_of(tmp_path / "b", list(records), config))), late, 60)
    assert table["last_step"].max() == 60


def measures_of(groups: dict[str, list[float]]) -> pd.DataFrame:
    rows = [(group, tokens) for group, values in groups.items() for tokens in values]
    frame = pd.DataFrame(rows, columns=["group", "tokens"])
    return frame.assign(samples=4, reward=1.0, generate_s=frame["tokens"] / 10, truncated=0.0)


def test_bias_is_welch_s_difference_in_standard_errors() -> None:
    rng = np.random.default_rng(0)
    trained, dropped = rng.normal(100, 10, 200), rng.normal(130, 20, 50)
    table = bias_table(measures_of({"dropped (stale)": list(dropped), "trained": list(trained)})).set_index("group")
    assert list(table.index) == ["trained", "dropped (stale)"]
    row = table.loc["dropped (stale)"]
    error = math.sqrt(trained.var(ddof=1) / 200 + dropped.var(ddof=1) / 50)
    assert row["tokens"] == pytest.approx(dropped.mean())
    assert row["tokens_difference"] == pytest.approx(dropped.mean() - trained.mean())
    assert row["tokens_z"] == pytest.approx((dropped.mean() - trained.mean()) / error)
    assert row["generate_s_z"] == pytest.approx(row["tokens_z"])
    assert math.isnan(row["reward_z"])  # no spread, no standard error
    assert (row["batches"], row["samples"]) == (50, 200)
    assert math.isnan(table.loc["trained", "tokens_z"])


def report_with(measures: pd.DataFrame) -> StalenessReport:
    none = pd.DataFrame()
    return StalenessReport(none, none, none, bias_table(measures), measures, samples_kept=True)


def test_findings_say_what_differs_and_what_does_not() -> None:
    groups = {
        "trained": [95.0, 105.0] * 50,
        "dropped (stale)": [145.0, 155.0] * 20,
        "dropped (no_step)": [96.0, 105.0] * 20,
        "cancelled (stopping)": [100.0, 101.0],
    }
    found = report_with(measures_of(groups)).findings
    assert [line.split(" (z")[0] for line in found if "(stale)" in line] == [
        "dropped (stale): 50 % longer than trained ones",
        "dropped (stale): 50 % slower to generate than trained ones",
    ]
    assert "dropped (no_step): no difference to the trained ones beyond 3 standard errors" in found
    assert "cancelled (stopping): too few (2) to compare" in found
    assert report_with(measures_of({"dropped (stale)": [1.0] * 9})).findings == []


def test_lengths_are_those_of_the_kept_completions(tmp_path: Path) -> None:
    """Two batches of two samples: prompts of 2 tokens, completions of 1, 3, 2 and 0."""
    config, records = records_of("greedy, drops")
    run = log_of(tmp_path, list(records), config)
    (run / "samples").mkdir()
    for batch, lengths in ((1, (1, 3)), (3, (2, 0))):
        columns = {
            "batch_id": [batch] * 2,
            "prompt_len": [2, 2],
            "tokens": [[7] * (2 + length) for length in lengths],
            "reward": [1.0, None],
            "finish_reason": ["length", "stop"],
            "state": ["open"] * 2,
        }
        pq.write_table(pa.table(columns), run / "samples" / f"batch-{batch}.parquet")
    samples = sample_lengths(run)
    assert samples is not None
    assert samples["tokens"].tolist() == [1, 3, 2, 0]
    report = staleness_report(read_log(run))
    assert report.samples_kept
    batches = plain.batches(records)
    for row in report.measures.to_dict("records"):
        batch = batches[row["batch_id"]]
        assert row["group"] == (f"dropped ({batch['reason']})" if batch["state"] == "dropped" else batch["state"])
        assert row["tokens"] == {1: 2.0, 3: 1.0}[row["batch_id"]]
        assert (row["reward"], row["truncated"], row["samples"]) == (1.0, 0.5, 2)
        assert row["generate_s"] * 1e9 == pytest.approx(batch["generate_op"])


def test_without_samples_the_tokens_of_the_batch_count(tmp_path: Path) -> None:
    report, records = report_of("greedy, drops", tmp_path)
    batches = plain.batches(records)
    assert not report.samples_kept
    assert {row["batch_id"]: row["tokens"] for row in report.measures.to_dict("records")} == {
        number: b["tokens"] for number, b in batches.items() if "generated" in b and b["state"] != "open"
    }


@pytest.mark.parametrize("name", ["greedy, drops", "fails"])
def test_json_form_is_json(name: str, tmp_path: Path) -> None:
    report, _ = report_of(name, tmp_path)
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert len(json.loads(text)["by_batch"]) == len(report.batches)


@pytest.mark.parametrize(("name", "suffix"), [("greedy, drops", ".png"), ("lockstep", ".svg"), ("fails", ".pdf")])
def test_plot_is_drawn(name: str, suffix: str, tmp_path: Path) -> None:
    report, _ = report_of(name, tmp_path)
    path = tmp_path / f"plot{suffix}"
    draw(report, path)
    head = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(head)
    assert path.stat().st_size > 5000


def test_plot_has_the_bars_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: drawn.append(self))
    report, _ = report_of("greedy, drops", tmp_path)
    draw(report, tmp_path / "plot.png")
    steps = drawn[0].axes[0]
    heights = [bar.get_height() for bar in steps.patches]
    table = report.by_step
    assert heights == pytest.approx([*table["staleness_in_flight"], *table["staleness_in_queue"]])
