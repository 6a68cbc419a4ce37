"""Edges weighted by a run, against a count by hand."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from fsm_trainer.cli.replay import main
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.machines import TABLES
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.replay.diagrams import diagram
from fsm_trainer.replay.edge_counts import edge_counts, weighted_diagram
from tests.replay.virtual_run import log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=6, workers=2, max_staleness=1)
ROWS = virtual_run(CONFIG, degenerate={2})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return log_of(tmp_path / "run", ROWS, CONFIG)


def test_counts_are_those_of_the_rows(run: Path) -> None:
    by_hand = Counter((r.machine, r.trigger, r.source, r.dest) for r in ROWS if r.kind == "transition")
    counts = edge_counts(read_log(run).table)
    found = {(name, *edge): n for name, edges in counts.items() for edge, n in edges.items() if n}
    assert found == by_hand
    assert counts["trainer"]["train", "checking", "training"] == 6
    assert counts["batch"]["drop", "rewarded", "dropped"] + counts["batch"]["drop", "queued", "dropped"] == 1
    assert counts["trainer"]["refuse", "training", "waiting"] == 0
    assert {name: len(edges) for name, edges in counts.items()} == {n: len(t[2]) for n, t in TABLES.items()}


@pytest.mark.parametrize("name", TABLES)
def test_a_flowchart_has_each_edge_once_with_its_width(run: Path, name: str) -> None:
    counts = edge_counts(read_log(run).table)[name]
    text = weighted_diagram(name, counts)
    solid = re.findall(r'^    (\w+) -->\|"(\w+) (\d+)"\| (\w+)$', text, re.MULTILINE)
    dotted = re.findall(r'^    (\w+) -\.->\|"(\w+)"\| (\w+)$', text, re.MULTILINE)
    assert {(t, s, d): int(n) for s, t, n, d in solid} == {key: n for key, n in counts.items() if n}
    assert {(t, s, d) for s, t, d in dotted} == {key for key, n in counts.items() if not n}
    # Link 0 is the mark of the beginning.
    widths = dict(re.findall(r"^    linkStyle (\d+) stroke-width:([\d.]+)px$", text, re.MULTILINE))
    assert list(map(int, widths)) == list(range(1, len(counts) + 1))
    by_count = sorted(zip(counts.values(), map(float, widths.values()), strict=True))
    assert [w for _, w in by_count] == sorted(w for _, w in by_count), "the more often, the wider"
    assert by_count[-1][1] == 8.0


def test_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagram"]) == 0
    text = capsys.readouterr().out
    assert all(diagram(name) in text for name in TABLES)
    assert text.count("```mermaid") == len(TABLES)
    assert main(["diagram", "--machine", "engine"]) == 0
    assert capsys.readouterr().out == diagram("engine") + "\n"
    assert main(["diagram", str(run), "--machine", "run"]) == 0
    assert 'running -->|"drain 1"| draining' in capsys.readouterr().out
    assert main(["diagram", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["machines"]
    assert next(e for e in found["trainer"] if e["trigger"] == "take")["count"] == 7
    assert main(["diagram", "--json"]) == 0
    assert "count" not in json.loads(capsys.readouterr().out)["machines"]["trainer"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}"], "is not a run directory"),
        (["--machine", "warp"], "--machine is 'warp', expected one of rollout, trainer, engine, batch, run"),
    ],
)
def test_bad_usage_is_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["diagram", *(a.format(tmp=tmp_path) for a in arguments)]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert message in output.err
