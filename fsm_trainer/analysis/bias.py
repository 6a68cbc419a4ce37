"""Whether the batches that were generated and not trained on differ from those that were: in length, reward, time.

Dropping the slow ones, which greedy admission does, drops the long ones, and biases what is learnt.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from fsm_trainer.analysis.batches import batches_frame
from fsm_trainer.analysis.samples import read_files
from fsm_trainer.analysis.source import Source

MEASURES = ("tokens", "reward", "generate_s")
"""What is compared: mean completion length of a batch's samples, their mean reward, seconds to generate the batch."""
_WANTED = ["batch_id", "prompt_len", "tokens", "reward", "finish_reason"]


def sample_lengths(folder: Path) -> pd.DataFrame | None:
    """One row per kept sample: `batch_id`, `tokens` of its completion, `reward`, `truncated`; None if none is kept."""
    tables = read_files(sorted((folder / "samples").glob("*.parquet")), _WANTED)
    if not tables:
        return None
    samples: pd.DataFrame = pd.concat([_lengths(table) for table in tables], ignore_index=True)
    return samples


def _lengths(table: pa.Table) -> pd.DataFrame:
    length = pc.subtract(pc.list_value_length(table["tokens"]), table["prompt_len"])
    columns = {
        "batch_id": table["batch_id"],
        "tokens": length.cast(pa.int64()),
        "reward": table["reward"].cast(pa.float64()),
        "truncated": pc.equal(table["finish_reason"], "length"),
    }
    frame: pd.DataFrame = pa.table(columns).to_pandas()
    return frame


def batch_measures(source: Source, samples: pd.DataFrame | None) -> pd.DataFrame:
    """One row per generated batch that has ended: `group` (trained, or what became of it and why), and `MEASURES`.

    Without samples, `tokens` is what the engine counted of the whole batch, and `reward` is nan.
    """
    batches = batches_frame(source)
    done = batches[batches["generated_at_s"].notna() & (batches["state"] != "open")]
    reason = done["reason"].astype(object)
    why = done["state"].astype(str) + (" (" + reason + ")").fillna("")
    frame = pd.DataFrame(
        {
            "batch_id": done["batch_id"],
            "group": why.where(done["state"] != "trained", "trained"),
            "samples": 0,
            "tokens": done["tokens"].astype(np.float64),
            "reward": np.nan,
            "truncated": np.nan,
            "generate_s": done["generate_op_s"],
        }
    ).reset_index(drop=True)
    if samples is None:
        counted: pd.DataFrame = frame
        return counted
    of_batch = samples.groupby("batch_id").agg(
        samples=("tokens", "size"),
        tokens=("tokens", "mean"),
        reward=("reward", "mean"),
        truncated=("truncated", "mean"),
    )
    found: pd.DataFrame = frame.drop(columns=list(of_batch.columns)).join(of_batch, on="batch_id", how="inner")
    return found


def bias_table(measures: pd.DataFrame) -> pd.DataFrame:
    """One row per group, `trained` first: batches, samples, and of each measure its mean over batches, its difference
    to that of the trained ones and `z`, the difference in standard errors (Welch): beyond 3 it is no chance.

    A batch counts once however many samples it has, since samples of one batch are alike.
    """
    groups = measures.groupby("group")
    table = pd.DataFrame({"batches": groups.size(), "samples": groups["samples"].sum()})
    table["truncated"] = groups["truncated"].mean()
    for name in MEASURES:
        mean, variance = groups[name].mean(), groups[name].var() / groups[name].count()
        table[name] = mean
        if "trained" in table.index:
            difference = mean - mean["trained"]
            error = np.sqrt(variance + variance["trained"])
            table[f"{name}_difference"] = difference
            table[f"{name}_z"] = (difference / error.where(error > 0)).where(table.index != "trained")
        else:
            table[f"{name}_difference"] = table[f"{name}_z"] = np.nan
    order = sorted(table.index, key=lambda group: (group != "trained", group))
    ordered: pd.DataFrame = table.loc[order].reset_index()
    return ordered
