"""Keeps the samples of each batch for people to read: one Parquet file a prompt batch in the run's `samples/`.

A file is written when the completions are there, again with their rewards, and once more with how the batch ended; each
time whole or not at all. So what was generated outlives a crash, as the samples of a batch whose state is `open`.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from fsm_trainer.core.batch import TrainSequence
from fsm_trainer.core.events import Input, InputKind
from fsm_trainer.data.prompts import PromptBatch
from fsm_trainer.engines.base import Rollout
from fsm_trainer.runtime.threads import LaneThread

OPEN = "open"
"""State of a batch of which no end is known."""
REWARD_PREFIX = "reward_"
SAMPLE_SCHEMA = pa.schema(
    [
        pa.field("batch_id", pa.int64()),
        pa.field("state", pa.utf8(), metadata={"meaning": "how the batch ended: trained, dropped, ...; or open"}),
        pa.field("reason", pa.utf8(), metadata={"meaning": "why it was not trained on"}),
        pa.field("epoch", pa.int64()),
        pa.field("row", pa.int64(), metadata={"meaning": "row of the dataset, from 0"}),
        pa.field("sample", pa.int64(), metadata={"meaning": "completion of the prompt group, from 0"}),
        pa.field("prompt", pa.utf8()),
        pa.field("completion", pa.utf8()),
        pa.field("prompt_len", pa.int64(), metadata={"meaning": "tokens of the prompt"}),
        pa.field("tokens", pa.list_(pa.int64()), metadata={"meaning": "token ids of prompt and completion"}),
        pa.field("logprobs", pa.list_(pa.float64()), metadata={"meaning": "aligned with tokens, 0 on the prompt"}),
        pa.field("reward", pa.float64(), metadata={"meaning": "weighted sum; null if there is none"}),
        pa.field("advantage", pa.float64(), metadata={"meaning": "null before there are rewards"}),
        pa.field("finish_reason", pa.utf8()),
        pa.field("rollout_version_first", pa.int64(), metadata={"meaning": "policy version at the first token"}),
        pa.field("rollout_version_last", pa.int64(), metadata={"meaning": "policy version at the last token"}),
        pa.field(
            "version_spans",
            pa.list_(pa.struct([pa.field("version", pa.int64()), pa.field("tokens", pa.int64())])),
            metadata={"meaning": "which version drew which tokens of the completion, in order; empty: one drew all"},
        ),
    ]
)
"""Columns of every file; after them one `reward_NAME` for each reward function, before its weight."""
_REPEATED = ["state", "reason", "prompt", "finish_reason"]
_log = structlog.get_logger("fsm_train")


def sample_schema(functions: Sequence[str]) -> pa.Schema:
    """The columns of a run with these reward functions."""
    return pa.schema([*SAMPLE_SCHEMA, *(pa.field(REWARD_PREFIX + name, pa.float64()) for name in functions)])


class SampleWriter:
    """Writes on a thread of its own; every method returns at once. Told of a batch in order: begun, rewarded, ended."""

    def __init__(
        self,
        folder: Path,
        functions: Sequence[str],
        on_failure: Callable[[Exception], None],
        *,
        keep: int | None = None,
    ) -> None:
        """`keep`: files of ended batches that stay, the newest; None for all. `on_failure` hears of the first."""
        self._folder = folder
        self._schema = sample_schema(functions)
        self._on_failure = on_failure
        self._keep = keep
        self._thread = LaneThread("fsm-samples")
        self._tables: dict[int, pa.Table] = {}
        self._ended: set[int] = set()
        """Over, and not written as such yet."""
        self._final: deque[int] = deque()
        self._failed = False
        self._waiting: Counter[int] = Counter()
        self._lock = threading.Lock()
        """Guards `_waiting`; the rest belongs to the thread."""

    def begun(self, prompts: PromptBatch, rollout: Rollout, completions: Callable[[], Sequence[str]]) -> None:
        """A batch's completions are there; `completions` makes their texts, in the order of the rollout's groups."""

        def make() -> None:
            self._tables[prompts.batch_id] = _table(self._schema, prompts, rollout, completions())

        self._post(prompts.batch_id, make)

    def rewarded(
        self, batch_id: int, sequences: Sequence[TrainSequence], by_function: dict[str, list[float | None]]
    ) -> None:
        """They have rewards and advantages."""

        def change() -> None:
            # No reward is NaN in a train sequence.
            total = [s.reward if s.reward == s.reward else None for s in sequences]
            self._set(batch_id, reward=total, advantage=[s.advantage for s in sequences])
            self._set(batch_id, **{REWARD_PREFIX + name: values for name, values in by_function.items()})

        self._post(batch_id, change)

    def ended(self, batch_id: int, state: str, reason: str | None) -> None:
        """The batch is over; one of which no completions are known leaves no file."""

        def change() -> None:
            if batch_id in self._tables:
                count = self._tables[batch_id].num_rows
                self._set(batch_id, state=[state] * count, reason=[reason] * count)
                self._ended.add(batch_id)

        self._post(batch_id, change)

    def close(self, timeout_s: float) -> bool:
        """Write what is left; whether that was done in time."""
        self._thread.close()
        return self._thread.join(timeout_s)

    def _post(self, batch_id: int, change: Callable[[], None]) -> None:
        with self._lock:
            self._waiting[batch_id] += 1
        self._thread.post(lambda: self._do(batch_id, change))

    def _do(self, batch_id: int, change: Callable[[], None]) -> None:
        with self._lock:
            self._waiting[batch_id] -= 1
            newer = self._waiting[batch_id] > 0
            if not newer:
                del self._waiting[batch_id]
        try:
            change()
            if not newer and batch_id in self._tables:
                self._write(batch_id)
        except Exception as error:  # of the disk, or whatever a tokenizer raises; the thread has to go on
            self._tell(error)

    def _write(self, batch_id: int) -> None:
        over = batch_id in self._ended
        table = self._tables.pop(batch_id) if over else self._tables[batch_id]
        self._ended.discard(batch_id)
        path = self._path(batch_id)
        partial = path.with_suffix(".partial")
        # Logprobs never repeat, so trying a dictionary for them costs time and gains nothing.
        pq.write_table(table, partial, compression="zstd", use_dictionary=_REPEATED)
        partial.rename(path)
        if over and self._keep is not None:
            self._final.append(batch_id)
            if len(self._final) > self._keep:
                self._path(self._final.popleft()).unlink(missing_ok=True)

    def _tell(self, error: Exception) -> None:
        if not self._failed:
            _log.error("samples_not_written", message=str(error))
            self._on_failure(error)
        self._failed = True

    def _set(self, batch_id: int, **columns: Sequence[object]) -> None:
        table = self._tables.get(batch_id)
        if table is None:
            return
        for name, values in columns.items():
            index = self._schema.get_field_index(name)
            field = self._schema.field(index)
            table = table.set_column(index, field, pa.array(values, field.type))
        self._tables[batch_id] = table

    def _path(self, batch_id: int) -> Path:
        return self._folder / f"batch-{batch_id:06d}.parquet"


def make_sample_writer(
    log_samples: str, folder: Path, functions: Sequence[str], post: Callable[[Input], None]
) -> SampleWriter | None:
    """The writer that `--log-samples` asks for. Samples that cannot be written fail the run."""
    if log_samples == "none":
        return None

    def fail(error: Exception) -> None:
        message = f"samples cannot be written to {folder}: {error}"
        post(Input(InputKind.FAILED, reason=type(error).__name__, message=message))

    return SampleWriter(folder, functions, fail, keep=None if log_samples == "all" else int(log_samples))


def _table(schema: pa.Schema, prompts: PromptBatch, rollout: Rollout, completions: Sequence[str]) -> pa.Table:
    """One batch's samples before they have rewards."""
    samples = [sample for group in rollout.groups for sample in group]
    counts = [len(group) for group in rollout.groups]
    prompt_tokens = [tokens for tokens, n in zip(prompts.prompt_tokens, counts, strict=True) for _ in range(n)]
    pairs = list(zip(prompt_tokens, samples, strict=True))
    columns: dict[str, list[object]] = {
        "batch_id": [prompts.batch_id] * len(samples),
        "state": [OPEN] * len(samples),
        "epoch": [prompts.epoch] * len(samples),
        "row": _spread(prompts.row_indices, counts),
        "sample": [i for n in counts for i in range(n)],
        "prompt": _spread(prompts.prompt_texts, counts),
        "completion": list(completions),
        "prompt_len": [len(tokens) for tokens in prompt_tokens],
        "tokens": [(*prompt, *sample.tokens) for prompt, sample in pairs],
        "logprobs": [(*(0.0,) * len(prompt), *sample.logprobs) for prompt, sample in pairs],
        "finish_reason": [sample.finish_reason for sample in samples],
        "rollout_version_first": [rollout.version_first] * len(samples),
        "rollout_version_last": [rollout.version_last] * len(samples),
        "version_spans": [[span._asdict() for span in sample.spans] for sample in samples],
    }
    unknown: list[object] = [None] * len(samples)
    return pa.table({name: columns.get(name, unknown) for name in schema.names}, schema=schema)


def _spread(values: Sequence[object], counts: Sequence[int]) -> list[object]:
    """Repeat each prompt's value for each of its samples."""
    return [value for value, n in zip(values, counts, strict=True) for _ in range(n)]
