"""The page: what is in it, that text of a run cannot become markup, that it aggregates, and the command."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fsm_trainer.cli.replay import main
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.report import build
from fsm_trainer.report.build import build_report
from fsm_trainer.report.chart import Chart, Table
from fsm_trainer.report.learning_charts import learning_charts, staleness_charts, sync_chart
from fsm_trainer.report.run_data import RunData
from fsm_trainer.report.samples import some_samples
from fsm_trainer.report.sections import key_figures
from fsm_trainer.report.time_charts import time_charts
from tests.analysis.worlds import records_of
from tests.replay.virtual_run import log_of, virtual_run
from tests.report.made_run import CONFIG, HARM, charts_of, make_run

SECTIONS = ("advice", "figures", "time", "learning", "stale", "sync", "dropped", "samples", "settings", "log")


class Page(HTMLParser):
    """Elements and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._script = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if not self._script:
            self.text += data

    def ids(self) -> list[str]:
        return [str(a["id"]) for _, a in self.tags if "id" in a]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "harm<b>ed & run")


@pytest.fixture(scope="module")
def html(run: Path) -> str:
    return build_report(read_log(run)).html


def test_every_section_and_chart_is_there(run: Path, html: str) -> None:
    page = Page(html)
    sections = [a["id"] for tag, a in page.tags if tag == "section"]
    assert sections == [*SECTIONS]
    links = [a["href"] for tag, a in page.tags if tag == "a"]
    assert links == ["#main", *(f"#{name}" for name in sections)]
    places = [a["id"] for _, a in page.tags if a.get("class") == "chart"]
    drawn = [chart["id"] for chart in charts_of(html)]
    assert drawn == places == list(build_report(read_log(run)).charts)
    assert {"closeup", "residency", "shares-trainer", "shares-rollout", "queue", "drops", "syncs"} <= set(drawn)
    assert {"metric-reward_mean", "metric-loss", "metric-entropy", "staleness", "staleness-parts"} <= set(drawn)
    tables = [tag for tag, _ in page.tags if tag == "table"]
    assert len(tables) == len(drawn) + 1, "a table behind each chart, and the settings"
    assert len(set(page.ids())) == len(page.ids())


def test_the_parts_of_a_load_are_drawn_where_the_engines_say_them(run: Path, tmp_path: Path) -> None:
    always = ["export", "load", "gate closed"]
    plain = sync_chart(RunData(read_log(run)))
    assert plain is not None
    assert [trace["name"] for trace in plain.traces] == [row[0] for row in plain.table.rows] == always
    config, records = records_of("paced")
    told = sync_chart(RunData(read_log(log_of(tmp_path, list(records), config))))
    assert told is not None
    assert [row[0] for row in told.table.rows] == [*always, "pause", "transfer", "resume"]
    # The world's loads of odd versions took a quarter of their version, in seconds.
    assert told.traces[4]["y"][:3] == pytest.approx([250.0, 750.0, 1250.0])
    assert "parts of the load" in told.caption and "parts of the load" not in plain.caption


def test_text_of_a_run_stays_text(html: str) -> None:
    page = Page(html)
    assert sum(tag == "script" for tag, _ in page.tags) == 3
    assert not [a for tag, a in page.tags if tag in ("img", "b")]
    # Once in the message, in 4 samples each in prompt and completion, and in one setting.
    assert page.text.count(HARM) == 1 + 4 * 2 + 1
    assert "harm<b>ed & run" in page.text


def test_a_chart_cannot_end_its_script() -> None:
    chart = Chart(HARM, HARM, HARM, [{"name": HARM, "x": [1.0]}], Table((), ()), {"title": {"text": HARM}})
    text = build._json_in_html([chart])
    assert "<" not in text
    assert json.loads(text) == [chart.spec()]


def test_nothing_is_loaded_from_outside(html: str) -> None:
    page = Page(html)
    for _, attributes in page.tags:
        assert not attributes.keys() & {"srcset", "action", "onerror"}
        assert not str(attributes.get("src") or "").strip()
        assert str(attributes.get("href") or "#").startswith(("#", "data:,"))
    assert "@import" not in html
    assert not re.search(r"url\((?!data:)", html.split('id="plotly"')[0])


