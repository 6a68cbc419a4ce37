"""A few samples of a run for the report: the best and the worst of its newest batches, read without the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsm_trainer.analysis.samples import read_files

BATCHES = 3
"""Newest batches that samples are taken from."""
EACH = 2
"""Samples shown of the best, and of the worst."""
MOST_CHARACTERS = 1500
_COLUMNS = ("batch_id", "row", "sample", "prompt", "completion", "reward", "state", "finish_reason")


@dataclass(frozen=True)
class Sample:
    """One completion for reading."""

    title: str
    about: str
    prompt: str
    completion: str


def some_samples(run: Path) -> tuple[list[Sample], str]:
    """The samples, and a sentence that says which they are or why there are none."""
    # A file is one batch, or all of them once the run has ended.
    newest = sorted((run / "samples").glob("*.parquet"))[-BATCHES:]
    rows = [{**dict.fromkeys(_COLUMNS), **row} for t in read_files(newest, _COLUMNS) for row in t.to_pylist()]
    batches = sorted({row["batch_id"] for row in rows})[-BATCHES:]
    rows = [row for row in rows if row["batch_id"] in batches]
    scored = sorted((row for row in rows if row["reward"] is not None), key=lambda row: row["reward"])
    if not scored:
        return [], "The run kept no samples with a reward."
    worst = scored[:EACH]
    best = [row for row in reversed(scored[-EACH:]) if row not in worst]
    note = (
        f"The best and the worst of batches {', '.join(map(str, batches))}, the newest kept; "
        f"fsm-replay samples prints all."
    )
    return [*(_sample("Best", row) for row in best), *(_sample("Worst", row) for row in worst)], note


def _sample(kind: str, row: dict[str, Any]) -> Sample:
    return Sample(
        title=f"{kind}: reward {row['reward']:.4g}",
        about=f"batch {row['batch_id']}, row {row['row']}, sample {row['sample']}; {row['state']}, "
        f"finish {row['finish_reason']}",
        prompt=_cut(row["prompt"]),
        completion=_cut(row["completion"]),
    )


def _cut(text: str | None) -> str:
    text = text or ""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} [... {len(text)} characters]"
