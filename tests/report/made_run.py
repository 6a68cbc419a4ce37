"""A made-up run with everything a report can show: drops, metrics, samples, and text that means harm."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import write_log
from tests.replay.virtual_run import virtual_run

HARM = (
    "</script><script>document.title='harmed'</script><img src=x onerror=\"document.title='harmed'\">&amp;{{ 7 * 7 }}"
)
CONFIG = SchedulerConfig(max_steps=60, workers=2, engines=2, max_staleness=1)


def with_metrics(rows: list[Record]) -> list[Record]:
    """The same with the metrics of each step, and seq dense again."""
    found: list[Record] = []
    renumbered: dict[int, int] = {}
    for row in rows:
        renumbered[row.seq] = len(found)
        cause = None if row.cause_seq is None else renumbered[row.cause_seq]
        found.append(row._replace(seq=len(found), cause_seq=cause))
        if row.kind is RecordKind.VERSION and row.trigger == "step":
            step = row.train_version or 0
            for name, value in (
                ("reward_mean", 1 - math.exp(-step / 20)),
                ("loss", -0.1 / step),
                ("entropy", 3 / step),
            ):
                found.append(
                    Record(
                        len(found),
                        row.t_ns,
                        RecordKind.METRIC,
                        machine="trainer",
                        cause_seq=renumbered[row.seq],
                        batch_id=row.batch_id,
                        train_version=row.train_version,
                        value=value,
                        reason=name,
                    )
                )
    return found


def make_run(folder: Path, *, config: SchedulerConfig = CONFIG, samples: bool = True, harm: str = HARM) -> Path:
    """The run's folder."""
    folder.mkdir(parents=True)
    rows = with_metrics(virtual_run(config, degenerate={3, 4}, no_step={7}))
    rows[-1] = rows[-1]._replace(message=f"max_steps reached {harm}")
    write_log(folder / LOG_NAME, rows, log_metadata(config, {"ckpt": harm, "lr": 1e-6, "tools": [harm]}))
    if samples:
        write_samples(folder, harm)
    return folder


def write_samples(run: Path, harm: str = HARM) -> None:
    (run / "samples").mkdir()
    for batch in (5, 6):
        count = 4
        columns = {
            "batch_id": [batch] * count,
            "state": ["trained"] * count,
            "row": list(range(count)),
            "sample": [0] * count,
            "prompt": [f"{batch} {harm}"] * count,
            "completion": [f"answer {i} {harm}" for i in range(count)],
            "reward": [0.25 * i for i in range(count)],
            "finish_reason": ["stop"] * count,
        }
        pq.write_table(pa.table(columns), run / "samples" / f"batch-{batch:06d}.parquet")


def charts_of(html: str) -> list[dict[str, object]]:
    """The specs in a page."""
    text = html.split('id="charts">')[1].split("</script>")[0]
    return list(json.loads(text))