def test_figures_are_those_of_the_run(run: Path) -> None:
    figures = dict(key_figures(RunData(read_log(run))))
    assert figures["Optimiser steps"] == "60"
    assert figures["Batches dropped"] == "3"
    expected = sum(1 - math.exp(-step / 20) for step in range(55, 61)) / 6
    log = read_log(run)
    rows = log.table.select(["t_ns", "kind", "machine", "trigger", "dest", "tokens"]).to_pylist()
    (up,) = [r["t_ns"] for r in rows if r["machine"] == "run" and r["dest"] == "running" and r["kind"] == "transition"]
    made = sum(r["tokens"] or 0 for r in rows if r["machine"] == "batch" and r["trigger"] == "generated")
    assert figures["Generated tokens a second"] == f"{made / (rows[-1]['t_ns'] - up) * 1e9:,.0f}"
    assert figures["Reward, last tenth of the steps"] == f"{expected:.4g}"


def test_states_and_causes_of_a_machine_have_colours_of_their_own(html: str) -> None:
    chart = next(c for c in charts_of(html) if c["id"] == "residency")
    colours = {t["name"]: t["marker"]["color"] for t in chart["data"]}  # type: ignore[attr-defined]
    assert colours["open (generating)"] != colours["open (no batch)"]


def test_curves_hold_the_metrics(html: str) -> None:
    reward = next(c for c in charts_of(html) if c["id"] == "metric-reward_mean")
    (line,) = reward["data"]  # type: ignore[misc]
    assert line["x"] == list(range(1, 61))
    assert line["y"][19] == pytest.approx(1 - 2.718281828**-1, rel=1e-4)


def test_a_long_run_takes_little_more_than_a_short_one(tmp_path: Path) -> None:
    sizes = {}
    for steps in (250, 1500):
        config = SchedulerConfig(max_steps=steps, workers=2, max_staleness=1)
        data = RunData(read_log(make_run(tmp_path / str(steps), config=config, samples=False)))
        charts = [*time_charts(data), *learning_charts(data), *staleness_charts(data)]
        sizes[steps] = len(json.dumps([chart.spec() for chart in charts]))
        assert all(len(trace["x"]) <= 300 for chart in charts for trace in chart.traces)
        assert all(len(chart.table.rows) <= 80 for chart in charts)
    assert sizes[1500] < 1.3 * sizes[250] < 200_000


@pytest.mark.parametrize("size", [1, 3, 20, 60, 130, 300])
def test_a_run_cut_anywhere_has_a_report(tmp_path: Path, size: int) -> None:
    config = SchedulerConfig(max_steps=20)
    html = build_report(read_log(log_of(tmp_path, virtual_run(config)[:size], config))).html
    assert "the run crashed" in html
    charts_of(html)


def test_a_failed_run_says_so(tmp_path: Path) -> None:
    config = SchedulerConfig(max_steps=20)
    html = build_report(read_log(log_of(tmp_path, virtual_run(config, fail_generation_of=4), config))).html
    page = Page(html)
    assert "outcome bad" in [a.get("class") for _, a in page.tags]
    assert "generate of batch 4 failed: RuntimeError: no memory" in page.text


def test_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert "Training-bound" in capsys.readouterr().out
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    other = tmp_path / "other.html"
    assert main(["report", str(run), "-o", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(other)
    assert found["bytes"] == other.stat().st_size
    assert found["advice"]["bound"] == "training"
    (run / "report.html").unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}"], "is not a run directory"),
        (["{run}", "-o", "{tmp}"], "is a folder"),
        (["{run}", "-o", "{tmp}/none/x.html"], "cannot be written: No such file or directory"),
        (["{empty}"], "holds no event, so there is nothing to report"),
    ],
)
def test_bad_usage_is_2_and_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    empty = log_of(tmp_path / "empty", [], CONFIG)
    assert main(["report", *(a.format(tmp=tmp_path, run=run, empty=empty) for a in arguments)]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert message in output.err


@pytest.mark.parametrize("library", ["plotly", "jinja2"])
def test_a_library_that_lacks_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    build._library.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "jinja2" if library == "jinja2" else "plotly.offline", None)
    assert main(["report", str(run), "-o", str(tmp_path / "x.html")]) == 2
    assert "pip install 'fsm-trainer[report]'" in capsys.readouterr().err
    assert not (tmp_path / "x.html").exists()


def test_samples_are_of_the_newest_batches_whether_or_not_they_are_in_one_file(run: Path, tmp_path: Path) -> None:
    apart, note = some_samples(run)
    tables = [pq.read_table(path) for path in sorted((run / "samples").glob("*.parquet"))]
    batches = sorted({batch for table in tables for batch in table["batch_id"].to_pylist()})
    assert f"batches {', '.join(map(str, batches[-3:]))}, the newest" in note
    (tmp_path / "samples").mkdir()
    pq.write_table(pa.concat_tables(tables), tmp_path / "samples" / "samples.parquet")
    assert some_samples(tmp_path) == (apart, note)
