"""Makes the small run that examples/staleness_analysis.ipynb analyses: `python tools/example_run.py FOLDER`.

A real run of the quickstart's task, with greedy admission and two rollout workers, so that it has stale batches and
drops; its log is compacted and its samples are put into one file without their logprobs, to keep it small.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SETTINGS = (
    *("--preset", "quickstart", "--max-steps", "100", "--log-compact"),
    *("--async-admission", "greedy", "--async-rollout-workers", "2", "--async-max-staleness", "1"),
    *("--batch-size", "8", "--n-samples", "8", "--max-new-tokens", "8", "--mini-bs", "64"),
)


def main() -> None:
    """Train, then keep what the analysis needs."""
    target = Path(sys.argv[1])
    if target.exists():
        sys.exit(f"{target} exists already; remove it, or name another folder")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-m", "fsm_trainer.cli.train", *SETTINGS, "--output-dir", "run"]
        subprocess.run(command, check=True, cwd=folder)
        (target / "samples").mkdir(parents=True)
        for name in ("events.arrow", "config.json"):
            shutil.copy(run / name, target / name)
        tables = [pq.read_table(path) for path in sorted((run / "samples").glob("*.parquet"))]
    samples = pa.concat_tables(tables, promote_options="default").drop_columns(["logprobs"])
    pq.write_table(samples, target / "samples" / "samples.parquet", compression="zstd", compression_level=19)


if __name__ == "__main__":
    main()
